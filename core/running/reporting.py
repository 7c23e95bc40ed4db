"""Reports of a run: a progress line, metrics to trackers, the results of validations."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from traceback import format_exception
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from hybridflow.core.contracts.observer import Observer, SampleRow, Span
from hybridflow.core.contracts.tracker import Tracker
from hybridflow.core.errors import HybridFlowError, PluginError
from hybridflow.core.job.job import Job
from hybridflow.core.names import reason
from hybridflow.core.plugins import registry
from hybridflow.core.processes.page import doing
from hybridflow.core.running.run import Run
from hybridflow.core.running.session import Prepared
from hybridflow.core.values.files import CONSOLE
from hybridflow.core.values.metrics import Metrics
from hybridflow.core.values.outcomes import EPISODE_OUTCOMES

LINE_EVERY_S = 2.0
"""Least seconds between two progress lines, without a terminal."""
LOGGED_EVERY_S = 60.0
"""Least seconds between two progress lines in the log: a week's are 2 MB."""
SHOWN = {
    "reward/scores": "reward",
    "cost/costs": "cost",
    "lambda": "lambda",
    "actor/response_length": "length",
    "actor/turns": "turns",
    "reward/accuracy": "accuracy",
    "cost/accuracy": "accuracy",
    "actor/accuracy": "accuracy",
    "actor/loss": "loss",
    "reward/loss": "loss",
    "cost/loss": "loss",
    "kl": "kl",
    "actor/entropy": "entropy",
    "actor/mismatch_mean": "mismatch",
    "tokens_per_second": "tok/s",
    "bytes/per_sequence": "B/seq",
}
"""Metric -> its label in the progress line, the most important first."""


class Reporter:
    """Reports a run to the console, to trackers and to observers. Use it as a context manager."""

    def __init__(
        self,
        job: Job,
        prepared: Prepared,
        observers: Sequence[Observer] = (),
        console: Console | None = None,
    ):
        self.job = job
        self.prepared = prepared
        self.observers = observers
        self.console = console or Console(stderr=False, highlight=False, soft_wrap=True)
        self.trackers: list[Tracker] = []
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._last_line = -math.inf
        self._begun: tuple[int, float] | None = None
        """The first completed step of this attempt, and its time (time.monotonic)."""
        self._warned = False
        """Whether the last step's mismatch was above run.mismatch_warn."""
        self._failing: set[Tracker | Observer] = set()
        """Trackers and observers that failed when they were told something last."""
        self._log_file: TextIO | None = None
        self._last_logged = -math.inf

    def __enter__(self) -> Reporter:
        try:
            self._log_file = (self.job.folder / CONSOLE).open("a", buffering=1, encoding="utf-8")
        except OSError as error:
            self.say(f"{CONSOLE} is left out: {reason(error)}")
        rows = ", ".join(f"{n} {name} rows" for name, n in self.prepared.rows.items())
        self.say(f"{self.title}: {self.job.algorithm_name} on {rows}; folder {self.job.folder}")
        for name, dropped in self.prepared.dropped.items():
            if dropped:
                self.say(
                    f"{dropped} {name} rows are left out: "
                    "their prompts are longer than data.max_prompt_tokens"
                )
        for note in self.prepared.notes:
            self.say(f"note: {note}")
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        self._stop_progress()
        self._close_trackers()
        for observer in self.observers:
            self._tell(observer, "what it has not written yet", observer.close)
        if error is not None:
            expected = isinstance(error, HybridFlowError | KeyboardInterrupt)
            # What nobody expected is an error of ours or of a plugin.
            text = "" if expected else "".join(format_exception(error))
            self._write(text or str(error) or "interrupted")
        self._close_log()

    def _close_trackers(self) -> None:
        """Close each tracker; what one could not write is told, and stops nothing."""
        for tracker in self.trackers:
            try:
                tracker.close()
            except Exception as error:
                name = type(tracker).__name__
                self.say(f"{name} was not closed, and its last metrics may be lost: {error}")
        self.trackers = []

    @property
    def title(self) -> str:
        """Name of the run stage, or of the run if it has only one."""
        return self.job.stage or self.job.name

    def say(self, text: str) -> None:
        """Print a line on the console unchanged, without rich's markup; it is logged too."""
        self.console.print(text, markup=False)
        self._write(text)

    def _write(self, text: str) -> None:
        """Add lines to the log. A full disk ends the log, which is told, and not the run."""
        if self._log_file is None:
            return
        now = datetime.now(UTC).isoformat(sep=" ", timespec="seconds").removesuffix("+00:00")
        try:
            self._log_file.write("".join(f"{now} {line}\n" for line in text.splitlines()))
        except OSError as error:
            self._close_log()
            self.say(f"{CONSOLE} ends here: {reason(error)}")

    def _close_log(self) -> None:
        """Close the log; lines that did not fit on the disk have been told of."""
        if self._log_file is not None:
            with contextlib.suppress(OSError):
                self._log_file.close()
            self._log_file = None

    def begin(self, step: int, parameters: Mapping[str, int]) -> None:
        """Start trackers and the progress bar: the models are built, training goes on after `step`.

        `parameters` maps a role to its number of parameters.
        """
        sizes = ", ".join(f"{name} {n / 1e6:.1f}M" for name, n in parameters.items())
        self.say(f"parameters: {sizes}" + (f"; resuming after step {step}" if step else ""))

        # A restarted job begins again, and the trackers of its last attempt are still open.
        self._close_trackers()

        # If a tracker's package is missing, only its own metrics are lost.
        for spec in self.job.trackers:
            try:
                tracker_class: type[Tracker] = registry().get("tracker", spec.name)
            except PluginError as error:
                self.say(f"tracker {spec.name!r} is left out: {error}")
                continue
            config = spec.config
            if config is None and tracker_class.Config:
                config = tracker_class.Config()
            try:
                tracker = tracker_class(config)
                tracker.start(self.job.folder, step)
            except HybridFlowError:  # it says what to do before the run goes on
                raise
            except Exception as error:
                self.say(f"tracker {spec.name!r} is left out: it does not start: {reason(error)}")
                continue
            self.trackers.append(tracker)

        self._begun = None
        # Without a terminal there is no bar, and `_line` prints lines.
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

    def observe(self, run: Run) -> None:
        """Show the run to the observers, as it begins or begins again."""
        for observer in self.observers:
            self._tell(observer, "the beginning of the run", partial(observer.begin, run))
        # Building the models is no part of the first step.
        self._spans(run.step, run.session.timeline.take(run.step).spans)

    def _stop_progress(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def step(self, run: Run, metrics: Metrics, seconds: float) -> dict[str, float]:
        """Report a step that took `seconds`; return its metrics with times and bytes."""
        values = metrics.values()

        # Bytes through the controller, in total and per generated sequence.
        traffic = run.session.runtime.traffic.take()
        values |= {f"bytes/{kind}": float(count) for kind, count in traffic.items()}
        values["bytes/controller"] = float(sum(traffic.values()))
        tokens, sequences = metrics.means.get("actor/response_length") or (0.0, 0.0)
        if sequences:
            values["bytes/per_sequence"] = sum(traffic.values()) / sequences
            values["tokens_per_second"] = tokens / seconds
            values["sequences_per_second"] = sequences / seconds

        # Seconds of the step, and of each role's calls on the busiest rank.
        values["seconds/step"] = seconds
        taken = run.session.timeline.take(run.step)
        values |= {f"seconds/{phase}": spent for phase, spent in taken.phases.items()}
        lost = f"the metrics of step {run.step}"
        for observer in self.observers:
            more = self._tell(observer, lost, partial(observer.step, values))
            values |= more or {}

        # The progress of the run.
        run.tokens += int(tokens)
        values["tokens_total"] = float(run.tokens)
        if (eta := self._eta(run.step)) is not None:
            values["eta_seconds"] = eta

        self._spans(run.step, taken.spans)
        self._log(run, values)
        self._line(run.step, values)
        self._check_mismatch(run.step, values)
        return values

    def _eta(self, step: int) -> float | None:
        """Return the seconds until run.steps are completed at the present pace, with validations.

        The first step does not count, since it includes start-up work; None after it.
        """
        now = time.monotonic()
        if self._begun is None:
            self._begun = (step, now)
        first, since = self._begun
        if step == first:
            return None
        return (now - since) / (step - first) * (self.job.run.steps - step)

    def _check_mismatch(self, step: int, values: Mapping[str, float]) -> None:
        """Warn if an engine's logprobs differ by more than run.mismatch_warn from its trainer's.

        The warning is repeated only after a step without it.
        """
        above = []
        for name, model in self.job.models.items():
            mismatch = values.get(f"{name}/mismatch_mean", 0.0)
            limit = self.job.run.mismatch_warn or model.spec.mismatch_stop / 5
            # `not <=` instead of `>`, because comparisons with NaN are false.
            if not mismatch <= limit:
                above.append(f"{name}'s by {mismatch:.3g} nats on average, more than {limit:g}")
        if above and not self._warned:
            self.say(
                f"step {step}: rollout and trainer logprobs of the same tokens and weights differ, "
                f"{'; '.join(above)} (run.mismatch_warn); the engine's weights, precision or "
                "sampling is not the trainer's (actor.sync.verify = true compares all weights at "
                "each sync); algorithm.correction weighs such tokens"
            )
        self._warned = bool(above)

    def ended(self) -> None:
        """Print the observers' lines."""
        for observer in self.observers:
            for line in self._tell(observer, "the end of the run", observer.ended) or ():
                self.say(line)

    def validation(self, run: Run, values: dict[str, float]) -> None:
        """Report the metrics of a validation, and whether they reach the goal of the run."""
        # Times of the validation are not the next step's.
        self._spans(run.step, run.session.timeline.take(run.step).spans)
        self._log(run, values)

        named = {name.removeprefix("validation/"): value for name, value in values.items()}
        shown = ", ".join(
            f"{name} {value:.4g}"
            for name, value in named.items()
            if not name.endswith("seconds") and (value or name not in EPISODE_OUTCOMES)
        )
        section = self.job.validation
        assert section is not None
        self.say(f"{self.title} step {run.step}: {section.name}: {shown}")
        if run.reached:
            self.say(
                f"{self.title}: the score has reached validation.stop_at = {section.stop_at}, "
                f"after step {run.step} of {run.job.run.steps}"
            )

    def _log(self, run: Run, values: Mapping[str, float]) -> None:
        """Send metrics to the trackers, and those of steps to hooks."""
        lost = f"the metrics of step {run.step}"
        for tracker in self.trackers:
            self._tell(tracker, lost, partial(tracker.log, run.step, values))
        if not any(name.startswith("validation/") for name in values):
            registry().notify("hybridflow_metrics", run=run, step=run.step, metrics=values)

    def samples(self, step: int, rows: Sequence[SampleRow]) -> None:
        """Show recorded rows to the observers and the trackers."""
        lost = f"the samples of step {step}"
        told: list[Tracker | Observer] = [*self.observers, *self.trackers]
        for one in told if rows else ():
            self._tell(one, lost, partial(one.samples, step, rows))

    def _spans(self, step: int, spans: Sequence[Span]) -> None:
        for observer in self.observers:
            self._tell(observer, f"the times of step {step}", partial(observer.spans, step, spans))

    def checkpoint(self, step: int) -> None:
        """Tell observers and trackers that a checkpoint of `step` is about to be written."""
        told: list[Tracker | Observer] = [*self.observers, *self.trackers]
        for one in told:
            self._tell(one, "what it has seen", partial(one.checkpoint, step))

    def _tell(self, one: Tracker | Observer, lost: str, call: Callable[[], Any]) -> Any:
        """Call a method of a tracker or an observer, and return its answer.

        That it fails is said, and stops nothing; the answer is None. It is said again after a call
        that did not fail. lost: what the call was to keep.
        """
        try:
            with doing(f"{type(one).__name__}: {lost}"):
                answer = call()
            self._failing.discard(one)
            return answer
        except Exception as error:
            if one not in self._failing:
                self.say(
                    f"{type(one).__name__} lost {lost}: {reason(error)}; "
                    "the run goes on, and it gets what comes later"
                )
            self._failing.add(one)
            return None

    def _line(self, step: int, values: Mapping[str, float]) -> None:
        """Show a step's main metrics and its three longest calls, as progress or as a line."""
        shown = {label: values[name] for name, label in SHOWN.items() if name in values}
        line = "  ".join(
            f"{label} {value:,.0f}" if value >= 1000 else f"{label} {value:.3g}"
            for label, value in shown.items()
        )

        # The calls that took longest.
        totals = ("seconds/step", "seconds/predicted")
        calls = [
            (value, name)
            for name, value in values.items()
            if name.startswith("seconds/") and name not in totals
        ]
        longest = sorted(calls, reverse=True)[:3]
        phases = " ".join(f"{name.removeprefix('seconds/')} {value:.2f}" for value, name in longest)
        line = f"{line}  {values['seconds/step']:.2f} s ({phases})"

        # Lines come at intervals, and for the last step.
        last = step == self.job.run.steps
        title = f"{self.title} step {step}/{self.job.run.steps}"
        if last or time.monotonic() - self._last_logged >= LOGGED_EVERY_S:
            self._last_logged = time.monotonic()
            self._write(f"{title}  {line}")
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=step, line=line)
        elif last or time.monotonic() - self._last_line >= LINE_EVERY_S:
            self._last_line = time.monotonic()
            if "eta_seconds" in values and not last:
                line += f"  eta {timedelta(seconds=round(values['eta_seconds']))}"
            self.console.print(f"{title}  {line}", markup=False)
