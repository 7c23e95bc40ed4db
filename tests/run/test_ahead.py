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
from helpers.tiny import (
    REWARDS,
    TOLD,
    exported,
    learning,
    marked,
    metrics,
    ran_here,
    which_are,
    write,
)

from hybridflow.kit.recording import read_rows

AHEAD = [
    "pools={main=[1], engines=[1]}",
    "actor.generation.pool=engines",
    "run.max_staleness=1",
    "algorithm.correction=truncate",
    "run.checkpoint_every=2",
]
KILLS = int(os.environ.get("HYBRIDFLOW_KILLS", "3"))
"""Number of kills: `make kills` asks for 20. Three minutes of the campaign, which CI runs, kill such a run too."""


def steps_of(folder) -> int:
    file = folder / "runs/tiny/metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return max((json.loads(line)["step"] for line in lines[:-1]), default=0)


def with_kills(folder, settings: list[str], victims: list[int | str], ranks: int) -> str:
    """What a run of the folder's tiny.toml on Ray says, at random moments of which processes were killed, one by one.

    victims: the number of a rank of so many, "trainer" or "engine" where TOLD says which these are, or "controller", after
    which the run is resumed.
    """
    draws = random.Random(len(victims))
    mark = uuid.uuid4().hex
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200", "MARK": mark}
    command = [sys.executable, "-m", "hybridflow.cli.main", "run", "tiny.toml", *settings]
    command += ["runtime={name='ray', threads=1}", f"run.restarts={len(victims)}"]
    deadline = time.monotonic() + 120 * len(victims)
    left = list(victims)
    with (folder / "out.txt").open("w") as out:

        def start(*more: str) -> subprocess.Popen:
            return subprocess.Popen(
                [*command, *more], cwd=folder, env=environment, stdout=out, stderr=subprocess.STDOUT
            )

        run = start()
        after = draws.randint(2, 6)
        try:
            while run.poll() is None:
                assert time.monotonic() < deadline, (folder / "out.txt").read_text()
                time.sleep(0.05)
                if not left or steps_of(folder) < after:
                    continue
                time.sleep(draws.uniform(0.0, 0.2))
                alive = sorted(marked(mark, "ray::HostActor"))
                victim = left[0]
                if victim == "controller":
                    run.kill()
                    run.wait()
                    run = start("--resume")
                elif len(alive) == ranks and (chosen := which_are(victim, alive, folder)):
                    os.kill(chosen[0], signal.SIGKILL)
                else:  # it is about to end, or to begin again
                    continue
                del left[0]
                after += draws.randint(4, 6)
        finally:
            run.kill()
            run.wait()
    said = (folder / "out.txt").read_text()
    assert run.returncode == 0 and not left, said
    restarts = [victim for victim in victims if victim not in ("engine", "controller")]
    assert said.count("restart ") == len(restarts), said
    assert said.count("the engine of actor on rank ") == victims.count("engine"), said
    return said


@matrix
@pytest.mark.timeout(180 + 120 * KILLS)
def test_kills_of_trainer_engine_and_controller_change_no_bit(tmp_path):
    steps = 6 * KILLS
    settings = [*AHEAD, f"run.steps={steps}"]
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    for folder in (whole, cut):
        folder.mkdir()
        write(folder)
    ran_here(whole, *settings)
    # Every third kill is the controller's, the others are of one of the two ranks by turns.
    with_kills(
        cut, settings, [(0, 1, "controller")[number % 3] for number in range(KILLS)], ranks=2
    )

    assert exported(cut / "runs/tiny") == exported(whole / "runs/tiny")
    assert learning(cut / "runs/tiny") == learning(whole / "runs/tiny")
    lags = [row["actor/staleness"] for row in learning(cut / "runs/tiny")]
    assert lags == [0.0] + [1.0] * (steps - 1)


@matrix
@pytest.mark.timeout(180 + 180 * KILLS)
def test_kills_beside_engines_that_never_stop_lose_no_row_and_can_be_replayed(tmp_path):
    # By turns; there are two engines.
    victims = [("trainer", "engine", "controller")[number % 3] for number in range(3 * KILLS // 2)]
    steps = 6 * len(victims)
    settings = [
        *AHEAD,
        "pools.engines=[2]",
        "run.max_staleness=2",
        "sampling.max_tokens=16",
        "algorithm.name=rewards:Told",
        "algorithm.mini_batch_size=16",
        "reward.function=rewards:told",
        f"run.steps={steps}",
    ]
    cut, again = tmp_path / "cut", tmp_path / "again"
    for folder in (cut, again):
        folder.mkdir()
        write(folder)
        (folder / "rewards.py").write_text(REWARDS + TOLD)
    with_kills(cut, [*settings, "run.journal=true", "run.samples=100"], victims, ranks=4)

    rows = metrics(cut / "runs/tiny")
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    assert max(row["actor/staleness_max"] for row in rows) == 2
    # A step draws four prompts, and generates four responses to each.
    trained = [row for row in read_rows(cut / "runs/tiny", "samples") if row["data"] == "train"]
    drawn = [(sample // 16 + 1, sample // 4, sample) for sample in range(16 * steps)]
    assert [(row["step"], row["group"], row["sample_id"]) for row in trained] == drawn

    ran_here(again, *settings, f"run.replay={cut / 'runs/tiny'}")
    assert exported(again / "runs/tiny") == exported(cut / "runs/tiny")


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
