"""What an environment does where its author wrote `step` alone."""

from __future__ import annotations

import numpy as np

from hybridflow.core.contracts.environment import Answer, Environment, Start, Turn


class Once(Environment):
    def step(self, turn):
        return Answer(reward=float(len(turn.ids)), done=True)


def test_an_episode_begins_with_the_prompt_alone_and_ends_when_the_answer_says_so():
    environment = Once()
    begun = environment.reset(Start("1+1=", {"answer": "2"}, 0))
    assert begun == Answer("", 0.0, False, "")
    answer = environment.step(Turn(0, "2", np.array([5, 2]), True))
    assert (answer.reward, answer.done) == (2.0, True)
    assert environment.stops == () and not environment.own_prompt
    environment.close()
