"""Rollout and trainer logprobs that differ are noticed: a bfloat16 engine beside a float32 trainer."""

from helpers.paths import matrix
from helpers.tiny import hybridflow, metrics, ran_here, write

BF16 = ("rollout.dtype=bfloat16", "run.checkpoint_every=1")


def test_a_run_says_once_that_the_engine_is_not_the_trainer(tmp_path):
    write(tmp_path)
    said = ran_here(tmp_path, *BF16, "run.mismatch_warn=1e-5", "run.steps=3")
    assert said.count("more than 1e-05 (run.mismatch_warn)") == 1
    assert all(1e-5 < row["actor/mismatch_mean"] < 0.1 for row in metrics(tmp_path / "runs/tiny"))


def test_a_run_ends_before_the_step_that_passes_the_limit(tmp_path):
    write(tmp_path)
    done = hybridflow(tmp_path, "run", "tiny.toml", *BF16, "run.mismatch_stop=1e-5")
    assert done.returncode == 1
    assert "step 1: an update after 0 steps: " in done.stderr and "Traceback" not in done.stderr
    assert "run.mismatch_stop = 1e-05; no weights have changed; the checksums" in done.stderr
    assert not list((tmp_path / "runs/tiny").glob("checkpoints/*"))


@matrix
def test_the_default_limit_is_that_of_the_coarser_precision_and_a_bfloat16_engine_keeps_it(
    tmp_path,
):
    """The mismatch stays below 0.02 nats in every step; the default limit is 0.05."""
    write(tmp_path)
    ran_here(tmp_path, "rollout.dtype=bfloat16", "actor.backend.precision=bf16", "run.steps=3")
    assert all(0 < row["actor/mismatch_mean"] < 0.02 for row in metrics(tmp_path / "runs/tiny"))
