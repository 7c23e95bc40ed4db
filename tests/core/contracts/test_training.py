"""The contract of training backends: the learning rate, what may be asked of a model, and what planners assume."""

from __future__ import annotations

import attrs
import pytest
import torch

from hybridflow.core.contracts.training import (
    MicroBatch,
    OptimizerConfig,
    TrainingSettings,
    check_needs,
    training_settings,
)
from hybridflow.core.errors import ConfigError, HybridFlowError
from hybridflow.core.values.model_shape import ModelShape, ModelSize
from hybridflow.core.values.parallel import ParallelLayout


@pytest.mark.parametrize(
    ("config", "by_hand"),
    [
        (OptimizerConfig(lr=4.0), [4.0, 4.0, 4.0]),
        (OptimizerConfig(lr=4.0, warmup_steps=4), [1.0, 2.0, 3.0, 4.0, 4.0]),
        (OptimizerConfig(lr=4.0, schedule="linear", total_steps=4), [4.0, 3.0, 2.0, 1.0, 0.0, 0.0]),
        (
            OptimizerConfig(
                lr=4.0, schedule="linear", total_steps=6, warmup_steps=2, min_lr_ratio=0.5
            ),
            [2.0, 4.0, 4.0, 3.5, 3.0, 2.5, 2.0, 2.0],
        ),
        (
            OptimizerConfig(lr=4.0, schedule="cosine", total_steps=5, warmup_steps=1),
            [4.0, 4.0, 2 + 2 * 0.5**0.5, 2.0, 2 - 2 * 0.5**0.5, 0.0, 0.0],
        ),
        (
            OptimizerConfig(lr=4.0, schedule="cosine", total_steps=2, min_lr_ratio=0.25),
            [4.0, 2.5, 1.0, 1.0],
        ),
    ],
    ids=["constant", "warm-up", "linear", "linear-floor", "cosine", "cosine-floor"],
)
def test_learning_rates_are_those_worked_out_by_hand(config, by_hand):
    assert [config.lr_at(step) for step in range(len(by_hand))] == pytest.approx(by_hand, abs=1e-12)


def test_settings_out_of_range_are_refused():
    with pytest.raises(ValueError, match="greater than 0, got -1"):
        OptimizerConfig(lr=-1)
    with pytest.raises(ValueError, match="between 0 and 1, got 2"):
        OptimizerConfig(min_lr_ratio=2)
    with pytest.raises(ValueError, match="needs total_steps > warmup_steps, got 5 and 5"):
        OptimizerConfig(schedule="cosine", total_steps=5, warmup_steps=5)


def test_a_schedule_without_a_length_runs_as_long_as_the_run():
    linear = OptimizerConfig(lr=4.0, schedule="linear")
    assert [linear.over(4).lr_at(step) for step in range(5)] == [4.0, 3.0, 2.0, 1.0, 0.0]
    assert attrs.evolve(linear, total_steps=9).over(4).total_steps == 9
    assert OptimizerConfig().over(None) == OptimizerConfig()
    with pytest.raises(ValueError, match="needs total_steps: set it, for the algorithm does not"):
        linear.over(None)
    with pytest.raises(ValueError, match="needs total_steps > warmup_steps, got 4 and 4"):
        attrs.evolve(linear, warmup_steps=4).over(4)


def test_a_model_is_asked_only_for_what_its_kind_has():
    check_needs("policy", ["logprobs", "entropy", "topk_logprobs", "topk:5"])
    check_needs("value", ["values"])
    check_needs("score", ["scores"])
    for kind, need in (
        ("policy", "values"),
        ("value", "logprobs"),
        ("score", "topk:2"),
        ("policy", "logprob"),
    ):
        with pytest.raises(
            HybridFlowError, match=f"a {kind} model has no output '{need}'; it has "
        ):
            check_needs(kind, [need])


def test_the_places_of_response_tokens_are_row_by_row():
    lengths = torch.tensor([2, 0, 3])
    batch = MicroBatch(torch.zeros(3, 6, dtype=torch.int64), torch.tensor([1, 2, 3]), lengths)
    rows, times = batch.places
    assert batch.width == 3
    assert rows.tolist() == [0, 0, 2, 2, 2]
    assert times.tolist() == [0, 1, 0, 1, 2]
    nothing = MicroBatch(
        torch.zeros(0, 0, dtype=torch.int64), torch.tensor([]), torch.tensor([], dtype=torch.int64)
    )
    assert nothing.width == 0


SHAPE = ModelShape(4, 2, 2, 1, 2, 6, 8, layer={"up": (6, 4)}, before={"embed": (8, 4)}, after={"norm": (4,)},
                   ties={"head": "embed"})  # fmt: skip
NUMBERS = 2 * 24 + 32 + 4


def test_a_backend_that_says_nothing_keeps_the_whole_model_in_float32_on_every_rank():
    settings = training_settings({"anything": 1})
    layout = ParallelLayout(dp=3)
    planned = settings.planned_layout(SHAPE, layout, torch.float32)
    assert planned.ranks == [0, 1, 2]
    assert [planned.nbytes(rank) for rank in planned.ranks] == [4 * NUMBERS] * 3
    assert planned.ties == {"head": "embed"}
    assert settings.takes(SHAPE, layout)
    assert not settings.takes(SHAPE, ParallelLayout(dp=3, tp=2))
    assert settings.execution(trained=True).weight_bytes == 4


def test_what_is_trained_takes_gradients_and_two_moments_and_sums_gradients_over_dp():
    settings = TrainingSettings()
    layout = ParallelLayout(dp=3)
    frozen = settings.footprint(ModelSize(SHAPE), layout, trained=False, micro_batches=2)
    assert (frozen.resident, frozen.training, frozen.update) == (4 * NUMBERS, (), ())
    learnt = settings.footprint(ModelSize(SHAPE), layout, trained=True, micro_batches=2)
    assert learnt.resident == 3 * 4 * NUMBERS
    assert {phase.nbytes for phase in learnt.training} == {4 * NUMBERS}
    [collective] = learnt.update
    assert (collective.kind, collective.nbytes, collective.ranks) == ("all_reduce", 4 * NUMBERS, 3)
    adapters = settings.footprint(
        ModelSize(SHAPE, adapter_rank=1), layout, trained=True, micro_batches=2
    )
    assert adapters.resident == pytest.approx(4 * NUMBERS + 2 * 4 * 2 * (6 + 4))


def test_a_backend_that_names_no_shapes_says_so():
    with pytest.raises(ConfigError, match=r"TrainingSettings\.model_shape"):
        TrainingSettings().model_shape({"model_type": "llama"})
    with pytest.raises(ConfigError, match=r"TrainingSettings\.example_config"):
        TrainingSettings().example_config(4, 2, 8, 2, 1)
