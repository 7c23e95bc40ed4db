"""What a run tells while it runs: a progress line, metrics to trackers, the results of validations."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from hybridflow.core.contracts.tracker import Tracker
from hybridflow.core.errors import HybridFlowError, PluginError
from hybridflow.core.job.job import Job
from hybridflow.core.plugins import registry
from hybridflow.core.running.predictions import predicted
from hybridflow.core.running.run import Run
from hybridflow.core.running.session import Prepared
from hybridflow.core.values.metrics import Metrics

LINE_EVERY_S = 2.0
"""Without a terminal, a line at most this often."""
SHOWN = {
    "reward/scores": "reward", "reward/score": "reward", "cost/costs": "cost", "lambda": "lambda", "actor/loss": "loss",
    "reward/loss": "loss", "cost/loss": "loss", "reward/accuracy": "accuracy", "cost/accuracy": "accuracy",
    "actor/accuracy": "accuracy", "actor/turns": "turns", "kl": "kl",
    "actor/mismatch_mean": "mismatch", "tokens_per_second": "tok/s", "bytes/per_sequence": "B/seq",
}  # fmt: skip


class Reporter:
    """Console, trackers, and what validations found."""

    def __init__(self, job: Job, prepared: Prepared, console: Console | None = None):
        self.job, self.prepared = job, prepared
        self.console = console or Console(stderr=False, highlight=False, soft_wrap=True)
        self.trackers: list[Tracker] = []
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._last_line = 0.0
        self._warned = False
        self.foresight = predicted(job)

    def __enter__(self) -> Reporter:
        rows = ", ".join(f"{n} {name} rows" for name, n in self.prepared.rows.items())
        self.say(f"{self.title}: {self.job.algorithm_name} on {rows}; folder {self.job.folder}")
        for name, dropped in self.prepared.dropped.items():
            if dropped:
                self.say(
                    f"{dropped} {name} rows are left out: their prompts are longer than data.max_prompt_tokens"
                )
        return self

    def __exit__(self, *error: Any) -> None:
        self._stop_progress()
        for tracker in self.trackers:
            tracker.close()

    @property
    def title(self) -> str:
        return self.job.stage or self.job.name

    def say(self, text: str) -> None:
        self.console.print(text, markup=False)

    def begin(self, step: int, parameters: Mapping[str, int]) -> None:
        """The models are built; training goes on after `step`."""
        sizes = ", ".join(f"{name} {n / 1e6:.1f}M" for name, n in parameters.items())
        self.say(f"parameters: {sizes}" + (f"; resuming after step {step}" if step else ""))
        for tracker in self.trackers:  # a restart opens them again
            tracker.close()
        self.trackers = []
        for spec in self.job.trackers:
            try:
                tracker_class: type[Tracker] = registry().get("tracker", spec.name)
            except PluginError as error:
                self.say(f"tracker {spec.name!r} is left out: {error}")
                continue
            config_class = tracker_class.Config
            tracker = tracker_class(
                config_class() if spec.config is None and config_class else spec.config
            )
            tracker.start(self.job.folder, step)
            self.trackers.append(tracker)
        self._stop_progress()
        if self.console.is_terminal:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(bar_width=20),
                TimeRemainingColumn(),
                TextColumn("{task.fields[line]}"),
            )
            self._progress = Progress(*columns, console=self.console)
            self._task = self._progress.add_task(
                self.title, total=self.job.run.steps, completed=step, line=""
            )
            self._progress.start()

    def _stop_progress(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def step(self, run: Run, metrics: Metrics, seconds: float) -> dict[str, float]:
        """Log a step that is over; gives its metrics with times and bytes."""
        runtime = run.session.runtime
        values = metrics.values()
        length = metrics.means.get("actor/response_length")
        sequences = length[1] if length else 0.0
        traffic = runtime.traffic.take()
        values |= {f"bytes/{kind}": float(count) for kind, count in traffic.items()}
        values["bytes/controller"] = float(sum(traffic.values()))
        if length and sequences:
            values["bytes/per_sequence"] = sum(traffic.values()) / sequences
            values["tokens_per_second"] = length[0] / seconds
            values["sequences_per_second"] = sequences / seconds
        values["seconds/step"] = seconds
        values |= {
            f"seconds/{phase}": spent for phase, spent in run.session.timeline.take().items()
        }
        if self.foresight is not None:
            self.foresight.add(values)
            values["seconds/predicted"] = self.foresight.seconds
        self._log(run, values)
        self._line(run.step, values)
        self._check_mismatch(run.step, values)
        return values

    def _check_mismatch(self, step: int, values: Mapping[str, float]) -> None:
        """Raises HybridFlowError above run.mismatch_stop; says once that run.mismatch_warn is passed, until it no longer is."""
        section = self.job.run
        means = [value for name, value in values.items() if name.endswith("/mismatch_mean")]
        found = max(means, key=lambda mean: (math.isnan(mean), mean), default=0.0)
        said = f"step {step}: rollout and trainer logprobs of the same tokens and weights differ by {found:.3g} nats on average"
        likely = "the engine's weights, precision or sampling is not the trainer's (actor.sync.verify = true compares weights)"
        if section.mismatch_stop is not None and not found <= section.mismatch_stop:
            raise HybridFlowError(
                f"{said}, more than run.mismatch_stop = {section.mismatch_stop}; {likely}"
            )
        above = section.mismatch_warn is not None and not found <= section.mismatch_warn
        if above and not self._warned:
            self.say(
                f"{said}, more than run.mismatch_warn = {section.mismatch_warn}; {likely}; algorithm.correction weighs such "
                "tokens"
            )
        self._warned = above

    def ended(self) -> None:
        """Predicted against measured times, where they are known."""
        for line in self.foresight.lines() if self.foresight is not None else ():
            self.say(line)

    def validation(self, run: Run, values: dict[str, float]) -> None:
        run.session.runtime.traffic.take()
        run.session.timeline.take()
        self._log(run, values)
        shown = ", ".join(
            f"{k.removeprefix('validation/')} {v:.4g}"
            for k, v in values.items()
            if not k.endswith("seconds")
        )
        assert self.job.validation is not None
        self.say(f"{self.title} step {run.step}: {self.job.validation.name}: {shown}")
        if run.reached:
            goal = self.job.validation.stop_at
            self.say(
                f"{self.title}: the score has reached validation.stop_at = {goal}, after step {run.step} of {run.job.run.steps}"
            )

    def _log(self, run: Run, values: Mapping[str, float]) -> None:
        for tracker in self.trackers:
            tracker.log(run.step, values)
        if not any(k.startswith("validation/") for k in values):
            registry().notify("hybridflow_metrics", run=run, step=run.step, metrics=values)

    def _line(self, step: int, values: Mapping[str, float]) -> None:
        shown = {label: values[key] for key, label in SHOWN.items() if key in values}
        line = "  ".join(
            f"{label} {value:,.0f}" if value >= 1000 else f"{label} {value:.3g}"
            for label, value in shown.items()
        )
        whole = ("seconds/step", "seconds/predicted")
        spent = sorted(
            ((v, k) for k, v in values.items() if k.startswith("seconds/") and k not in whole),
            reverse=True,
        )
        phases = " ".join(f"{k.removeprefix('seconds/')} {v:.2f}" for v, k in spent[:3])
        line = f"{line}  {values['seconds/step']:.2f} s ({phases})"
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=step, line=line)
        elif time.monotonic() - self._last_line >= LINE_EVERY_S or step == self.job.run.steps:
            self._last_line = time.monotonic()
            self.say(f"{self.title} step {step}/{self.job.run.steps}  {line}")
