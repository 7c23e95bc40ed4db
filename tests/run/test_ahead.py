"""Steps that are generated ahead, on Ray: the bits of the inline runtime, also after kills."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
import uuid

import pytest
from helpers.paths import matrix
from helpers.tiny import exported, learning, marked, metrics, ran_here, write

AHEAD = [
    "pools={main=[1], engines=[1]}",
    "actor.generation.pool=engines",
    "run.max_staleness=1",
    "algorithm.correction=truncate",
    "run.checkpoint_every=2",
]
KILLS = int(os.environ.get("HYBRIDFLOW_KILLS", "3"))
"""Number of kills: `make kills` asks for 20."""


def steps_of(folder) -> int:
    file = folder / "runs/tiny/metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return max((json.loads(line)["step"] for line in lines[:-1]), default=0)


@pytest.mark.timeout(120 + 60 * KILLS)
def test_kills_of_trainer_engine_and_controller_change_no_bit(tmp_path):
    steps = 6 * KILLS
    settings = [*AHEAD, f"run.steps={steps}"]
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    for folder in (whole, cut):
        folder.mkdir()
        write(folder)
    ran_here(whole, *settings)

    # At a random moment of a random step; every third kill is the controller's, the others are of
    # one of the two ranks by turns.
    draws = random.Random(KILLS)
    mark = uuid.uuid4().hex
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200", "MARK": mark}
    command = [sys.executable, "-m", "hybridflow.cli.main", "run", "tiny.toml", *settings]
    command += ["runtime={name='ray', threads=1}", f"run.restarts={steps}"]
    deadline = time.monotonic() + 60 * KILLS
    killed = 0
    with (cut / "out.txt").open("w") as out:

        def start(*more: str) -> subprocess.Popen:
            return subprocess.Popen(
                [*command, *more], cwd=cut, env=environment, stdout=out, stderr=subprocess.STDOUT
            )

        run = start()
        after = draws.randint(2, 6)
        try:
            while run.poll() is None:
                assert time.monotonic() < deadline, (cut / "out.txt").read_text()
                time.sleep(0.05)
                if killed == KILLS or steps_of(cut) < after:
                    continue
                time.sleep(draws.uniform(0.0, 0.2))
                ranks = sorted(marked(mark, "ray::HostActor"))
                if killed % 3 == 2:
                    run.kill()
                    run.wait()
                    run = start("--resume")
                elif len(ranks) == 2:
                    os.kill(ranks[killed % 3], signal.SIGKILL)
                else:  # it is about to end, or to begin again
                    continue
                killed, after = killed + 1, after + draws.randint(4, 6)
        finally:
            run.kill()
            run.wait()
    said = (cut / "out.txt").read_text()
    assert run.returncode == 0 and killed == KILLS, said
    assert said.count("restart ") == KILLS - KILLS // 3, said

    assert exported(cut / "runs/tiny") == exported(whole / "runs/tiny")
    assert learning(cut / "runs/tiny") == learning(whole / "runs/tiny")
    lags = [row["actor/staleness"] for row in learning(cut / "runs/tiny")]
    assert lags == [0.0] + [1.0] * (steps - 1)


@matrix
@pytest.mark.timeout(300)
def test_engines_that_never_stop_keep_their_bound_and_go_on_after_a_checkpoint(tmp_path):
    write(tmp_path)
    settings = [
        *AHEAD,
        "runtime=ray",
        "pools.engines=[2]",
        "run.max_staleness=2",
        "sampling.max_tokens=16",
    ]
    ran_here(tmp_path, *settings, "run.steps=5")
    ran_here(tmp_path, *settings, "run.steps=9", "--resume")
    rows = metrics(tmp_path / "runs/tiny")
    assert [row["step"] for row in rows] == list(range(1, 10))
    lags = [row["actor/staleness_max"] for row in rows]
    assert max(lags) == 2 and lags[0] == 0
    assert all(row["actor/mismatch_mean"] < 1e-5 for row in rows)
