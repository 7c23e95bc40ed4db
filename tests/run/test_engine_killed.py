"""kill -9 of an engine's process in the middle of generation: the run goes on as if nothing had been."""

import json

import pytest
from helpers.paths import matrix
from helpers.tiny import killing, learning, ran_here, write


@matrix
def test_kills_change_nothing_but_the_count_of_restarts(tmp_path):
    own = ["run.steps=8", "rollout.own_process=true", "rollout.restarts=2"]
    whole, hit = tmp_path / "whole", tmp_path / "hit"
    for folder in (whole, hit):
        folder.mkdir()
        write(folder)
    ran_here(whole, *own)
    code, out, kills = killing(hit, 2, "run", "tiny.toml", *own)
    assert code == 0 and kills == 2, out
    undisturbed, disturbed = learning(whole / "runs/tiny"), learning(hit / "runs/tiny")
    assert sum(row.pop("actor/engine_restarts") for row in disturbed) == 2
    assert sum(row.pop("actor/engine_restarts") for row in undisturbed) == 0
    assert len(disturbed) == 8
    for one, other in zip(disturbed, undisturbed, strict=True):
        # What is asked again is decoded in a smaller batch: the engine's own logprobs differ in their last bits.
        for name in [name for name in one if "/mismatch_" in name]:
            assert one.pop(name) == pytest.approx(other.pop(name), abs=1e-5), name
        assert one == other, json.dumps(
            {k: (one.get(k), other.get(k)) for k in one | other if one.get(k) != other.get(k)}
        )
    assert out.count("restart ") >= 2 and (hit / "runs/tiny/logs").is_dir()
