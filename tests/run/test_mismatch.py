"""Rollout and trainer logprobs that differ are noticed: a bfloat16 engine beside a float32 trainer."""

from helpers.tiny import hybridflow, metrics, write

BF16 = ("rollout.dtype=bfloat16", "run.checkpoint_every=1")


def test_a_run_says_once_that_the_engine_is_not_the_trainer(tmp_path):
    write(tmp_path)
    done = hybridflow(tmp_path, "run", "tiny.toml", *BF16, "run.mismatch_warn=1e-5", "run.steps=3")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("more than run.mismatch_warn = 1e-05") == 1
    assert all(1e-5 < row["actor/mismatch_mean"] < 0.1 for row in metrics(tmp_path / "runs/tiny"))


def test_a_run_ends_before_the_checkpoint_of_the_step_that_passed_the_limit(tmp_path):
    write(tmp_path)
    done = hybridflow(tmp_path, "run", "tiny.toml", *BF16, "run.mismatch_stop=1e-5")
    assert done.returncode == 1
    assert (
        "step 1: rollout and trainer logprobs" in done.stderr
        and "run.mismatch_stop = 1e-05" in done.stderr
    )
    assert not list((tmp_path / "runs/tiny").glob("checkpoints/*"))


def test_a_float32_engine_is_the_trainer(tmp_path):
    write(tmp_path)
    done = hybridflow(tmp_path, "run", "tiny.toml", "run.mismatch_stop=1e-5", "run.steps=2")
    assert done.returncode == 0, done.stderr
    assert "mismatch_warn" not in done.stdout
