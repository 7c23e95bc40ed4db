"""Settings that no run can mean, and places where none can be written: said at once, in a sentence."""

from __future__ import annotations

import pytest

from hybridflow.backends.trackers.jsonl import JsonlTracker
from hybridflow.cli.main import main


@pytest.fixture
def said(tiny, capsys):
    """said(command, *settings) -> (status, all that was printed), with tiny.toml."""

    def run(command: str, *settings: str) -> tuple[int, str]:
        capsys.readouterr()
        status = main([command, "tiny.toml", "run.steps=1", *settings])
        printed = capsys.readouterr()
        return status, printed.out + printed.err

    return run


# --- F9: tracebacks for odd places, and for a full disk when a tracker is closed ---


@pytest.mark.parametrize("folder", ["/proc/x", "a" * 300, "a\0b", "a/" * 3000, "/dev/null/x"])
def test_f9_a_folder_that_cannot_be_made_is_named(said, folder):
    status, printed = said("run", f"run.folder={folder}")
    assert status == 1 and "Traceback" not in printed
    assert "run.folder" in printed


def test_f9_a_link_in_the_place_of_checkpoints_is_followed_and_kept_from_deletion(said, tiny):
    (tiny / "disk").mkdir()
    (tiny / "runs/tiny").mkdir(parents=True)
    (tiny / "runs/tiny/checkpoints").symlink_to(tiny / "disk")
    assert said("run")[0] == 0
    assert [path.name for path in (tiny / "disk").iterdir()] == ["step-00000001"]
    status, printed = said("run", "--overwrite")
    assert status == 0, printed
    assert [path.name for path in (tiny / "disk").iterdir()] == ["step-00000001"]
    assert not (tiny / "runs/tiny/checkpoints").is_symlink()


def test_f9_a_disk_that_is_full_when_a_tracker_is_closed_loses_no_model(said, tiny, monkeypatch):
    def full(self):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(JsonlTracker, "close", full)
    status, printed = said("run")
    assert status == 0 and "Traceback" not in printed
    assert "JsonlTracker was not closed" in printed and "No space left on device" in printed
    assert (tiny / "runs/tiny/export/actor/model.safetensors").is_file()


# --- F13: a pool of a thousand million devices took minutes ---


@pytest.mark.parametrize("devices", ["[1000000000]", "[65537]", "[40000, 40000]", "1000000000"])
@pytest.mark.parametrize("runtime", ["ray", "inline"])
def test_f13_a_pool_larger_than_any_is_refused_at_once(said, devices, runtime):
    status, printed = said("show", f"runtime={runtime}", f"pools.main={devices}")
    assert (
        status == 1 and "pools.main: has " in printed and "the largest pool is of 65536" in printed
    )


# --- F14: NaN and inf were taken as settings, and trained on ---

NUMBERS = [
    "sampling.temperature",
    "actor.optimizer.lr",
    "actor.optimizer.eps",
    "actor.optimizer.weight_decay",
    "actor.optimizer.max_grad_norm",
    "actor.sync.bucket_mb",
    "algorithm.kl_coef",
    "algorithm.dual_clip",
    "algorithm.clip_high",
    "rollout.kv_memory_gb",
]


@pytest.mark.parametrize("number", ["nan", "inf", "-inf"])
@pytest.mark.parametrize("key", NUMBERS)
def test_f14_a_number_that_is_none_is_refused(said, key, number):
    more = ["algorithm.name=ppo"] if key == "algorithm.dual_clip" else []
    status, printed = said("show", f"{key}={number}", *more)
    assert status == 1 and f"{key}: must be a finite number, got {number}" in printed


@pytest.mark.parametrize("betas", ["[nan, 0.9]", "[0.9, inf]", "[0.9, 1.0]", "[-0.1, 0.9]"])
def test_f14_rates_of_the_moments_are_below_one(said, betas):
    status, printed = said("show", f"actor.optimizer.betas={betas}")
    assert status == 1 and "actor.optimizer.betas: must be " in printed


def test_f14_where_inf_has_a_meaning_it_is_taken(said):
    assert said("show", "run.mismatch_stop=inf", "run.mismatch_warn=inf")[0] == 0
    for number in ("nan", "-inf"):
        status, printed = said("show", f"run.mismatch_stop={number}")
        assert status == 1 and "run.mismatch_stop: must be a finite number" in printed
