"""Runs whose processes, disk, clock, numbers and sockets are attacked: the same weights, and every step once.

A run of 40 steps is started as a user starts it, with --supervise and a checkpoint every second step; what ends it by
its status is started again with --resume, as a scheduler or a user does.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import attrs
from helpers.network import listening
from helpers.tiny import REWARDS, exported, learning, write

from campaign.cases import Result
from campaign.judge import start_judge
from hybridflow.cli.stacks import stacks
from hybridflow.core.processes.look import descendants, looks, state_of

STEPS = 40
PATIENCE_S = 4.0
SETTINGS = (
    f"run.steps={STEPS}", "run.checkpoint_every=2", "run.restarts=1000",
    f"run.patience_s={PATIENCE_S}", "run.hang=restart", "run.report=false", "reward.function=rewards:bad_once",
)  # fmt: skip
RAY = "runtime={name='ray', threads=1}"
AHEAD = (
    "pools={main=[1], engines=[1]}", "actor.generation.pool=engines", "run.max_staleness=1",
    "algorithm.correction=truncate",
)  # fmt: skip
WORKERS = "--- traceback of the worker ---\nTraceback (most recent call last)"
"""What an error has below its message where it is of a worker's code."""
OWN = "rollout={own_process=true, restarts=1000}"
JUDGED = (
    "reward={function='judge', options={model='any', url='http://127.0.0.1:PORT/v1', key='MARK'}}"
)


@attrs.frozen
class Variant:
    """A kind of run."""

    settings: tuple[str, ...]
    victims: tuple[str, ...]
    """Names of its processes, by the beginning."""
    weight: float
    reference: str = ""
    """The variant whose undisturbed run has the same bits, and starts sooner; "": this one."""
    ray: bool = False


SERVICES = ("the gcs_server", "the raylet")
VARIANTS = {
    "inline": Variant((), ("controller", "writer"), 4),
    "inline, ahead": Variant(AHEAD, ("controller", "writer"), 1),
    "inline, engine apart": Variant((OWN,), ("controller", "engine"), 1),
    "inline, judge": Variant((JUDGED,), ("controller", "judge"), 1),
    "ray": Variant((RAY, OWN), ("controller", "rank 0", "engine", "writer", *SERVICES), 1, "inline", True),
    "ray, 2 ranks": Variant((RAY, "pools.main=[2]"), ("controller", "rank 0", "rank 1", *SERVICES), 1, "", True),
    "ray, ahead": Variant(
        (RAY, *AHEAD), ("controller", "rank 0 of pool 'main'", "rank 0 of pool 'engines'", *SERVICES), 1,
        "inline, ahead", True,
    ),
}  # fmt: skip
OWN_METRICS = ("actor/engine_restarts",)
"""Metrics that say what was done to a run."""
BAD = ("nan", "inf", "-inf", "None", "'7'", "1e400", "[1.0]", "raise")
"""What a reward returns once."""
REWARD = """

import time

def bad_once(sample):
    time.sleep(0.01)  # so that a step is no shorter than what is done to it
    file = pathlib.Path(__file__).with_name("bad")
    if file.exists():
        said = file.read_text()
        file.unlink()
        if said == "raise":
            raise KeyError("no such unit")
        return eval(said, {"nan": float("nan"), "inf": float("inf")})
    return digits(sample)
"""
WEIGHTS = {
    "kill": 8, "segv": 1, "abort": 1, "stop": 2, "pause": 2, "term": 1, "int": 1, "supervisor": 1, "bad": 1, "clock": 1,
    "junk": 1, "full": 1,
}  # fmt: skip
"""Action -> how often it is drawn, beside the others."""
ENDS = {"term": 99, "int": 130, "supervisor": -9, "bad": 1, "full": 1}
"""Action -> the status by which a run ends after it; it is gone on with as a user does."""
EXCUSED_STEPS, EXCUSED_S = 4, 10.0
"""Completed steps and seconds after both of which a fault is no reason any more for a run to end."""
CLOCK = Path(__file__).parent / "clock"
"""In PYTHONPATH, it has the clock of a run's Python jump; Ray's own processes keep theirs."""
HANGS_S = 60.0
"""Seconds in which a run must have got on, beside its patience and what a start takes."""
START_S = {False: 30.0, True: 60.0}
"""What a start may take, without and with Ray, on a machine that is busy."""


@attrs.frozen
class Fault:
    """What is done to a run, and when."""

    after: int
    """Steps since the fault before, 0: at once, in the midst of what that has started."""
    delay_s: float
    """And then so many seconds."""
    action: str
    victim: str = ""
    value: float | str = 0.0

    @property
    def kind(self) -> str:
        """What it is counted as."""
        victim = self.victim.partition(" of ")[0].removeprefix("the ")
        for word in ("rank", "engine", "writer"):
            if word in victim or word in self.victim:
                victim = "engine" if "engines" in self.victim else word
        return f"{self.action} {victim}".strip()

    def __str__(self) -> str:
        after = f"{self.after} steps" if self.after else "nothing"
        value = f" ({self.value})" if self.value else ""
        return f"after {after} and {self.delay_s:.2f} s: {self.action} {self.victim}{value}"


class Runs:
    """A case is a variant and the faults that its run meets."""

    name = "runs"

    def draw(self, draws: random.Random) -> list[Fault]:
        names = list(VARIANTS)
        weights = [variant.weight for variant in VARIANTS.values()]
        self.variant = draws.choices(names, weights)[0]
        return draw_faults(draws, VARIANTS[self.variant])

    def do(self, items: Sequence[Fault], folder: Path) -> Result:
        result = Result()
        whole = reference(self.variant)
        place = "faults under Ray" if VARIANTS[self.variant].ray else "faults inline"
        with Attacked(folder, VARIANTS[self.variant], result) as run:
            for fault in items:
                if fault.action == "full" and not run.mounted:
                    continue  # no disk of its own can be made here
                if not run.meet(fault):
                    result.counts["not done, as the run ended before"] += 1
                    break
                if fault.action == "junk" and not run.listens:
                    continue
                result.counts[place] += 1
                result.counts[fault.kind] += 1
            run.ends()
            if not result.problems:
                for problem in differences(run.kept, whole):
                    run.lost(problem)
            if (folder / "bad").exists():
                result.counts.subtract({"bad": 1, place: 1})  # no reward was asked any more
        if result.problems:
            listed = "\n".join(f"  {fault}" for fault in items)
            result.problems[0] = f"{self.variant}:\n{listed}\n{result.problems[0]}"
        return result


def differences(run: Path, whole: Path) -> list[str]:
    """What differs in a run's folder from what `reference` has."""
    found = []
    rows = learning(run)
    if (steps := [row["step"] for row in rows]) != list(range(1, STEPS + 1)):
        found.append(f"the steps are {steps}")
    if exported(run) != (whole / "weights").read_bytes():
        found.append("the weights are others")
    right = json.loads((whole / "learning").read_text())
    others = [
        f"step {row['step']}, {key}: {row.get(key)} in the place of {expected.get(key)}"
        for row, expected in zip(rows, right, strict=False)
        for key in sorted(row.keys() | expected.keys())
        if json.dumps(row.get(key)) != json.dumps(expected.get(key)) and key not in OWN_METRICS
    ]
    if others:
        found.append("; ".join(["the metrics are others", *others[:5]]))
    if (run / "processes").exists():
        found.append("the folder `processes` is left")
    return found


def draw_faults(draws: random.Random, variant: Variant) -> list[Fault]:
    """Six faults, mostly kills."""
    faults = []
    for _ in range(6):
        after = draws.choice([0, 2, 3, 4, 5, 6])
        delay = draws.uniform(0.0, 4.0 if not after else 0.3)
        victim = draws.choice(variant.victims)
        action = draws.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
        value: float | str = 0.0
        if action in ("term", "int", "supervisor", "full"):
            victim = ""
        if action == "pause":
            value = draws.uniform(0.2, 3.0)
        if action == "stop" and victim == "judge":
            action = "kill"
        if action == "bad" and "judge" in variant.victims:
            action = "kill"
        if action in ("bad", "clock", "junk"):
            victim = ""
            value = {
                "bad": draws.choice(BAD),
                "clock": draws.choice([-86400.0, -30.0, 30.0, 3e6]),
                "junk": 0.0,
            }[action]
        faults.append(Fault(after, delay, action, victim, value))
    return faults


class Attacked:
    """A run of a variant, which is started again where it ends by a status."""

    def __init__(self, folder: Path, variant: Variant, result: Result):
        self.folder = folder
        self.variant = variant
        self.result = result
        self.kept = folder / "runs/tiny"
        self.out = folder / "out.txt"
        write(folder)
        (folder / "rewards.py").write_text(REWARDS + REWARD)
        self.mounted = False
        self.judge: subprocess.Popen[bytes] | None = None
        self.port = 0
        self.may_end: list[tuple[str, int, int, float]] = []
        """Faults after which a run ends by a status: action, status, the step then, and when."""
        self.listens = True
        """Whether a process listened when junk was to be sent."""
        self.orphans: list[int] = []
        """Processes of a supervisor that was killed."""
        self.starts = 0
        self.said_before = 0
        """Where in its output the last start begins."""
        self.pending: list[tuple[str, float, int, int]] = []
        """Faults after which no step was made yet: what, when, the step then, and how many starts there must have been."""
        self.progress = (0, 0.0)
        """The last completed step, and when it was seen."""

    def __enter__(self) -> Attacked:
        (self.folder / "runs").mkdir()
        command = ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(self.folder / "runs")]
        self.mounted = not subprocess.run(command, capture_output=True).returncode
        (self.folder / "clock").write_text("0")
        if JUDGED in self.variant.settings:
            self.judge, self.port = start_judge()
        self.start("--overwrite")
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.wait()
        if self.judge is not None:
            self.judge.kill()
            self.judge.wait()
        if self.mounted:
            subprocess.run(["umount", "-l", str(self.folder / "runs")])

    def start(self, how: str) -> None:
        """Start the run, or go on with it."""
        self.starts += 1
        self.said_before = len(self.out.read_text(errors="replace")) if self.out.exists() else 0
        settings = [
            one.replace("PORT", str(self.port)) for one in (*SETTINGS, *self.variant.settings)
        ]
        environment = {**os.environ, "COLUMNS": "1000"}
        environment["CAMPAIGN_CLOCK"] = str(self.folder / "clock")
        environment["PYTHONPATH"] = f"{CLOCK}{os.pathsep}{os.environ['PYTHONPATH']}"
        words = ["-m", "hybridflow.cli.main", "run", "tiny.toml", "--supervise"]
        command = [sys.executable, *words, how, *settings]
        with self.out.open("ab") as out:
            self.process = subprocess.Popen(
                command, cwd=self.folder, env=environment, stdout=out, stderr=subprocess.STDOUT
            )
        self.progress = (self.progress[0], time.monotonic())

    # --- what goes on ---

    def step(self) -> int:
        """The last completed step."""
        file = self.kept / "metrics.jsonl"
        with contextlib.suppress(OSError):
            found = re.findall(rb'"step": (\d+)', file.read_bytes())
            return int(found[-1]) if found else 0
        return 0

    def watch(self) -> bool:
        """Look once; start the run again where it has ended by a status. False: it has ended, or is lost."""
        now = time.monotonic()
        step = self.step()
        if step != self.progress[0]:
            self.progress = (step, now)
            for excuse in list(self.may_end):
                action, _, then, since = excuse
                long_ago = step > then + EXCUSED_STEPS and now > since + EXCUSED_S
                if long_ago and not self.waits(action):
                    self.may_end.remove(excuse)
            for one in list(self.pending):
                what, since, then, starts = one
                if step > then and self.starts >= starts:
                    back = self.result.back_s
                    back[what] = round(max(back.get(what, 0.0), now - since), 1)
                    self.pending.remove(one)
        if (status := self.process.poll()) is not None:
            return self.ended(status)
        since = max([self.progress[1], *(one[1] for one in self.pending)])
        if now - since > HANGS_S + PATIENCE_S + START_S[self.variant.ray]:
            self.lost(f"it has hung for {now - since:.0f} s")
            return False
        return True

    def waits(self, action: str) -> bool:
        """Whether a fault has still to take effect."""
        names = {"bad": "bad", "full": "runs/filler"}
        return action in names and (self.folder / names[action]).exists()

    def ended(self, status: int) -> bool:
        """Judge by a status of the run how it ended; start it again where it may."""
        said = self.out.read_text(errors="replace")[self.said_before :]
        said = said[said.rfind("supervisor: ") + 1 :].replace(WORKERS, "")
        if "Traceback (most recent call last)" in said:
            self.lost("a traceback is its last word")
            return False
        if status == 0:
            return False
        excuses = [one for one in self.may_end if one[1] == status]
        if not excuses:
            self.lost(f"it has ended by {status}, though nothing was done that ends it so")
            return False
        self.may_end.remove(excuses[0])
        (self.folder / "runs/filler").unlink(missing_ok=True)
        # A run that has lost its supervisor ends by itself.
        deadline = time.monotonic() + HANGS_S + PATIENCE_S + START_S[self.variant.ray]
        while any(state_of(pid) != "gone" for pid in self.orphans):
            if time.monotonic() > deadline:
                self.lost("it does not end without its supervisor")
                return False
            time.sleep(0.1)
        self.orphans = []
        begun = list((self.kept / "checkpoints").glob("step-*"))
        self.start("--resume" if begun else "--overwrite")
        return True

    def lost(self, why: str) -> None:
        """Note a problem, with what the run has said and where its processes are."""
        where = ""
        with contextlib.suppress(Exception):
            where = "\n".join(stacks(self.kept))[-4000:]
        said = self.out.read_text(errors="replace")[-4000:]
        self.result.problem(f"{why}\n{said}\n{where}")

    def ends(self) -> None:
        """Wait for the end."""
        if self.result.problems:
            return
        while self.watch():
            time.sleep(0.05)

    # --- faults ---

    def meet(self, fault: Fault) -> bool:
        """Do what a fault says at its time; False: the run has ended before."""
        begun = self.step()
        while fault.after and self.step() < min(begun + fault.after, STEPS - 1):
            if not self.watch():
                return False
            time.sleep(0.02)
        until = time.monotonic() + fault.delay_s
        while time.monotonic() < until:
            if not self.watch():
                return False
            time.sleep(0.02)
        if self.step() >= STEPS - 1:
            return False
        action = getattr(self, f"on_{fault.action}", self.on_signal)
        # What it does to the run may show before it returns.
        starts = self.starts + (fault.action in ENDS)
        self.pending.append((fault.kind, time.monotonic(), self.step(), starts))
        status = 1 if fault.victim == "judge" else ENDS.get(fault.action)
        if status is not None:
            self.may_end.append((fault.action, status, self.step(), time.monotonic()))
        while not action(fault):
            if not self.watch():
                return False
            time.sleep(0.02)
        return True

    def find(self, victim: str) -> int | None:
        """The process of this name that lives now."""
        if victim == "judge":
            assert self.judge is not None
            return self.judge.pid
        for look in looks(self.kept / "processes"):
            if look.name.startswith(victim) and state_of(look.pid, look.born) not in (
                "gone",
                "stopped",
            ):
                return look.pid
        return None

    def on_signal(self, fault: Fault) -> bool:
        """kill, segv, abort, stop: a signal to a process; False while there is none."""
        number = {
            "kill": 9,
            "segv": signal.SIGSEGV,
            "abort": signal.SIGABRT,
            "stop": signal.SIGSTOP,
        }[fault.action]
        return self.signal(fault.victim, number)

    def signal(self, victim: str, number: int) -> bool:
        pid = self.find(victim)
        if pid is None:
            return False
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            return False
        if victim == "judge":
            assert self.judge is not None
            self.judge.wait()
            time.sleep(1.0)
            self.judge, _ = start_judge(self.port)
        return True

    def on_pause(self, fault: Fault) -> bool:
        """Stop a process for a while; of a writer, it is what a slow disk does."""
        pid = self.find(fault.victim)
        if pid is None:
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
            time.sleep(float(fault.value))
            os.kill(pid, signal.SIGCONT)
        return True

    def on_term(self, fault: Fault) -> bool:
        return self.tell(signal.SIGTERM)

    def on_int(self, fault: Fault) -> bool:
        return self.tell(signal.SIGINT)

    def tell(self, number: int) -> bool:
        """Send the run a signal, once it is more than a Python that starts."""
        with contextlib.suppress(OSError):
            status = Path(f"/proc/{self.process.pid}/status").read_text()
            caught = int(re.findall(r"SigCgt:\s*(\w+)", status)[0], 16)
            if caught >> (signal.SIGTERM - 1) & 1:
                self.process.send_signal(number)
                return True
        return False

    def on_supervisor(self, fault: Fault) -> bool:
        for look in looks(self.kept / "processes"):
            if look.state == "stopped":  # nobody would be there to end it
                os.kill(look.pid, signal.SIGCONT)
        self.orphans = [
            pid for pid, command in descendants(self.process.pid) if "cli.main run" in command
        ]
        self.process.kill()
        return True

    def on_bad(self, fault: Fault) -> bool:
        (self.folder / "bad").write_text(str(fault.value))
        return True

    def on_clock(self, fault: Fault) -> bool:
        (self.folder / "clock").write_text(f"{fault.value}")
        return True

    def on_junk(self, fault: Fault) -> bool:
        """Bytes that mean nothing, to each port at which a process of the run listens on this machine."""
        pids = {str(pid) for pid, _ in descendants(self.process.pid)}
        draws = random.Random(int(fault.delay_s * 1e6))
        addresses = listening(pids) if pids else {}
        self.listens = bool(addresses)
        for address in addresses:
            host, _, port = address.rpartition(":")
            if not host.strip("[]").removeprefix("::ffff:").startswith("127."):
                self.result.problem(f"a process listens at {address}")
                continue
            with (
                contextlib.suppress(OSError),
                socket.create_connection(("127.0.0.1", int(port)), 1) as one,
            ):
                one.settimeout(0.2)
                one.sendall(
                    draws.choice(
                        [draws.randbytes(300), b"GET / HTTP/1.1\r\n\r\n", b"\0" * 64, b"\xff" * 8]
                    )
                )
                one.recv(100)
        return True

    def on_full(self, fault: Fault) -> bool:
        """Fill the file system of the run's folder."""
        with (self.folder / "runs/filler").open("wb", buffering=0) as file:
            try:
                while file.write(bytes(2**20)):
                    pass
            except OSError as error:
                assert error.errno == errno.ENOSPC
        return True


def reference(name: str) -> Path:
    """The folder with the weights and metrics of a variant's undisturbed run, which is made if it is not there."""
    name = VARIANTS[name].reference or name
    variant = VARIANTS[name]
    place = Path(os.environ["CAMPAIGN"]) / re.sub(r"\W+", "-", name)
    if not (place / "learning").exists():
        place.mkdir(parents=True, exist_ok=True)
        judge, port = start_judge() if JUDGED in variant.settings else (None, 0)
        folder = Path.cwd() / "reference"
        folder.mkdir()
        write(folder)
        (folder / "rewards.py").write_text(REWARDS + REWARD)
        settings = [one.replace("PORT", str(port)) for one in (*SETTINGS, *variant.settings)]
        command = [sys.executable, "-m", "hybridflow.cli.main", "run", "tiny.toml", *settings]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        if judge is not None:
            judge.kill()
            judge.wait()
        assert done.returncode == 0, done.stdout + done.stderr
        (place / "weights").write_bytes(exported(folder / "runs/tiny"))
        (place / "learning").write_text(json.dumps(learning(folder / "runs/tiny")))
    return place
