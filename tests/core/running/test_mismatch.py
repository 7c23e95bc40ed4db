"""What is said of an engine that is not the trainer: the step, and the weights that differ."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from hybridflow.core.errors import HybridFlowError, MismatchError
from hybridflow.core.groups.group import Future
from hybridflow.core.rollouts.separate import SeparateRollout
from hybridflow.core.running.mismatch import explained

ERROR = MismatchError(
    "an update after 2 steps: they differ", role="actor", phase="update", rank=1, remote_traceback="x"
)  # fmt: skip
DIFFERENT = {"norm": "rank 1 has other values", "embed": "rank 0 has other values"}


class Apart(SeparateRollout):
    def __init__(self, different):
        self.different = different

    def compared(self, version):
        assert version == 2
        return self.different


def on_the_same_ranks(answer):
    return SimpleNamespace(compared=lambda: Future(answer))


def raises():
    raise HybridFlowError("the link is down")


@pytest.mark.parametrize(
    ("rollout", "said"),
    [
        (on_the_same_ranks(lambda: [DIFFERENT, DIFFERENT]), "2 parameters differ, the first is norm (rank 1 has other values)"),
        (Apart(DIFFERENT), "2 parameters differ, the first is norm (rank 1 has other values)"),
        (Apart({}), "the checksums of all weights that can be read back agree, so look at what the engine caches"),
        (on_the_same_ranks(raises), "its weights could not be compared: the link is down"),
    ],
    ids=["same ranks", "apart", "equal", "failed"],
)  # fmt: skip
def test_the_step_and_the_cause_are_added(rollout, said):
    group = SimpleNamespace(version=lambda: Future(lambda: 2))
    made = explained(ERROR, 3, SimpleNamespace(group=group, rollout=rollout))
    assert isinstance(made, MismatchError)
    assert f"step 3: an update after 2 steps: they differ; {said}" in str(made)
    assert "[role 'actor', phase 'update', rank 1]" in str(made) and "traceback" not in str(made)
