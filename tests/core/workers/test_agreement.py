"""When an update is refused for what its engine said; and that it leaves no trace."""

from __future__ import annotations

from math import inf, nan
from types import SimpleNamespace

import attrs
import pytest
import torch
from helpers.tiny_roles import ENGINE, NextToken, role

from hybridflow.backends.inline.runtime import InlineRuntime
from hybridflow.core.contracts.loss import Counts
from hybridflow.core.contracts.rollout import SamplingParams
from hybridflow.core.contracts.runtime import ResourcePool
from hybridflow.core.errors import MismatchError
from hybridflow.core.groups.group import Pool, WorkerGroup
from hybridflow.core.values.batch import Batch
from hybridflow.core.values.columns import tokens
from hybridflow.core.values.metrics import Metrics
from hybridflow.core.values.parallel import ParallelLayout, generation_layout
from hybridflow.core.workers.agreement import disagreement
from hybridflow.core.workers.model_worker import ModelWorker


class Ranks:
    """A group of ranks, of which the others have these (sum, count)."""

    def __init__(self, *others):
        self.others, self.asked = others, []

    def sum(self, values, axis):
        self.asked.append((len(values), axis))
        return [sum(each) for each in zip(values, *self.others, strict=True)]


def part(compared=True, trained=3.0):
    return SimpleNamespace(compared=compared, total=Counts(trained, 1.0))


def said(own, others=(), limit=0.1, just_synced=True, parts=None):
    ranks = Ranks(*others)
    metrics = Metrics() if own is None else Metrics({"mismatch_mean": own})
    return disagreement([part()] if parts is None else parts, metrics, ranks, limit, just_synced)


def test_the_mean_is_that_of_the_tokens_of_all_ranks():
    # (0.1 + 0.9) / (8 + 2) = 0.1 nats, and one more token's 0.01 is too much.
    assert said((0.1, 8.0), [(0.9, 2.0)]) is None
    assert "differ by 0.101 nats on average, more than run.mismatch_stop = 0.1" in said(
        (0.1, 8.0), [(0.91, 2.0)]
    )
    # A rank without tokens of its own, as on the first of two pipeline stages
    assert "differ by 0.3 nats" in said(None, [(0.6, 2.0)])


def test_nan_is_above_every_limit_but_for_none():
    assert "differ by nan nats" in said((nan, 2.0), limit=100.0)
    assert said((nan, 2.0), limit=inf) is None


def test_tokens_of_earlier_weights_alone_are_refused_only_where_there_should_be_others():
    assert "none of the tokens were made by the present weights" in said((0.0, 0.0))
    assert said((0.0, 0.0), just_synced=False) is None
    assert said((0.0, 0.0), parts=[part(trained=0.0)]) is None
    assert said(None, parts=[part(compared=False)]) is None


def test_it_costs_one_reduction_of_two_numbers_and_none_where_nothing_is_compared():
    for parts, limit, asked in (
        ([part(), part()], 0.1, [(2, "tp-cp-pp-dp")]),
        ([part(compared=False), part()], 0.1, [(2, "tp-cp-pp-dp")]),
        ([part(compared=False)], 0.1, []),
        ([part()], inf, []),
    ):
        ranks = Ranks()
        disagreement(parts, Metrics(), ranks, limit, just_synced=False)
        assert ranks.asked == asked


@pytest.fixture(scope="module")
def pool():
    runtime = InlineRuntime()
    runtime.start()
    yield Pool.launch(ResourcePool("main"), runtime)
    runtime.shutdown()


def group_of(pool, **changes):
    spec = role(lr=1e-2, **ENGINE, mismatch_stop=1e-3)
    group = WorkerGroup(
        ModelWorker, pool, attrs.evolve(spec, **changes), name="actor", generation=generation_layout(ParallelLayout())
    )  # fmt: skip
    group.build().result()
    return group


def generated(group, seed=7) -> Batch:
    asked = Batch({"prompt_ids": tokens([[1, 2], [3], [4, 5, 6]]), "sample_id": torch.arange(3)})
    return asked.join(group.generate(asked, SamplingParams(max_tokens=6), seed))


def shifted(batch: Batch, column: str, by: float) -> Batch:
    values = batch[column].values
    return batch.with_columns(**{column: attrs.evolve(batch[column], values=values + by)})


def test_a_refused_update_changes_neither_weights_nor_what_comes_after(pool):
    group, twin = group_of(pool), group_of(pool)
    made = generated(group)
    assert torch.equal(made["response_ids"].values, generated(twin)["response_ids"].values)
    before = group.checksum().result()

    for wrong in (shifted(made, "rollout_logprobs", 2e-3), shifted(made, "weight_version", -1)):
        with pytest.raises(MismatchError, match=r"after 0 steps: .* no weights have") as error:
            group.update([(wrong, NextToken())]).result()
        assert (error.value.role, error.value.phase, error.value.rank) == ("actor", "update", 0)
        assert group.checksum().result() == before

    # Neither gradients nor moments of the optimizer have stayed.
    for each in (group, twin):
        for _ in range(2):
            each.update([(shifted(made, "rollout_logprobs", 5e-4), NextToken())]).result()
    assert group.checksum().result() == twin.checksum().result() != before


def test_later_mini_batches_and_batches_of_no_engine_are_not_compared(pool):
    group = group_of(pool)
    made = generated(group)
    group.update([(made, NextToken())]).result()
    for batch in (
        shifted(made, "rollout_logprobs", 1.0),
        made.select(["prompt_ids", "response_ids", "loss_mask"]),
    ):
        group.update([(batch, NextToken())]).result()


def test_without_a_limit_everything_is_trained_on(pool):
    group = group_of(pool, mismatch_stop=inf)
    made = shifted(shifted(generated(group), "rollout_logprobs", 1.0), "weight_version", -1)
    group.update([(made, NextToken())]).result()
