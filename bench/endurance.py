"""Whether a long run stays what it was: its memory, its weights under kills, and how soon it goes on.

    python bench/endurance.py memory    3,000 undisturbed steps on Ray: each process at their end and at step 500; of the
                                        gcs and the raylet what they grow beyond those of a Ray that does nothing
    python bench/endurance.py kills     800 steps on Ray with 20 kills, and 800 inline without: the same bits
    python bench/endurance.py back      kills of a rank, an engine, the local Ray and the controller, each in a run of its own:
                                        how long until the next step

They train examples/arithmetic.toml's GRPO from its warm-up, with batches of 256 responses. Without a name all run: the
first two take half an hour each on two cores. --steps and --kills make them shorter.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import tomlkit
from common import ROOT, emit

from hybridflow.cli.statuses import STOPPED
from hybridflow.core.processes.look import looks

STEPS = {"memory": 3000, "kills": 800, "back": 1000}
"""Part -> the steps of its runs."""
PROMPTS = 32
"""Of a step, eight responses to each: a quarter of the demo's."""
WARM = 500
"""The step at which a run's memory is taken for what it needs."""
GROWTH = 1.03
"""What each process may have of that at the end."""
IDLE = """
import sys, tempfile, ray
with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as folder:
    config = {"task_events_report_interval_ms": 0}
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, _temp_dir=folder, _system_config=config)
    print("started", flush=True)
    sys.stdin.read()
    ray.shutdown()
"""
"""A local Ray with the settings of a run's, which does nothing until its input ends."""
SERVICES = ("gcs_server", "raylet")
"""Processes of a local Ray, whose memory grows for some minutes where nothing is done with it."""
VICTIMS = ("controller", "rank 0", "writer", "the gcs_server", "the raylet")
"""Processes that are killed by turns, by the beginning of their names."""
SAME = ("step", "reward/scores", "actor/loss", "actor/grad_norm", "actor/entropy", "tokens_total")
"""Metrics of a step that do not depend on the clock."""
BACK_S = {
    "rank 0": 30.0,
    "engine": 30.0,
    "the gcs_server": 30.0,
    "the raylet": 30.0,
    "controller": 120.0,
}
"""Process -> seconds in which a run must be back when it was killed. What a start of the run takes is added to them, but
for a controller, where it is in them, and an engine, which alone starts again."""
LOOKED_AT = 150
"""Steps before the end at which memory is looked at: it takes some."""
SAMPLES = 20
"""Memory is the median of so many looks, as it goes up and down within a step."""


def prepare(folder: Path, steps: int) -> None:
    """Write grpo.toml, which trains what the demo's warm-up leaves; run that."""
    demo = ROOT / "examples/arithmetic.toml"
    if command(folder, str(demo), "--stage", "warm-up", "run.name=demo", "--overwrite").wait():
        raise SystemExit((folder / "out.txt").read_text()[-3000:])
    tables = tomlkit.parse(demo.read_text()).unwrap()
    stage = tables.pop("stages")["grpo"]
    actor = stage["actor"] | {"model": {"path": str(folder / "runs/demo/warm-up/export/actor")}}
    actor["optimizer"]["total_steps"] = steps
    del tables["validation"]
    tables["algorithm"] = stage["algorithm"] | {"prompts_per_step": PROMPTS}
    tables["actor"] |= actor
    tables["run"] = {"steps": steps, "checkpoint_every": 20, "restarts": 1000}
    tables["runtime"] = {"threads": 1}
    (folder / "grpo.toml").write_text(tomlkit.dumps(tables))


def command(folder: Path, *arguments: str) -> subprocess.Popen[bytes]:
    """Start `hybridflow run` in a folder; what it says goes to out.txt there."""
    with (folder / "out.txt").open("ab") as out:
        return subprocess.Popen(
            [sys.executable, "-m", "hybridflow.cli.main", "run", *arguments],
            cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=out,
            stderr=subprocess.STDOUT,
        )


def steps_of(run: Path) -> int:
    """The last completed step of a run."""
    file = run / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return json.loads(lines[-2])["step"] if len(lines) > 1 else 0


def own_memory(pid: int) -> int:
    """Bytes of memory that a process has for itself: without files, which it shares with others that come and go."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    fields = {line.split(":")[0]: int(line.split()[1]) for line in lines if line.endswith(" kB")}
    return 1024 * (fields["Pss_Anon"] + fields["Pss_Shmem"])


def services_of(pid: int) -> dict[str, int]:
    """Name -> number of the services of the local Ray that a process has started."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    names = {Path(f"/proc/{child}/comm").read_text().strip(): int(child) for child in children}
    return {name: names[name] for name in SERVICES}


def memory_of(run: Path, idle: dict[str, int]) -> dict[str, float]:
    """Name of each process of a run that goes on -> its median memory over some steps, in MB.

    With those of a Ray that does nothing, as "idle NAME".
    """
    taken: dict[str, list[float]] = {}
    for _ in range(SAMPLES):
        found = {look.name: look.pid for look in looks(run / "processes")}
        for name, pid in (found | {f"idle {name}": pid for name, pid in idle.items()}).items():
            taken.setdefault(name, []).append(own_memory(pid) / 1e6)
        time.sleep(0.37)
    return {name: statistics.median(values) for name, values in taken.items()}


def memory(folder: Path, steps: int) -> bool:
    """Compare each process's memory at the end of a run with that at step 500."""
    run = folder / "runs/memory"
    found = []
    # Its input ends with the body, and so it does.
    with subprocess.Popen(
        [sys.executable, "-c", IDLE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as idle:
        assert idle.stdout is not None
        while "started" not in idle.stdout.readline():
            assert idle.poll() is None
        services = services_of(idle.pid)
        process = command(
            folder, "grpo.toml", "run.name=memory", "runtime.name=ray", "run.report=false"
        )
        try:
            for step in (min(WARM, steps // 6), steps - LOOKED_AT):
                while steps_of(run) < step:
                    if process.poll() is not None:
                        raise SystemExit((folder / "out.txt").read_text()[-3000:])
                    time.sleep(0.2)
                found.append(memory_of(run, services))
            assert process.wait() == 0
        finally:
            process.terminate()
            process.wait()
    before, after = found
    met = before.keys() == after.keys()
    for name in before:
        if name.startswith("idle "):
            continue
        service = next((one for one in SERVICES if one in name), None)
        by_itself = after[f"idle {service}"] - before[f"idle {service}"] if service else 0.0
        met &= emit(
            f"memory of {name} after {steps} steps, less {by_itself:.2f} MB that an idle one has grown"
            if service else f"memory of {name} after {steps} steps",
            after[name] - by_itself, "MB", ratio=(after[name] - by_itself) / before[name],
            against=f"step {min(WARM, steps // 6)}", bar=GROWTH, at_most=True,
        )  # fmt: skip
    return met


def kills(folder: Path, steps: int, count: int) -> bool:
    """Compare the weights and metrics of a run on Ray that is killed so often with those of one that is not."""
    whole, cut = folder / "runs/whole", folder / "runs/cut"
    if command(folder, "grpo.toml", "run.name=whole", "run.report=false").wait():
        raise SystemExit((folder / "out.txt").read_text()[-3000:])
    draws = random.Random(0)
    process = command(
        folder, "grpo.toml", "run.name=cut", "runtime.name=ray", "run.report=false", "--supervise"
    )
    done, slowest = {}, 0.0
    for kill in range(count):
        # Anywhere between two of them, also while processes start.
        after = (kill + draws.random()) * steps / (count + 1)
        victim = draws.choice(VICTIMS)
        while steps_of(cut) < after or (pid := alive(cut, victim)) is None:
            if process.poll() is not None:
                raise SystemExit((folder / "out.txt").read_text()[-3000:])
            time.sleep(0.1)
        reached, began = steps_of(cut), time.perf_counter()
        os.kill(pid, signal.SIGKILL)
        done[victim] = done.get(victim, 0) + 1
        while steps_of(cut) <= reached and process.poll() is None:
            time.sleep(0.1)
        slowest = max(slowest, time.perf_counter() - began)
    if process.wait():
        raise SystemExit((folder / "out.txt").read_text()[-3000:])
    listed = ", ".join(f"{victim} {times}" for victim, times in sorted(done.items()))
    emit(f"kills of {listed}; slowest until there was a newer step", slowest, "s")
    rows = [
        [
            {key: row[key] for key in SAME if key in row}
            for row in map(json.loads, (run / "metrics.jsonl").open())
        ]
        for run in (whole, cut)
    ]
    met = emit(
        "steps, each of them once",
        sum(a == b for a, b in zip(*rows, strict=True)),
        "steps",
        bar=steps,
    )
    weights = [(run / "export/actor/model.safetensors").read_bytes() for run in (whole, cut)]
    return met & emit(
        "files of weights that are equal bit for bit",
        float(weights[0] == weights[1]),
        "files",
        bar=1,
    )


def back(folder: Path) -> bool:
    """Measure the time from a kill to the next step."""
    met = True
    engine = "rollout={own_process=true, restarts=10}"
    settings = [
        "runtime.name=ray",
        "run.report=false",
        "run.checkpoint_every=2",
        engine,
        "--supervise",
    ]
    for victim, bar in BACK_S.items():
        name = victim.replace(" ", "-")
        run = folder / "runs" / name
        began = time.perf_counter()
        process = command(folder, "grpo.toml", f"run.name={name}", *settings)
        _wait(run, 0, process, folder)
        start_s = time.perf_counter() - began
        _wait(run, 6, process, folder)
        pid = alive(run, victim)
        assert pid is not None, victim
        reached, killed = steps_of(run), time.perf_counter()
        os.kill(pid, signal.SIGKILL)
        _wait(run, reached, process, folder)
        taken = time.perf_counter() - killed
        process.send_signal(signal.SIGTERM)
        assert process.wait() == STOPPED
        own_start = 0.0 if victim in ("controller", "engine") else start_s
        what = f"from a kill of {victim} to the next step"
        met &= emit(what, taken, "s", bar=round(bar + own_start, 1), at_most=True)
    return met


def _wait(run: Path, step: int, process: subprocess.Popen[bytes], folder: Path) -> None:
    """Wait until a run has completed more than this step."""
    while steps_of(run) <= step:
        if process.poll() is not None:
            raise SystemExit((folder / "out.txt").read_text()[-3000:])
        time.sleep(0.05)


def alive(run: Path, victim: str) -> int | None:
    """The process of this name, if it lives."""
    for look in looks(run / "processes"):
        if look.name.startswith(victim) and not look.state:
            return look.pid
    return None


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", choices=list(STEPS), default=list(STEPS))
    parser.add_argument("--steps", type=int, help="instead of 3,000 and 800")
    parser.add_argument("--kills", type=int, default=20)
    given = parser.parse_args()
    met = True
    with tempfile.TemporaryDirectory(prefix="endurance-") as made:
        folder = Path(made)
        for part in given.parts:
            steps = given.steps or STEPS[part]
            prepare(folder, steps)
            if part == "memory":
                met &= memory(folder, steps)
            elif part == "kills":
                met &= kills(folder, steps, given.kills)
            else:
                met &= back(folder)
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
