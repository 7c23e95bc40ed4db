"""Gymnasium's worlds as texts: the contract, observations, actions, rewards and what is refused."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Text

from hybridflow.backends.environments.gymnasium import Gymnasium, written
from hybridflow.core.contracts.environment import Answer, Start
from hybridflow.core.errors import ConfigError
from hybridflow.kit.testing import EnvironmentConformance

MOVES = ("w", "s", "e", "n")
LAKE = {"id": "FrozenLake-v1", "actions": MOVES}
turn = EnvironmentConformance.turn


def begun(seed=0, meta=None, **options):
    world = Gymnasium(**options)
    return world, world.reset(Start("go", meta or {}, seed))


class TestBlackjack(EnvironmentConformance):
    @pytest.fixture
    def make(self):
        return lambda: Gymnasium(
            "Blackjack-v1", ["stick", "hit"], opening="", answer="you: {observation}\n"
        )

    def episode(self, environment, texts=("I hit", "and hit", "stick", "?"), **how):
        return super().episode(environment, texts, **how)


class TestSlipperyLake(EnvironmentConformance):
    @pytest.fixture
    def make(self):
        return lambda: Gymnasium(**LAKE, observe="ansi")

    def episode(self, environment, texts=MOVES, **how):
        return super().episode(environment, texts, **how)


def test_a_walk_over_a_lake_that_is_not_slippery():
    """The map of FrozenLake is SFFF, FHFH, FFFH, HFFG: south, south, east, east, south, east."""
    world, said = begun(**LAKE, settings={"is_slippery": False}, opening="field {observation}>")
    assert said.text == "field 0>"
    fields = []
    for number, move in enumerate("sseese"):
        said = world.step(turn(move, number))
        fields.append(said.text)
    assert fields[:-1] == ["4", "8", "9", "10", "14"]
    assert said == Answer(reward=1.0, done=True)
    world.close()


def test_the_last_action_that_a_turn_names_is_taken_in_any_case():
    world, _ = begun(
        id="FrozenLake-v1",
        actions=["left", "down", "right", "up"],
        settings={"is_slippery": False},
        answer="{observation} ({reward})\n",
        invalid_reward=-0.5,
    )
    assert world.step(turn("Not left, so: DOWN!")).text == "4 (0)\n"
    nothing = world.step(turn("I do not know", 1))
    assert (nothing.text, nothing.reward, nothing.done) == ("4 (-0.5)\n", -0.5, False)
    assert world.step(turn("up and right", 2)) == Answer(reward=0.0, done=True)  # a hole


def test_of_two_names_that_begin_alike_the_whole_one_is_taken():
    actions = ["north", "northeast", "e", "east"]
    world, _ = begun(id="FrozenLake-v1", actions=actions)
    assert world._action("go northeast") == 1 and world._action("east") == 3


def test_a_drawing_has_brackets_where_the_player_is():
    world, said = begun(**LAKE, observe="ansi", settings={"is_slippery": False})
    assert said.text == "[S]FFF\nFHFH\nFFFH\nHFFG"
    # Gymnasium names the last move above.
    assert world.step(turn("s")).text == "  (Down)\nSFFF\n[F]HFH\nFFFH\nHFFG"


def test_the_rows_seed_draws_the_world_and_the_sequences_own_where_there_is_none():
    blackjack = {"id": "Blackjack-v1", "actions": ["s", "h"]}
    hands = [begun(seed=seed, **blackjack)[1].text for seed in range(8)]
    assert len(set(hands)) > 4
    of_rows = [begun(seed=99, meta={"seed": seed}, **blackjack)[1].text for seed in range(8)]
    assert of_rows == hands
    expected = [
        ",".join(map(str, gymnasium.make("Blackjack-v1").reset(seed=s)[0])) for s in range(8)
    ]
    assert hands == expected


def test_actions_of_one_token_may_end_their_turn():
    assert Gymnasium(**LAKE).stops == ()
    assert Gymnasium(**LAKE, single_tokens=True).stops == MOVES


class Echo(gymnasium.Env):
    """Its actions are texts."""

    action_space = Text(8, charset="abc")
    observation_space = Text(8, charset="abc")

    def reset(self, *, seed=None, options=None):
        return "a", {}

    def step(self, action):
        return action[::-1], len(action), action == "c", False, {}


class Continuous(Echo):
    action_space = Box(0.0, 1.0)


@pytest.fixture
def echo():
    for cls in (Echo, Continuous):
        gymnasium.register(cls.__name__, cls, disable_env_checker=True)
    yield
    for cls in (Echo, Continuous):
        del gymnasium.registry[cls.__name__]


def test_a_world_of_text_takes_the_turn_itself(echo):
    world, said = begun(id="Echo")
    assert said.text == "a"
    assert world.step(turn(" abb\n")) == Answer("bba", 3.0, state="bba")
    assert world.step(turn("Abb", 1)) == Answer("bba", 0.0, state="bba")  # not of its charset
    assert world.step(turn("c", 2)) == Answer(reward=1.0, done=True)


@pytest.mark.parametrize(
    "options, why",
    [
        (
            {"id": "FrozenLake-v2", "actions": MOVES},
            "option id: .* no world 'FrozenLake-v2'; did you mean",
        ),
        ({**LAKE, "actions": ["a", "A"]}, "option actions are .*must be different names"),
        ({**LAKE, "observe": "pixels"}, "option observe is 'pixels'"),
        ({**LAKE, "answer": "{state}"}, r"option answer is '\{state\}'.*KeyError"),
    ],
    ids=["world", "names", "observe", "template"],
)
def test_options_that_do_not_fit_are_refused_before_anything_starts(options, why):
    with pytest.raises(ConfigError, match=why):
        Gymnasium(**options)


@pytest.mark.parametrize(
    "options, why",
    [
        (
            {**LAKE, "actions": ["a", "b"]},
            r"has 2 names; the actions of 'FrozenLake-v1', Discrete\(4\), need 4",
        ),
        ({"id": "Echo", "actions": ["a"]}, r"Text\(.*have no names"),
        ({"id": "Continuous"}, "neither Discrete nor Text"),
    ],
    ids=["too few", "of a text", "continuous"],
)
def test_actions_that_are_not_the_worlds_are_refused_at_its_start(echo, options, why):
    with pytest.raises(ConfigError, match=why):
        begun(**options)


@pytest.mark.parametrize(
    "observation, text",
    [
        (np.int64(7), "7"),
        ((14, 10, 0), "14,10,0"),
        (np.array([0.5, -1.25], np.float32), "0.5,-1.25"),
        (np.array([[1, 2], [3, 4]]), "1,2,3,4"),
        ({"room": 3, "doors": np.array([1, 0])}, "room: 3\ndoors: 1,0"),
        (np.array(2.0), "2.0"),
        ("a text", "a text"),
    ],
    ids=str,
)
def test_observations_are_written(observation, text):
    assert written(observation) == text
