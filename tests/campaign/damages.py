"""Damaged files of a run: refused by name, gone round, or without effect on the weights."""

from __future__ import annotations

import contextlib
import io
import random
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import attrs
from helpers.damage import WAYS, damage, wrong
from helpers.tiny import exported, write

from campaign.cases import Result
from hybridflow.cli.main import main

BATCH = 12
KEPT = ("run.checkpoint_every=1", "run.samples=1", 'run.trackers=["jsonl", "tensorboard"]')


@attrs.frozen
class Damage:
    """A way to damage a file, which the seed chooses."""

    way: str
    seed: int


class Damages:
    """A case is a run of two steps, and twelve resumes of it, each with a damaged file."""

    name = "damages"

    def draw(self, draws: random.Random) -> list[Damage]:
        return [Damage(draws.choice(WAYS), draws.getrandbits(32)) for _ in range(BATCH)]

    def do(self, items: Sequence[Damage], folder: Path) -> Result:
        result = Result()
        write(folder)
        sys.path.insert(0, str(folder))  # the rewards
        run, whole = folder / "runs/tiny", folder / "whole"
        printed("run.steps=2")
        run.rename(whole)
        shutil.copytree(whole, run)
        printed("--resume", "run.steps=4")
        right = exported(run)
        for item in items:
            shutil.rmtree(run)
            shutil.copytree(whole, run)
            file = damage(run, random.Random(item.seed), item.way)
            result.counts["damaged files"] += 1
            status, text = printed("--resume", "run.steps=4")
            found = wrong(status, text, item.way, file)
            if not found and not status and exported(run) != right:
                found = "the weights are others"
            if found:
                result.problem(f"{item.way} of {file}: {found}\n{text[-2000:]}")
        return result


def printed(*arguments: str) -> tuple[int, str]:
    """(status, all that was printed) of a run of tiny.toml, in this process."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        status = main(["run", "tiny.toml", *KEPT, *arguments])
    return status, said.getvalue()
