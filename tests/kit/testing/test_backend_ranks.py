"""Every invariant of BackendRanks notices the fault that it is for, over two processes."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from helpers.expect import caught, invariants
from helpers.faulty_backends import ForgetsTheOtherRanks, NormsOfItsOwn
from helpers.paths import matrix

from hybridflow.backends.fsdp.backend import FSDPBackend
from hybridflow.backends.fsdp.config import FSDPConfig
from hybridflow.core.contracts.training import TrainingBackend
from hybridflow.core.values.parallel import ParallelLayout
from hybridflow.kit.testing import reference
from hybridflow.kit.testing.backend_ranks import DEALT, BackendRanks, Task, run_ranks

DP2 = ParallelLayout(dp=2)
GRADIENTS = "test_the_gradients_of_all_ranks_add_up"
STEP = "test_a_step_of_all_ranks_is_one_of_adamw"
RESUMED = "test_ranks_go_on_from_their_checkpoint_bit_for_bit"


class Kit(BackendRanks):
    architectures = ("qwen2",)
    kinds = ("policy",)


@pytest.fixture(scope="module")
def answers_of(tmp_path_factory):
    """answers_of(backend) -> what `over_ranks` gives."""

    @cache
    def answers(backend: type[TrainingBackend]):
        folder = str(tmp_path_factory.mktemp("ranks"))
        spec = reference("qwen2").spec
        task = Task(backend, FSDPConfig(), spec, DP2, ["logprobs"], folder)
        return [(DP2, run_ranks(task, 240.0))]

    return answers


def test_every_invariant_has_a_fault_here():
    assert invariants(BackendRanks) == {GRADIENTS, STEP, RESUMED}


@pytest.mark.parametrize("case", DEALT)
def test_f23_gradients_that_are_not_added_up_are_noticed(answers_of, case):
    caught_gradients = {"over_ranks": answers_of(ForgetsTheOtherRanks), "case": case}
    if case == "all rows and none":  # the first rank has them all
        getattr(Kit(), GRADIENTS)(**caught_gradients)
    else:
        caught(Kit, GRADIENTS, **caught_gradients)


@pytest.mark.parametrize("method", [STEP, RESUMED])
@matrix
def test_a_norm_of_a_ranks_own_and_lost_moments_are_noticed(answers_of, method):
    caught(Kit, method, over_ranks=answers_of(NormsOfItsOwn))


def test_ranks_that_differ_are_noticed():
    """Without processes: the answers of two good ranks, one of them moved by a bit."""
    ref = reference("qwen2")
    good = {name: values.clone() for name, values in ref.parameters.items()}
    name = min(good)
    moved = {**good, name: torch.nextafter(good[name], good[name] + 1)}

    class Near(Kit):
        gradient_tolerance = 1e9

    norms = [1.0, 1.0, 1.0]
    ranks = [{"norms": norms, "weights": weights} for weights in (good, moved)]
    with pytest.raises(AssertionError, match="1 parameters differ between ranks"):
        getattr(Near(), STEP)([(DP2, ranks)])


@matrix
def test_a_rank_that_fails_is_said_with_its_traceback(tmp_path):
    task = Task(FSDPBackend, None, reference("qwen2").spec, DP2, ["logprobs"], str(tmp_path))
    with pytest.raises(AssertionError, match=r"rank \d of dp2: Traceback(?s:.)*AttributeError"):
        run_ranks(task, 120.0)


def test_a_backend_of_one_rank_and_one_that_is_built_otherwise_are_left_alone(pytester):
    pytester.makepyfile("""
        from hybridflow.backends.fsdp.backend import FSDPBackend
        from hybridflow.backends.fsdp.config import FSDPConfig
        from hybridflow.kit.testing.backend_ranks import BackendRanks

        class OneRank(FSDPBackend):
            @classmethod
            def problems(cls, config, layout, model):
                return [] if layout.world == 1 else ["one rank"]

        class TestAlone(BackendRanks):
            backend, config = OneRank, FSDPConfig()

        class TestBuiltOtherwise(BackendRanks):
            pass
    """)
    result = pytester.runpytest_inprocess("-q", "-rs", "-p", "no:cacheprovider", "-p", "no:xdist")
    assert result.parseoutcomes() == {"skipped": 8}
    told = "\n".join(result.outlines)
    assert "allow none of `layouts`" in told and "give `backend` and `config`" in told
