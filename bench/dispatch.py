"""A call on a worker group: its latency, the bytes per second that it moves, and what passes through the controller.

Beside bare Ray actors in the same environment (the floor), and verl's controller with both of its serialisers. Rounds
are taken in turns and compared as paired ratios.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

os.environ |= {
    "OMP_NUM_THREADS": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}

import numpy as np
import ray
import torch
from common import ROOT, Peer, emit, paired, timed

from hybridflow.backends.ray.config import RayConfig
from hybridflow.backends.ray.runtime import RayRuntime
from hybridflow.core.contracts.runtime import ResourcePool
from hybridflow.core.contracts.worker import Worker, register
from hybridflow.core.groups.group import Pool, WorkerGroup
from hybridflow.core.values.batch import Batch
from hybridflow.settle import run

WORKERS = 2
SMALL = (2, 128)
"""1 KB"""
LARGE = (256, 262_144)
"""256 MB; moved twice, there and back"""
LATENCY_ROUNDS, CALLS, MOVES, WARM = 30, 20, 9, 5
"""WARM moves touch the whole object store, whose fresh pages are slow, for everybody."""
VERL = ("pickle", "numpy")
"""Its serialisers."""
FLOOR = "bare Ray"
LATENCY_BAR, THROUGHPUT_BAR, FLOOR_BAR, BYTES_BAR = 1.3, 3.0, 1.0, 200.0
"""A call at most 1.3 of bare Ray's; 256 MB at 3 times verl's rate and at bare Ray's; bytes of a sequence in the controller."""


class Calls(Worker):
    @register()
    def echo(self, batch: Batch) -> Batch:
        return batch

    @register()
    def add(self, batch: Batch) -> Batch:
        return Batch({"x": batch["x"].values + 1})


@ray.remote(num_cpus=0)
class Bare:
    def echo(self, data):
        return data

    def add(self, data):
        return {"x": data["x"] + 1}


class Ours:
    """Reads the result on the controller, shard by shard, as tensors of its own."""

    def __init__(self, runtime: RayRuntime):
        self.group = WorkerGroup(Calls, Pool.launch(ResourcePool("bench", (WORKERS,)), runtime))
        self.large = Batch({"x": torch.rand(LARGE)})
        self.small = torch.rand(SMALL)

    def echo_small(self):
        return self.group.echo(Batch({"x": self.small}))["x"].values

    def add_large(self):
        return [part["x"].values for part in self.group.add(self.large).split(WORKERS)]


class Floor:
    """Bare Ray: small data inside the calls, large data by ray.put, read without a copy."""

    def __init__(self):
        self.actors = [Bare.remote() for _ in range(WORKERS)]
        self.large, self.small = (
            np.random.rand(*LARGE).astype(np.float32),
            np.random.rand(*SMALL).astype(np.float32),
        )

    def echo_small(self):
        parts = np.array_split(self.small, WORKERS)
        return ray.get(
            [a.echo.remote({"x": part}) for a, part in zip(self.actors, parts, strict=True)]
        )

    def add_large(self):
        handles = [ray.put({"x": part}) for part in np.array_split(self.large, WORKERS)]
        return ray.get([a.add.remote(h) for a, h in zip(self.actors, handles, strict=True)])


def latency(ours: Ours, floor: Floor, peers: dict[str, Peer]) -> bool:
    """Medians of `CALLS` calls, in turns."""
    who: dict[str, Callable[[], list[float]]] = {
        "ours": lambda: [timed(ours.echo_small) for _ in range(CALLS)],
        FLOOR: lambda: [timed(floor.echo_small) for _ in range(CALLS)],
    }
    for name, peer in peers.items():
        who[name] = lambda peer=peer: peer.ask(f"echo {SMALL[0]} {SMALL[1]} {CALLS}")
    rounds, met = in_turns(who, LATENCY_ROUNDS, warm=1), True
    title = "call of 1 KB to 2 workers"
    for name, taken in rounds.items():
        if name != "ours":
            emit(f"{title}: {name}", statistics.median(taken) * 1e3, "ms")
            bar = LATENCY_BAR if name == FLOOR else None
            ratio = paired(rounds["ours"], taken)
            value = statistics.median(rounds["ours"]) * 1e3
            spread = quartiles([a / b for a, b in zip(rounds["ours"], taken, strict=True)])
            met &= emit(
                title, value, "ms", ratio=ratio, against=name, bar=bar, at_most=True, spread=spread
            )
    return met


def throughput(ours: Ours, floor: Floor, peers: dict[str, Peer]) -> bool:
    """GB/s of 256 MB there and back (x + 1)."""
    moved = 2 * LARGE[0] * LARGE[1] * 4 / 1e9
    who: dict[str, Callable[[], list[float]]] = {
        "ours": lambda: [timed(ours.add_large)],
        FLOOR: lambda: [timed(floor.add_large)],
    }
    for name, peer in peers.items():
        who[name] = lambda peer=peer: peer.ask(f"add {LARGE[0]} {LARGE[1]} 1")
    rounds, met = in_turns(who, MOVES, warm=WARM), True
    title = "256 MB there and back"
    for name, taken in rounds.items():
        if name != "ours":
            emit(f"{title}: {name}", moved / statistics.median(taken), "GB/s")
            bar = THROUGHPUT_BAR if name in peers else FLOOR_BAR
            ratio = paired(taken, rounds["ours"])
            spread = quartiles([a / b for a, b in zip(taken, rounds["ours"], strict=True)])
            met &= emit(
                title,
                moved / statistics.median(rounds["ours"]),
                "GB/s",
                ratio=ratio,
                against=name,
                bar=bar,
                spread=spread,
            )
    return met


def quartiles(ratios: list[float]) -> list[float]:
    """The middle half of the rounds: single ones meet other work of the machine."""
    return statistics.quantiles(ratios, n=4)[::2]


def in_turns(
    who: dict[str, Callable[[], list[float]]], rounds: int, warm: int
) -> dict[str, list[float]]:
    """name -> the median of each round."""
    for once in who.values():
        for _ in range(warm):
            once()
    taken: dict[str, list[float]] = {name: [] for name in who}
    for _ in range(rounds):
        for name, once in who.items():
            taken[name].append(statistics.median(once()))
    return taken


def controller_bytes() -> bool:
    """A few GRPO steps of the arithmetic example on Ray, two ranks; bytes of our messages and of columns read."""
    with tempfile.TemporaryDirectory() as folder:
        overrides = [
            "runtime=ray", "pools.main=[2]", f"run.folder={folder}", "run.name=bench", 'run.trackers=["jsonl"]',
            "stages.warm-up.run.steps=2", "stages.grpo.run.steps=4",
        ]  # fmt: skip
        with contextlib.redirect_stdout(io.StringIO()):
            run(ROOT / "examples" / "arithmetic.toml", overrides)
        (log,) = Path(folder).glob("**/*grpo*/metrics.jsonl")
        steps = [json.loads(line) for line in log.read_text().splitlines()]
    steps = [step for step in steps if "bytes/per_sequence" in step]
    for kind in ("sent", "received", "fetched"):
        emit(
            f"controller bytes of a GRPO step: {kind}",
            statistics.median(s[f"bytes/{kind}"] for s in steps),
            "B",
        )
    value = statistics.median(step["bytes/per_sequence"] for step in steps)
    return emit(
        "controller bytes per sequence of a GRPO step", value, "B", bar=BYTES_BAR, at_most=True
    )


def main() -> int:
    runtime = RayRuntime(RayConfig(object_store_gb=2.0))
    runtime.start()
    peers: dict[str, Peer] = {}
    met = True
    try:
        for method in VERL:
            environment = {
                **os.environ,
                "VERL_DATAPROTO_SERIALIZATION_METHOD": method if method != "pickle" else "",
            }
            try:
                peers[f"verl, {method}"] = Peer("verl", "verl_dispatch.py", environment)
            except (FileNotFoundError, RuntimeError) as error:
                print(error, file=sys.stderr)
                met = False
        ours, floor = Ours(runtime), Floor()
        met &= latency(ours, floor, peers)
        met &= throughput(ours, floor, peers)
    finally:
        for peer in peers.values():
            peer.close()
        runtime.shutdown()
    met &= controller_bytes()
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
