"""The simulation of steps that overlap, beside one that goes on token by token."""

from __future__ import annotations

import numpy as np
import pytest

from hybridflow.planner.overlap import SETTLED, Engines, simulate

ROWS = 24


def lengths_of(step: int) -> np.ndarray:
    return np.clip(np.random.default_rng(step).lognormal(2.5, 1.0, ROWS), 1, 200).astype(int)


def token_by_token(staleness, training, sync, apart, whole, replicas, places, steps=8):
    """Seconds of a step where a decoding step takes one second, whatever is in it."""
    waiting = [[] for _ in range(replicas)]
    running = [[] for _ in range(replicas)]
    left: dict[int, int] = {}
    worked = 0

    def opens(step):
        left[step] = ROWS
        for replica, part in enumerate(np.array_split(lengths_of(step), replicas)):
            waiting[replica] += [[step, length] for length in part.tolist()]

    def second():
        nonlocal worked
        for replica in range(replicas):
            free = places - len(running[replica])
            running[replica] += waiting[replica][:free]
            del waiting[replica][:free]
            worked += bool(running[replica])
            for sequence in running[replica]:
                sequence[1] -= 1
                left[sequence[0]] -= sequence[1] == 0
            running[replica] = [one for one in running[replica] if one[1]]

    now, last = 0, 1 if whole else 1 + staleness
    for step in range(1, last + 1):
        opens(step)
    ends = []
    work = []
    for step in range(1, staleness + SETTLED + steps + 1):
        while left[step]:
            second()
            now += 1
        if whole and staleness:
            last += 1
            opens(last)
        for _ in range(training if apart else 0):
            second()
        now += training
        if apart and whole and staleness:
            while left[last]:
                second()
                now += 1
        now += sync
        if not (whole and staleness):
            last += 1
            opens(last)
        ends.append(now)
        work.append(worked)
    first = staleness + SETTLED - 1
    passed = ends[-1] - ends[first]
    return passed / steps, (work[-1] - work[first]) / replicas / passed


@pytest.mark.parametrize("staleness", [0, 1, 2, 4])
@pytest.mark.parametrize(("replicas", "places"), [(1, ROWS), (2, 8), (3, 200)])
@pytest.mark.parametrize(("apart", "whole"), [(True, False), (False, False), (True, True)])
def test_it_is_as_token_by_token(staleness, replicas, places, apart, whole):
    if whole and staleness > 1:
        pytest.skip("for one step alone")
    found = simulate(
        Engines(replicas, places, 1.0), lengths_of, 60, 5, staleness, apart, whole, steps=8
    )
    step, busy = token_by_token(staleness, 60, 5, apart, whole, replicas, places)
    assert found.step == pytest.approx(step, abs=1e-6)
    assert found.engines_busy == pytest.approx(busy, abs=1e-6)
    assert found.trainer_busy == pytest.approx(60 / step, abs=1e-6)


def test_equal_sequences_by_hand():
    """Ten sequences of 100 tokens: 100 (0.1 + 10 x 0.01) = 20 s of generation, 30 of training, 2 of weights."""

    def equal(step: int) -> np.ndarray:
        return np.full(10, 100)

    engines = Engines(1, 64, 0.1, 0.01)
    assert simulate(engines, equal, 30.0, 2.0).step == pytest.approx(52.0)
    # One step ahead generation is over before the training is.
    for whole in (True, False):
        found = simulate(engines, equal, 30.0, 2.0, staleness=1, whole=whole)
        assert found.step == pytest.approx(32.0)
        assert found.trainer_busy == pytest.approx(30 / 32)
        assert found.engines_busy == pytest.approx(20 / 32)
    # Where both take turns two steps are generated at once, in 100 (0.1 + 20 x 0.01) = 30 s, every other time.
    assert simulate(engines, equal, 30.0, 2.0, 1, apart=False).step == pytest.approx(15 + 32)


def test_prompts_and_what_was_made_are_read_anew():
    """Two sequences of 100 tokens with prompts of 50, at 0.01 s a token read: 1 s of prompts, and 10 of tokens."""
    engines = Engines(1, 2, 0.05, 0.0, 0.01)
    found = simulate(engines, lambda step: np.full(2, 100), 3.0, 0.0, 0, prompt=50)
    assert found.step == pytest.approx(1.0 + 5.0 + 3.0)
