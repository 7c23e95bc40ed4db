"""kill -9 of an engine's process in the middle of generation: the run goes on as if nothing had been."""

import json

import pytest
from helpers.tiny import killing, learning, ran, write


def test_kills_change_nothing_but_the_count_of_restarts(tmp_path):
    own = ["run.steps=12", "rollout.own_process=true", "rollout.restarts=2"]
    whole, hit = tmp_path / "whole", tmp_path / "hit"
    for folder in (whole, hit):
        folder.mkdir()
        write(folder)
    ran(whole, *own)
    code, out, kills = killing(hit, 2, "run", "tiny.toml", *own)
    assert code == 0 and kills == 2, out
    undisturbed, disturbed = learning(whole / "runs/tiny"), learning(hit / "runs/tiny")
    assert sum(row.pop("actor/engine_restarts") for row in disturbed) == 2
    assert sum(row.pop("actor/engine_restarts") for row in undisturbed) == 0
    assert len(disturbed) == 12
    for one, other in zip(disturbed, undisturbed, strict=True):
        # What is asked again is decoded in a smaller batch: the engine's own logprobs differ in their last bits.
        for name in [name for name in one if "/mismatch_" in name]:
            assert one.pop(name) == pytest.approx(other.pop(name), abs=1e-5), name
        assert one == other, json.dumps(
            {k: (one.get(k), other.get(k)) for k in one | other if one.get(k) != other.get(k)}
        )
    assert out.count("restart ") >= 2 and (hit / "runs/tiny/logs").is_dir()


def test_a_death_beyond_the_restarts_ends_the_run_with_the_cause(tmp_path):
    write(tmp_path)
    code, out, kills = killing(
        tmp_path,
        2,
        "run",
        "tiny.toml",
        "run.steps=40",
        "rollout.own_process=true",
        "rollout.restarts=1",
    )
    assert kills == 2 and code not in (0, -9)
    assert "was killed by SIGKILL" in out and "rollout.restarts are used up" in out
