"""What an engine was asked and has sampled, beside what becomes of it in a batch of episodes."""

from __future__ import annotations

import numpy as np

from hybridflow.core.values.batch import Batch
from hybridflow.core.values.branches import sequences

Made = tuple[int, list[int], list[int], list[float]]
"""(row, all tokens before a turn, the turn, its logprobs)."""


def recording(engine) -> list[Made]:
    """Have an engine write down what it makes, in rounds; the list grows."""
    made: list[Made] = []
    generate = engine.generate

    def generated(requests):
        completions = generate(requests)
        for asked, done in zip(requests, completions, strict=True):
            prefix = len(asked.prefix_ids)
            before = [*asked.prompt_ids.tolist(), *np.asarray(asked.prefix_ids).tolist()]
            turn = done.response_ids[prefix:].tolist()
            made.append((done.id, before, turn, done.logprobs[prefix:].tolist()))
        return completions

    engine.generate = generated
    return made


def compare(batch: Batch, made: list[Made]) -> int:
    """Each turn is trained once, with its logprobs, behind the tokens that had stood before it, and nothing else is.

    Returns the number of sequences.
    """
    found = sequences(batch)
    owners, rows = np.arange(batch.rows), batch
    if found is not None:
        owners, rows = found.owners, found.batch
    trained: dict[tuple, list] = {}
    names = ("prompt_ids", "response_ids", "loss_mask", "turn", "rollout_logprobs")
    for owner, prompt, ids, mask, turns, logprobs in zip(
        owners, *(rows[name] for name in names), strict=True
    ):
        whole = [*prompt.tolist(), *ids.tolist()]
        counted = np.flatnonzero(mask.numpy())
        for turn in np.unique(turns.numpy()[counted]):
            at = counted[turns.numpy()[counted] == turn]
            assert at.tolist() == list(range(at[0], at[-1] + 1))
            start, stop = len(prompt) + at[0], len(prompt) + at[-1] + 1
            key = (owner, *whole[:start], -1, *whole[start:stop])
            trained.setdefault(key, []).append(np.float32(logprobs.numpy()[at]).tolist())
    for row, before, turn, logprobs in made:
        trained[(row, *before, -1, *turn)].remove(np.float32(logprobs).tolist())
    assert not any(trained.values())
    return len(owners)
