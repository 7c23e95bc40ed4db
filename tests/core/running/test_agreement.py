"""Which generations are compared with the trainer, and what is said where they differ."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from hybridflow.core.context import Generation
from hybridflow.core.contracts.rollout import SamplingParams
from hybridflow.core.errors import HybridFlowError
from hybridflow.core.groups.group import Future
from hybridflow.core.running.agreement import COLUMN, Agreement
from hybridflow.core.values.batch import Batch
from hybridflow.core.values.columns import tokens
from hybridflow.core.values.metrics import Metrics
from hybridflow.core.workers.tasks import run_on_columns

F32 = torch.float32


class Group:
    """A role's workers: the trainer's logprobs, and the version of its weights."""

    def __init__(self, trained):
        self.trained = trained
        self.at, self.asked, self.different = 0, [], {}

    def version(self):
        return Future(lambda: self.at)

    def logprobs(self, batch, columns, topk):
        assert columns == {"logprobs": COLUMN}
        self.asked.append(self.at)
        return Batch({COLUMN: tokens([torch.tensor(row) for row in self.trained], F32)})

    def compared(self):
        return Future(lambda: [self.different])


def job(precision="fp32", dtype="float32", temperature=1.0, **config):
    spec = SimpleNamespace(
        backend_config=SimpleNamespace(precision=precision),
        engine_config=SimpleNamespace(dtype=dtype),
        temperature=temperature,
        model=SimpleNamespace(hf_config=config),
    )
    limits = SimpleNamespace(agreement_fp32=1e-3, agreement_bf16=0.05, agreement_experts=0.1)
    return SimpleNamespace(models={"actor": SimpleNamespace(spec=spec)}, run=limits)


def generated(group, said, versions, restarts=0.0, temperature=1.0):
    """Rows of logprobs by the engine, and the versions of the weights that made them."""
    batch = Batch(
        {
            "rollout_logprobs": tokens([torch.tensor(row) for row in said], F32),
            "loss_mask": tokens([torch.ones(len(row)) for row in said], torch.uint8),
            "weight_version": tokens([torch.tensor(row) for row in versions], torch.int32),
        },
        Metrics(maxima={"engine_restarts": restarts}),
    )
    role = SimpleNamespace(role=SimpleNamespace(name="actor"), group=group, rollout=group)
    tasks = SimpleNamespace(compute=run_on_columns)
    ctx = SimpleNamespace(step=3, tasks=tasks)
    return Generation(ctx, role, SamplingParams(temperature=temperature), batch, batch)


TRAINED = [[-1.0, -2.0], [-3.0]]


def test_the_first_generation_and_the_first_of_the_next_weights_are_checked_and_no_others():
    group = Group(TRAINED)
    agreement = Agreement(job())
    for version in (0, 0, 1, 1, 2):
        group.at = version
        agreement.check(generated(group, TRAINED, [[version] * 2, [version]]))
    assert group.asked == [0, 1]
    agreement.check(generated(group, TRAINED, [[2, 2], [2]], restarts=1.0))
    group.at = 3
    for _ in range(2):
        agreement.check(generated(group, TRAINED, [[3, 3], [3]]))
    assert group.asked == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("settings", "nats", "name"),
    [
        ({}, 1e-3, "fp32"),
        ({"dtype": "bfloat16"}, 0.05, "bf16"),
        ({"precision": "bf16"}, 0.05, "bf16"),
        ({"precision": "bf16", "num_experts": 8}, 0.1, "experts"),
        ({"num_experts": 8}, 1e-3, "fp32"),
    ],
)
def test_the_limit_is_that_of_the_coarser_precision(settings, nats, name):
    for times, fails in ((0.9, False), (1.1, True)):
        # The mean over three tokens, of which one differs
        said = [[-1.0, -2.0 - 3 * nats * times], [-3.0]]
        group = Group(TRAINED)
        check = Agreement(job(**settings)).check
        if not fails:
            check(generated(group, said, [[0, 0], [0]]))
            continue
        with pytest.raises(HybridFlowError, match=rf"step 3: .*run\.agreement_{name} = "):
            check(generated(group, said, [[0, 0], [0]]))


def test_nan_is_above_every_limit():
    group = Group(TRAINED)
    with pytest.raises(HybridFlowError, match="differ by nan nats"):
        Agreement(job()).check(generated(group, [[float("nan"), -2.0], [-3.0]], [[0, 0], [0]]))


def test_the_parameters_that_differ_are_named():
    group = Group(TRAINED)
    group.different = {"norm": "rank 1 has other values", "embed": "rank 0 has other values"}
    said = [[-1.5, -2.0], [-3.0]]
    with pytest.raises(
        HybridFlowError, match=r"2 parameters differ, the first is norm \(rank 1 has other values\)"
    ):
        Agreement(job()).check(generated(group, said, [[0, 0], [0]]))
    group.different = {}
    with pytest.raises(HybridFlowError, match="look at what the engine caches"):
        Agreement(job()).check(generated(group, said, [[0, 0], [0]]))


def test_tokens_of_other_weights_and_of_another_temperature_say_nothing():
    group = Group(TRAINED)
    group.at = 5
    agreement = Agreement(job(temperature=0.7))
    agreement.check(generated(group, [[9.0, 9.0], [9.0]], [[5, 5], [5]], temperature=1.0))
    assert group.asked == []
    agreement.check(generated(group, [[9.0, -2.0], [9.0]], [[4, 5], [4]], temperature=0.7))
    # Nothing of version 6 was made: it stays due.
    group.at = 6
    agreement.check(generated(group, TRAINED, [[5, 5], [5]], temperature=0.7))
    with pytest.raises(HybridFlowError, match="weights \\(version 6\\)"):
        agreement.check(generated(group, [[9.0, 9.0], [9.0]], [[6, 6], [6]], temperature=0.7))
