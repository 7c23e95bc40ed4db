"""Engines that are killed while they never stop (run.in_flight = "recompute"): the run goes on.

python bench/lost_engines.py               three kills; about a minute and a half
python bench/lost_engines.py --kills 20
python bench/lost_engines.py --tp 2        engines on two ranks each, of which one is killed

On Ray, with two engines, the embedded engine, and responses with lengths of their own, on steps that sleep: at
random moments one engine's process is killed. By weights that do not move, so that the tokens are known.

kills       the run ends as if nobody had been killed: no token lags by more than the bound, every drawn row is trained once,
            and the tokens are those of a run without a bound and without kills
landed      rows that were complete and had left their engine are not generated again
back        seconds from a kill until another engine is built in its place, and until it has weights

One JSON line per figure; exits 1 where a bar is missed.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).parent))
import ahead
import numpy as np
import ray
from common import emit
from in_flight import apart, taken

from hybridflow.core.running.serving import Serving
from hybridflow.kit.testing.runs import TinyRun
from hybridflow.settle.stages import overlay

BACK_S = 15.0
"""The most seconds from a kill until another engine can have weights, its start included."""
STALENESS = 2
STEPS_PER_KILL = 8


class Killer(threading.Thread):
    """Kills an engine that has completed a response, at random moments, one after the other."""

    def __init__(self, serving: Serving, kills: int):
        super().__init__(daemon=True)
        self.serving = serving
        self.left = kills
        self.killed: list[float] = []
        self.draws = random.Random(kills)
        self.over = threading.Event()

    def run(self) -> None:
        while self.left and not self.over.wait(self.draws.uniform(1.0, 4.0)):
            served = self.draws.choice(self.serving.replicas)
            alive = all(one.replica.alive and one.losses == 0 for one in self.serving.replicas)
            if not alive:
                continue
            process = self.draws.choice(served.processes)
            actor: Any = process.actor  # type: ignore[attr-defined]
            pid = ray.get(actor.__ray_call__.remote(lambda self: os.getpid()))
            self.killed.append(time.monotonic())
            os.kill(pid, signal.SIGKILL)
            self.left -= 1


def kills(count: int, tp: int) -> bool:
    algorithm = {
        "name": "in_flight:Drawn",
        "prompts_per_step": 8,
        "group_size": 4,
        "correction": "truncate",
    }
    tables: dict[str, Any] = {
        "sampling": {"max_tokens": 24},
        "actor": {"optimizer": {"lr": 1e-30}},
        "reward": {"function": "ahead:score"},
    }
    steps = STEPS_PER_KILL * count + 4
    engines = {"pool": "engines", "tp": tp}
    both = overlay(tables, {"actor": {"generation": engines}})
    run = apart(STALENESS, algorithm, pools={"main": [1], "engines": [2 * tp]}, **both)
    landed: list[int] = []
    built: list[float] = []
    back: list[float] = []
    killers: list[Killer] = []

    begin, regain, land = Serving.wake, Serving.regain, Serving._land

    def wake(self: Serving) -> None:
        if not killers:
            killers.append(Killer(self, count))
            killers[0].start()
        begin(self)

    def lands(self: Serving, served: Any, samples: list[int]) -> None:
        landed.extend(samples)
        land(self, served, samples)

    def regains(self: Serving) -> None:
        lost = [served for served in self.replicas if served.building is not None]
        for served in lost:
            served.building.result()
            built.append(time.monotonic() - killers[0].killed[-1])
        regain(self)
        back.extend(time.monotonic() - killers[0].killed[-1] for _ in lost)

    Serving.wake, Serving._land, Serving.regain = wake, lands, regains  # type: ignore[method-assign]
    try:
        lags, tokens, groups = taken(run, steps)
    finally:
        Serving.wake, Serving._land, Serving.regain = begin, land, regain  # type: ignore[method-assign]
        for killer in killers:
            killer.over.set()
    killed = len(killers[0].killed)
    ahead.napping = False
    _, plain, _ = taken(TinyRun(algorithm, {"run": {"samples": 0}, **tables}), steps)

    rows = len(tokens)
    each = [group for group in range(rows // 4) for _ in range(4)]
    met = emit("engines that were killed", killed, f"of {count}", bar=count)
    met &= emit("largest lag, in steps", max(lags), "", bar=STALENESS, at_most=True)
    met &= emit(
        "rows that were trained in the order drawn",
        sum(map(int.__eq__, groups, each)),
        f"of {rows}",
        bar=rows,
    )
    met &= emit(
        "rows with the tokens of a run without kills",
        sum(map(list.__eq__, tokens, plain)),
        f"of {rows}",
        bar=rows,
    )
    met &= emit(
        "landed rows that were generated again",
        len(landed) - len(set(landed)),
        "",
        bar=0,
        at_most=True,
    )
    emit("from a kill until another engine is built, median", float(np.median(built)), "s")
    return met & emit(
        "longest time from a kill until it can have weights",
        max(back),
        "s",
        bar=BACK_S,
        at_most=True,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--tp", type=int, default=1, help="ranks of an engine")
    asked = parser.parse_args()
    return 0 if kills(asked.kills, asked.tp) else 1


if __name__ == "__main__":
    sys.exit(main())
