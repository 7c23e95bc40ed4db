"""What follows from a job: figures by hand."""

from __future__ import annotations

from unittest import mock

import pytest
from helpers.shown import FILE, resolved

from hybridflow.backends.fsdp.config import FSDPConfig
from hybridflow.cli.figures import figures
from hybridflow.core.contracts.training import TrainingSettings

pytestmark = pytest.mark.usefixtures("shown")


def test_derived_figures_are_those_of_the_config():
    [(job, _)] = resolved()
    found = dict(figures(job))
    assert found["devices"] == f"4 x {job.device} (pools: main 4), runtime ray"
    assert found["sequences per step"] == "32" and found["sequences per optimizer step"] == "10"
    assert found["optimizer steps per step"] == "8" and found["optimizer steps in all"] == "400"
    assert (
        found["sequences in all"] == "1,600"
        and found["tokens per step, at most"] == "384 (32 x 12)"
    )
    assert "4 ranks of pool main, layout dp2-tp2" in found["actor"]
    assert "16 sequences per step and dp rank; 5 per optimizer step and dp rank" in found["actor"]
    assert "micro-batches of 16,384 tokens, packed, prompts shared; " in found["actor"]
    assert "frozen" in found["ref"] and "per optimizer step" not in found["ref"]
    assert (
        found["checkpoints"]
        == "every 20 steps, every 30 minutes, at the end; the newest 2 are kept"
    )
    assert (
        found["validation"]
        == "validation: before the first step, every 20 steps (2 times), at the end"
    )
    assert (
        found["folder"] == "runs/one"
        and found["tokenizer"] == "of 12 characters and 3 special tokens"
    )


def test_rows_that_are_padded_come_with_the_reason():
    fields = ("use_sliding_window=true", "sliding_window=8")
    [(job, _)] = resolved("one.toml", *(f"actor.model.config.{field}" for field in fields))
    assert "tokens, padded (some layers attend to a part of a row);" in dict(figures(job))["actor"]
    with mock.patch.object(FSDPConfig, "packing", TrainingSettings.packing):
        assert "padded (the backend takes padded rows);" in dict(figures(job))["actor"]


def test_rows_per_step_of_our_algorithms():
    [(grpo, _)] = resolved(
        "one.toml", "algorithm={name='grpo', grpo={prompts_per_step=6}}", "algorithm.kl_coef=0.0"
    )
    assert grpo.algorithm.rows_per_step == 24 and grpo.algorithm.rows_per_update == 24
    assert resolved("two.toml")[0][0].algorithm.rows_per_step == 4


def test_an_uneven_share_is_shown_as_a_range():
    [(job, _)] = resolved("one.toml", "algorithm.ppo.prompts_per_step=31")
    assert "15 to 16 sequences per step and dp rank" in dict(figures(job))["actor"]


def test_what_there_is_none_of_is_said():
    [first, second] = (
        dict(figures(job)) for job, _ in resolved("two.toml", "run.checkpoint_every=0")
    )
    assert first["checkpoints"] == "every 30 minutes, at the end; the newest 2 are kept"
    assert (
        first["validation"] == "none" and "tokens per step, at most" not in first
    )  # nothing is generated
    assert second["tokenizer"].startswith("from ")  # the first stage's
    assert second["reward"] == "exact_match, on the 1 rank of pool main"


def test_a_tokenizer_that_is_trained_is_told(shown):
    own = "tokenizer = { train = 'bpe', vocab_size = 1000 }"
    (shown / "own.toml").write_text(FILE.replace('tokenizer.characters = "0123456789+="', own))
    [(job, _)] = resolved("own.toml")
    assert dict(figures(job))["tokenizer"] == "bpe, trained on the run's data, at most 1,000 tokens"


def test_parts_of_a_reward_are_told_with_their_weights(shown):
    parts = [
        f"{{ name = '{name}', function = 'exact_match', weight = {of} }}"
        for name, of in (("a", 1.0), ("b", 0.25))
    ]
    (shown / "own.toml").write_text(
        FILE.replace('reward.function = "exact_match"', f"reward.parts = [{', '.join(parts)}]")
    )
    [(job, _)] = resolved("own.toml")
    expected = "exact_match + 0.25 x exact_match, on the 4 ranks of pool main"
    assert dict(figures(job))["reward"] == expected


def test_validation_is_told_with_its_times_and_its_goal():
    [(job, _)] = resolved(
        "one.toml", "validation.every=1", "validation.at_start=false", "validation.stop_at=0.9"
    )
    assert (
        dict(figures(job))["validation"]
        == "validation: every step (49 times), until the score reaches 0.9, at the end"
    )
