"""What a step calls: verbs of roles, draws, mini-batches, and the metrics of all of it."""

from __future__ import annotations

import pytest
import torch

from hybridflow.backends.inline.runtime import InlineRuntime
from hybridflow.core.context import GroupStepContext
from hybridflow.core.contracts.data_source import DataConfig
from hybridflow.core.contracts.loss import Loss, Term
from hybridflow.core.contracts.role import Role
from hybridflow.core.contracts.rollout import SamplingParams
from hybridflow.core.contracts.runtime import ResourcePool
from hybridflow.core.contracts.tokenizer import TokenizerConfig
from hybridflow.core.contracts.worker import Worker, register
from hybridflow.core.errors import WorkerError
from hybridflow.core.groups.group import Pool, WorkerGroup
from hybridflow.core.plugins.resolve import build_tokenizer
from hybridflow.core.values.batch import Batch
from hybridflow.core.values.columns import tokens
from hybridflow.core.values.metrics import Metrics
from hybridflow.core.workers.tasks import DataWorker, TaskWorker

SAMPLING = SamplingParams(
    max_tokens=4, temperature=0.5, top_p=0.9, top_k=3, min_p=0.1, stop_token_ids=(2,)
)


class Plain(Loss):
    def __init__(self, unit: str = "row"):
        self.unit = unit

    def __call__(self, batch, outputs):
        return Term("policy", -outputs["logprobs"])


class Recited(Worker):
    """A model without a model: each verb answers with what it was asked."""

    @register(reads=("sample_id",))
    def generate(self, batch: Batch, params, seed) -> Batch:
        columns = {
            "temperature": torch.full((batch.rows,), params.temperature),
            "asked": [(params, seed)] * batch.rows,
            "sampled": batch["sample_id"].values * 10,
        }
        return Batch(columns, Metrics({"tokens": (6.0, 2.0)}))

    @register()
    def episodes(self, batch: Batch, params, seed) -> Batch:
        return Batch({"turns": torch.ones(batch.rows)})

    @register()
    def logprobs(self, batch: Batch, columns, topk) -> Batch:
        made = {name: torch.full((batch.rows,), float(topk)) for name in columns.values()}
        return Batch(made, Metrics.of(calls=1.0))

    @register()
    def values(self, batch: Batch, column) -> Batch:
        return Batch({column: batch["x"].values * 2})

    @register()
    def score(self, batch: Batch, column) -> Batch:
        return Batch({column: batch["x"].values * 3})

    @register()
    def update(self, pairs) -> Metrics:
        rows = sum(batch.rows for batch, _ in pairs)
        if rows == 0:
            raise ValueError("nothing to train on")
        return Metrics({"rows": (float(rows), 1.0), "pairs": (float(len(pairs)), 1.0)})

    @register()
    def loss(self, pair) -> list:
        batch, _ = pair
        return batch["pair"].values.tolist()

    @register()
    def sync(self) -> None: ...


@pytest.fixture(scope="module")
def groups():
    """(scripted models, the real tasks and data)."""
    runtime = InlineRuntime()
    runtime.start()
    pool = Pool.launch(ResourcePool("main", (1,)), runtime)
    tokenizer = build_tokenizer(TokenizerConfig(characters="0123456789+="), None, list)
    data = DataConfig(source="arithmetic", shuffle=False)
    yield (
        WorkerGroup(Recited, pool),
        WorkerGroup(TaskWorker, pool, name="tasks"),
        WorkerGroup(DataWorker, pool, {"train": data}, tokenizer, name="data"),
    )
    runtime.shutdown()


@pytest.fixture
def context(groups):
    """`context(**settings)`: a step of an actor, a critic and a reward."""
    model, tasks, data = groups
    roles = [
        Role("actor", trained=True, generates=True),
        Role("critic", "value", trained=True),
        Role("reward", "reward"),
    ]

    def make(**settings) -> GroupStepContext:
        return GroupStepContext(
            {role.name: (role, model) for role in roles}, tasks, data, SAMPLING, 17, **settings
        )

    return make


def numbered(rows: int) -> Batch:
    return Batch({"x": torch.arange(rows)})


def test_roles_are_attributes_and_others_are_named(context):
    ctx = context()
    assert ctx.critic.role.column == "values"
    with pytest.raises(AttributeError, match="no role 'ref'"):
        _ = ctx.ref
    assert not hasattr(ctx, "refs")


def test_samples_are_numbered_over_all_calls_of_a_run(context):
    ctx = context()
    first = ctx.actor.generate(numbered(3))
    second = ctx.actor.generate(numbered(2))
    assert first["sample_id"].values.tolist() == [0, 1, 2]
    assert second["sample_id"].values.tolist() == [3, 4]
    assert second["sampled"].values.tolist() == [30, 40]
    assert second["x"].values.tolist() == [0, 1]
    assert first["asked"].values[0] == (SAMPLING, 17)
    assert ctx.counters["samples"] == 5


def test_greedy_generation_takes_the_most_likely_token_of_the_same_response(context):
    ctx = context()
    [(params, _)] = ctx.actor.generate(numbered(1), greedy=True)["asked"].values
    assert params == SamplingParams(max_tokens=4, temperature=0.0, stop_token_ids=(2,))
    other = SamplingParams(max_tokens=9, temperature=2.0)
    [(params, _)] = ctx.actor.generate(numbered(1), sampling=other)["asked"].values
    assert params == other


def test_with_an_environment_the_verb_is_its_episodes(context):
    made = context(has_environment=True).actor.generate(numbered(2))
    assert made["turns"].values.tolist() == [1, 1]
    assert "asked" not in made


def test_a_verb_writes_the_column_of_its_role(context):
    ctx = context()
    assert ctx.critic.values(numbered(2))["values"].values.tolist() == [0, 2]
    assert ctx.reward.score(numbered(2))["scores"].values.tolist() == [0, 3]
    assert ctx.actor.logprobs(numbered(1)).names == ("old_logprobs",)
    both = ctx.actor.logprobs(numbered(1), entropy=True, topk=7)
    assert both["entropy"].values.tolist() == both["old_logprobs"].values.tolist() == [7]


def test_the_metrics_of_a_step_are_named_by_role_and_told_once(context):
    ctx = context()
    ctx.log(beta=0.1)
    ctx.actor.generate(numbered(2))
    ctx.actor.logprobs(numbered(2))
    ctx.actor.logprobs(numbered(2))
    ctx.actor.update((numbered(3), Plain()))
    ctx.actor.update([(numbered(2), Plain()), (numbered(3), Plain())])
    ctx.actor.sync()
    doubled = ctx.compute(lambda x: {"doubled": x * 2, "most": x.max()}, numbered(3))
    assert doubled["doubled"].values.tolist() == [0, 2, 4]
    assert ctx.finish().values() == {
        "beta": pytest.approx(0.1),
        "actor/tokens": 3.0,
        "actor/calls": 1.0,
        "actor/rows": 4.0,
        "actor/pairs": 1.5,
        "most": 2.0,
    }
    assert not ctx.finish()


def test_groups_whose_scores_are_equal_are_counted(context):
    # Scores are 3 x: group 5 has 0 and 0, group 8 has 3 and 6, and group 9 one row alone.
    ctx = context()
    rows = Batch(
        {"x": torch.tensor([0.0, 1.0, 0.0, 2.0, 4.0]), "group": torch.tensor([5, 8, 5, 8, 9])}
    )
    ctx.reward.score(rows)
    assert ctx.finish()["reward/equal_groups"] == 0.5
    # A step counts its own calls.
    ctx.reward.score(rows.take(slice(0, 3)))
    assert ctx.finish()["reward/equal_groups"] == 1.0
    ctx.reward.score(rows)
    assert ctx.finish()["reward/equal_groups"] == 0.5

    # Two calls of a step count together; rows without a group, and what is aside, not at all.
    ctx.reward.score(rows)
    ctx.reward.score(rows.take(slice(1, 4)).take(torch.tensor([0, 2])))
    ctx.reward.score(Batch({"x": torch.ones(2)}))
    with ctx.aside():
        ctx.reward.score(rows)
    assert ctx.finish()["reward/equal_groups"] == pytest.approx(1 / 3)

    # A failed row has no score: of group 5 one is left, of group 8 the two that differ.
    rows = Batch(
        {"x": torch.tensor([0.0, 1.0, torch.nan, 2.0]), "group": torch.tensor([5, 8, 5, 8])}
    )
    ctx.reward.score(rows)
    assert ctx.finish()["reward/equal_groups"] == 0.0

    # No rows are no groups.
    ctx.reward.score(rows.take(slice(0, 0)))
    assert "reward/equal_groups" not in ctx.finish()


def test_what_is_called_aside_is_left_out(context):
    ctx = context()
    with ctx.aside():
        with ctx.aside():
            ctx.actor.logprobs(numbered(2))
        ctx.actor.generate(numbered(2))
    with pytest.raises(KeyError), ctx.aside():
        raise KeyError
    ctx.actor.update((numbered(2), Plain()))
    assert ctx.finish().values() == {"actor/rows": 2.0, "actor/pairs": 1.0}


def test_the_first_failure_of_a_step_ends_it(context):
    ctx = context()
    ctx.actor.update((numbered(0), Plain()))
    with pytest.raises(WorkerError, match="nothing to train on"):
        ctx.finish()


def test_drawn_rows_are_the_next_ones_of_the_data(context):
    ctx = context()
    before = int(ctx.prompts(2)["group"].values[-1])
    drawn = ctx.prompts(3)
    assert drawn["group"].values.tolist() == [before + 1, before + 2, before + 3]
    assert {"prompt_ids", "meta"} <= set(drawn.names)


def test_prompts_may_be_written_and_responses_read_as_texts(context):
    ctx = context()
    written = ctx.encode(["12+34=", "5="])
    assert written["group"].values.tolist() == [-1, -2] and written["meta"].values == [{}, {}]
    assert ctx.decode(written, "prompt_ids") == ["12+34=", "5="]
    answered = written.join(Batch({"response_ids": tokens([[4, 6, 2], [2]])}))  # 2 is the eos
    assert ctx.decode(answered) == ["13", ""]
    with pytest.raises(WorkerError, match="does not know 'w'"):
        ctx.decode(ctx.encode(["what?"]), "prompt_ids")


def test_a_unit_of_the_loss_stays_together_however_the_batch_is_split(context):
    batch = Batch(
        {"pair": torch.tensor([2, 1, 2, 1, 3, 3]), "ids": tokens([[n] for n in range(6)])}
    )
    whole = context().whole_units(batch, Plain("pair"))
    assert [part["pair"].values.tolist() for part in whole.split(2)] == [[1, 1, 2, 2], [3, 3]]
    assert context().whole_units(batch, Plain()) is batch
    assert context().critic.loss(batch, Plain("pair")).result() == [[1, 1, 2, 2, 3, 3]]


def test_each_epoch_has_every_row_once_in_an_order_of_its_own(context):
    ctx = context()
    epochs = [
        [mini["x"].values.tolist() for mini in ctx.minibatches(numbered(10), 4)] for _ in range(2)
    ]
    for epoch in epochs:
        assert [len(mini) for mini in epoch] == [4, 4, 2]
        assert sorted(number for mini in epoch for number in mini) == list(range(10))
    assert epochs[0] != epochs[1]
    again = context()
    assert [mini["x"].values.tolist() for mini in again.minibatches(numbered(10), 4, epochs=2)] == [
        *epochs[0],
        *epochs[1],
    ]


def test_neighbours_stay_together_in_mini_batches(context):
    minis = [mini["x"].values.tolist() for mini in context().minibatches(numbered(12), 6, unit=3)]
    runs = [mini[start : start + 3] for mini in minis for start in (0, 3)]
    assert sorted(runs) == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]
    with pytest.raises(ValueError, match="size 4 must be a multiple of the unit of 3"):
        next(context().minibatches(numbered(12), 4, unit=3))
    with pytest.raises(ValueError, match=r"11 rows .* unit of 3"):
        next(context().minibatches(numbered(11), 6, unit=3))


def test_a_batch_that_is_one_mini_batch_keeps_its_order(context):
    ctx = context()
    batch = numbered(4)
    assert [mini is batch for mini in ctx.minibatches(batch, 4, epochs=2)] == [True, True]
    assert ctx.counters["shuffles"] == 0
