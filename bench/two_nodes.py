"""The demo's second stage with its actor across two Ray nodes of this machine, beside one node: the same metrics, bit for bit.

python bench/two_nodes.py [--steps 20]

Both clusters are started by `ray start`'s own library and reached by `runtime.address`, as a cluster of machines is: the
processes meet at a server of rank 0, at the address that Ray has for its node. Two ranks of FSDP2, one on each node, and two on
one node. One JSON line per figure; exits 1 where a metric differs in any bit. Two minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
sys.path.insert(0, str(Path(__file__).parent))
from common import ROOT, emit
from ray.cluster_utils import Cluster

TIMES = ("seconds", "timestamp", "_gb", "sync_extra_mb", "per_second")
"""Parts of the names of metrics that tell a time or memory."""


def cluster(nodes: int, folder: str) -> Cluster:
    """A cluster of so many nodes with two CPUs each, the first of them its head."""
    options: dict[str, Any] = {"num_cpus": 2, "object_store_memory": 200 * 2**20}
    Path("/tmp/ray").mkdir(exist_ok=True)  # where its head writes its address, whatever temp_dir is
    made = Cluster(
        initialize_head=True,
        head_node_args=options | {"include_dashboard": False, "temp_dir": folder},
    )
    for _ in range(nodes - 1):
        made.add_node(**options)
    return made


def metrics(name: str, folder: str, address: str, pool: str, steps: int) -> list[dict[str, float]]:
    """The metrics of each step of the second stage, without times."""
    command = [
        sys.executable, "-m", "hybridflow.cli.main", "run", str(ROOT / "examples/arithmetic.toml"), f"run.folder={folder}",
        f"run.name={name}", "run.device=cpu", "runtime.threads=1", f"runtime.address={address}", f"pools.main={pool}",
        "stages.warm-up.run.steps=40", "stages.warm-up.validation.stop_at=0.3", f"stages.grpo.run.steps={steps}",
        "stages.grpo.algorithm.prompts_per_step=32", "run.report=false",
    ]  # fmt: skip
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{name}: {done.stdout[-2000:]}{done.stderr[-3000:]}")
    lines = (Path(folder) / name / "grpo" / "metrics.jsonl").read_text().splitlines()
    return [
        {
            key: value
            for key, value in json.loads(line).items()
            if not any(part in key for part in TIMES)
        }
        for line in lines
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    steps = parser.parse_args().steps
    found = {}
    for nodes, pool in ((1, "[2]"), (2, "[1, 1]")):
        with tempfile.TemporaryDirectory() as folder:
            ray = cluster(nodes, folder)
            try:
                found[nodes] = metrics(f"nodes-{nodes}", folder, ray.address, pool, steps)
            finally:
                ray.shutdown()
    one, two = found[1], found[2]
    differ = sorted(
        {
            key
            for a, b in zip(one, two, strict=True)
            for key in a.keys() | b.keys()
            if a.get(key) != b.get(key)
        }
    )
    names = {key for row in one for key in row}
    emit("metrics compared", len(names), f"of {len(one)} rows")
    good = emit("steps with the actor on two nodes", max(row["step"] for row in two), "", bar=steps)
    good &= emit(
        "metrics that differ from one node's", len(differ), ", ".join(differ), bar=0, at_most=True
    )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
