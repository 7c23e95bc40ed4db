"""`hybridflow sweep`: every combination, failed ones too, and what was ended goes on."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from helpers.paths import matrix

from hybridflow.cli.main import main
from hybridflow.cli.sweep import Point, points_of, slots_of, split
from hybridflow.core.errors import ConfigError


def test_values_are_cut_at_commas_that_are_their_own():
    varied, common = split(
        ["lr=1,2", "run.steps=3", "pools.main=[1,2]", "a.b=[1,2],'x,y',{c=1,d=2}", "seeds=2"]
    )
    assert varied == {
        "lr": ["1", "2"],
        "a.b": ["[1,2]", "'x,y'", "{c=1,d=2}"],
        "run.seed": ["0", "1"],
    }
    assert common == ["run.steps=3", "pools.main=[1,2]"]
    for text in ("seeds=0", "seeds=many"):
        with pytest.raises(ConfigError, match="give a number of seeds, 1 or more"):
            split([text])


def test_every_combination_has_a_name():
    points = points_of({"actor.optimizer.lr": ["1e-3", "1e-4"], "run.seed": ["0", "1"]})
    assert [point.name for point in points] == [
        "lr=1e-3,seed=0", "lr=1e-3,seed=1", "lr=1e-4,seed=0", "lr=1e-4,seed=1"
    ]  # fmt: skip
    assert points_of({}) == [Point(())] and Point(()).name == "run"
    assert Point((("reward.function", "mine:a b"),)).name == "function=mine_a_b"
    with pytest.raises(ConfigError, match="two combinations have one name"):
        points_of({"a.lr": ["1", "1"]})


@pytest.mark.timeout(300)
def test_the_table_has_every_run_also_one_that_failed(tiny, capsys):
    held_out = ["validation.data.limit=4", "validation.data.options.split=held-out"]
    settings = [
        "run.steps=2",
        "reward.function=rewards:digits,rewards:raises",
        "seeds=2",
        *held_out,
    ]
    assert main(["sweep", "tiny.toml", *settings, "--at-once", "2"]) == 1
    printed = capsys.readouterr().out
    assert "4 runs in runs/tiny-sweep, 4 to do, 2 at a time" in printed
    table = [line.split() for line in printed.splitlines() if line.startswith("rewards:")]
    assert [row[:3] for row in table[:4]] == [
        ["rewards:digits", "0", "finished"],
        ["rewards:digits", "1", "finished"],
        ["rewards:raises", "0", "failed"],
        ["rewards:raises", "1", "failed"],
    ]
    assert "no such unit" in printed

    # The mean over seeds, by hand
    scores = []
    for seed in (0, 1):
        done = json.loads(
            (tiny / f"runs/tiny-sweep/function=rewards_digits,seed={seed}/done.json").read_text()
        )
        scores.append(done["validations"]["2"]["validation/score"])
    assert table[4][:2] == ["rewards:digits", f"{sum(scores) / 2:.3f}"]
    assert table[4][2:] == [f"{abs(scores[0] - scores[1]) / 2:.3f}", "2"]


def test_each_run_on_gpus_has_its_own(monkeypatch):
    def job(device="cuda", world=2, remote=False):
        pool = SimpleNamespace(world=world, device=None)
        config = SimpleNamespace(threads=1)
        return SimpleNamespace(pools={"main": pool}, device=device, runtime_config=config)

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 5)
    seen = [slot["CUDA_VISIBLE_DEVICES"] for slot in slots_of([job(world=1), job()], None)]
    assert seen == ["0,1", "2,3"]
    assert [slot["CUDA_VISIBLE_DEVICES"] for slot in slots_of([job()], 3)] == ["0,1", "2,3", "0,1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    assert slots_of([job(world=1)], None) == [
        {"CUDA_VISIBLE_DEVICES": "4"}, {"CUDA_VISIBLE_DEVICES": "6"}
    ]  # fmt: skip
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    assert slots_of([job("cpu", 2)], None) == [{}] * 4
    # A cluster's devices are not known tiny.
    monkeypatch.setattr(
        "hybridflow.core.contracts.runtime.runtime_settings",
        lambda config: SimpleNamespace(remote=True),
    )
    assert slots_of([job()], None) == [{}]


@matrix
def test_other_settings_are_run_again_and_what_is_done_is_not(tiny, capsys):
    arguments = ["sweep", "tiny.toml", "--name", "mine", "seeds=1", "run.final_checkpoint=false"]
    assert main([*arguments, "run.steps=1"]) == 0
    capsys.readouterr()
    assert main([*arguments, "run.steps=2"]) == 1  # finished, and nothing to go on from
    assert "1 to do" in capsys.readouterr().out
    (tiny / "runs/mine/seed=0/done.json").unlink(missing_ok=True)  # as if it was killed
    assert main([*arguments, "run.steps=2"]) == 0
    assert main([*arguments, "run.steps=2"]) == 0
    assert "0 to do" in capsys.readouterr().out


def test_what_is_wrong_in_any_combination_is_said_before_the_first_starts(tiny, capsys):
    assert main(["sweep", "tiny.toml", "algorithm.group_size=4,-1"]) == 1
    assert "algorithm.group_size" in capsys.readouterr().err
    assert not (tiny / "runs").exists()
    assert main(["sweep", "tiny.toml", "--at-once", "0"]) == 1
