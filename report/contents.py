"""What a page shows of runs, as plain values for JSON.

It is read from the runs' folders alone, and no torch is imported. Where a run has recorded more
than a page can hold, steps are left out evenly, and the page says so.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from hybridflow.core.running.origin import without_keys
from hybridflow.core.values.files import CONSOLE, MARK, RECORDING
from hybridflow.kit.recording import (
    MEMORY,
    SAMPLES,
    TIMELINE,
    Row,
    parts_of,
    read_columns,
    read_part,
    recorded_every,
)
from hybridflow.kit.runs import FoundRun, differing, find_runs, logged, read_mark
from hybridflow.kit.tracking import hide_key, plain_json
from hybridflow.report.health import findings

MOST_POINTS = 2000
"""Steps of a curve."""
MOST_TOKENS = 400_000
"""Tokens of responses, of all runs together."""
MOST_ROWS = 6000
"""Rows of samples, of all runs together."""
MOST_SPANS = 40_000
"""Spans of timelines, of all runs together."""
MOST_META = 2000
"""Characters of a row's own fields."""
CONSOLE_LINES = 60
TRAINER = ("old_logprobs", "logprobs")
"""The trainer's logprobs of the weights that generated: the first column that a row has."""
HIDDEN = (
    *("step", "data", "group", "sample_id", "record_id", "tokens", "meta"),
    *("prompt", "prompt_ids", "prompt_tokens", "response", "response_ids", "response_tokens"),
)
"""Columns that are shown by themselves or not at all."""
UNIQUE = ("run.seed", "run.name", "run.folder", "data.seed")
"""Settings by which the runs of one configuration, its seeds, may differ."""


def contents(folders: Sequence[Path], state: str | None = None) -> dict[str, Any]:
    """Return what the page shows of the runs in these folders.

    state: of the runs, where it is not what their folders say. Raises ConfigError for no run.
    """
    runs = list({run.folder: run for folder in folders for run in find_runs(folder)}.values())
    if state is not None:
        runs = [attrs.evolve(run, state=state) for run in runs]
    share = max(len(runs), 1)
    return {
        "runs": [run_contents(run, share) for run in runs],
        "differing": [
            {"key": key, "values": [_shown(key, value) for value in values]}
            for key, values in differing(runs).items()
            if len(runs) > 1
        ],
        "seeds": _seeds(runs),
    }


def run_contents(run: FoundRun, share: int = 1) -> dict[str, Any]:
    """Return what the page shows of a run, one of `share` runs."""
    rows = logged(run.folder)
    steps = [row for row in rows if not _is_validation(row)]
    validations = [row for row in rows if _is_validation(row)]
    mark, _ = read_mark(run.folder / MARK)
    timeline = timeline_contents(run.folder, MOST_SPANS // share)
    samples = samples_contents(run.folder, MOST_TOKENS // share, MOST_ROWS // share)
    console = _console(run.folder)
    return {
        "folder": str(run.folder),
        "algorithm": run.algorithm,
        "state": run.state,
        "step": run.step,
        "score": run.score,
        "settings": {key: _shown(key, value) for key, value in run.settings.items()},
        "starts": _starts(mark or {}),
        "versions": (mark or {}).get("versions", {}),
        "metrics": _columns(steps),
        "validations": _columns(validations),
        "samples": samples,
        "timeline": timeline,
        "findings": [
            finding.shown() for finding in findings(run, steps, validations, samples, timeline)
        ],
        "memory": _memory(run.folder),
        "console": console,
    }


def _is_validation(row: Row) -> bool:
    return any(name.startswith("validation/") for name in row)


def _starts(mark: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the starts of a run; commands have no keys in them."""
    return [
        {**start, "command": " ".join(without_keys(start.get("command", [])))}
        for start in mark.get("starts") or []
    ]


def _console(folder: Path) -> list[str]:
    try:
        lines = (folder / CONSOLE).read_text(errors="replace").splitlines()
    except OSError:
        return []
    return lines[-CONSOLE_LINES:]


def _memory(folder: Path) -> list[dict[str, Any]]:
    try:
        return json.loads((folder / RECORDING / MEMORY).read_text())
    except (OSError, ValueError):
        return []


def _seeds(runs: Sequence[FoundRun]) -> list[list[int]]:
    """Return the numbers of the runs that differ by their seeds alone, where there are several."""
    groups: dict[str, list[int]] = defaultdict(list)
    for number, run in enumerate(runs):
        rest = {key: value for key, value in run.settings.items() if key not in UNIQUE}
        groups[json.dumps(rest, sort_keys=True, default=str)].append(number)
    return [group for group in groups.values() if len(group) > 1]


def _columns(rows: Sequence[Row]) -> dict[str, Any]:
    """Return {"step": [...], "columns": {name: [...]}} of metrics, null where there is none."""
    every = -(-len(rows) // MOST_POINTS) or 1
    kept = [row for at, row in enumerate(rows) if at % every == 0 or at == len(rows) - 1]
    names = dict.fromkeys(name for row in kept for name in row if name != "step")
    return {
        "step": [row["step"] for row in kept],
        "every": every,
        "columns": {name: [_number(row.get(name)) for row in kept] for name in names},
    }


def _number(value: Any) -> float | None:
    """Return a number as JSON may have it; six digits are enough for a picture."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(f"{value:.7g}") if abs(value) < 1e9 else round(value)


def _shown(key: str, value: Any) -> str:
    """Return a setting as text. A page is sent to others, so that values of keys are hidden."""
    return plain_json(hide_key(key, value))


# --- samples ---


def samples_contents(folder: Path, most_tokens: int, most_rows: int) -> dict[str, Any]:
    """Return the recorded rows of a run, or as many as the limits allow, of steps that lie evenly.

    Groups are whole, or left out.
    """
    parts = parts_of(folder / RECORDING, SAMPLES)
    light = ("step", "data", "group", "tokens")
    columns = [read_columns(part, light) for part in parts]
    groups: dict[tuple[str, int], dict[Any, list[tuple[int, int, int]]]] = {}
    total = 0
    for number, own in enumerate(columns):
        rows = zip(*(own[name] for name in light), strict=True)
        for at, (step, data, group, tokens) in enumerate(rows):
            of_step = groups.setdefault((data, step), {})
            of_step.setdefault(group, []).append((number, at, tokens or 0))
            total += 1

    chosen = _choose(groups, most_tokens, most_rows)
    by_part: dict[int, list[int]] = defaultdict(list)
    for number, at in chosen:
        by_part[number].append(at)
    encoder = _RowEncoder()
    for number in sorted(by_part):
        for row in read_part(parts[number], numbers=sorted(by_part[number])):
            encoder.add(row)
    return {
        **encoder.encoded(),
        "recorded": total,
        "every": recorded_every(folder, SAMPLES),
    }


def _choose(
    groups: Mapping[tuple[str, int], Mapping[Any, Sequence[tuple[int, int, int]]]],
    most_tokens: int,
    most_rows: int,
) -> list[tuple[int, int]]:
    """Return (part, row) of the rows to show.

    groups: (data, step) -> group -> (part, row, tokens) of its rows.
    """
    sets: dict[str, list[int]] = defaultdict(list)
    for data, step in groups:
        sets[data].append(step)
    # Fewer groups of a step first, then fewer steps: a curve of steps is worth more than a crowd.
    most_groups = max((len(own) for own in groups.values()), default=0)
    every = 1
    while True:
        rows: list[tuple[int, int]] = []
        tokens = 0
        for data, steps in sets.items():
            for at, step in enumerate(steps):
                if at % every and at != len(steps) - 1:
                    continue
                for own in list(groups[data, step].values())[:most_groups]:
                    rows += [(part, row) for part, row, _ in own]
                    tokens += sum(count for *_, count in own)
        if (tokens <= most_tokens and len(rows) <= most_rows) or len(rows) <= 1:
            return rows
        if most_groups > 4:
            most_groups //= 2
        elif every <= 8 * len(groups):
            every *= 2
        elif most_groups > 1:
            most_groups //= 2
        else:  # one group that is larger than the page
            return rows[: max(1, most_rows)]


class _RowEncoder:
    """Writes rows with tokens and prompts as numbers in lists that they share."""

    def __init__(self) -> None:
        self._pieces: dict[str, int] = {}
        self._prompts: dict[tuple[int, ...], int] = {}
        self._names: dict[str, int] = {}
        self._rows: list[dict[str, Any]] = []

    def add(self, row: Row) -> None:
        prompt = tuple(self._piece(piece) for piece in row.get("prompt_tokens", ()))
        tokens: dict[str, Any] = {}
        values: dict[str, Any] = {}
        length = len(row.get("response_tokens", ()))
        for name, value in row.items():
            if name in HIDDEN or name in TRAINER:
                continue
            if isinstance(value, list):
                if len(value) == length:
                    tokens[name] = _token_values(np.asarray(value, np.float64), 4)
            elif isinstance(value, str):
                values[name] = value[:MOST_META]
            else:
                values[name] = _number(value)
        trainer = next((row[name] for name in TRAINER if name in row), None)
        if trainer is not None:
            trained = np.asarray(trainer, np.float64)
            if "rollout_logprobs" in row:
                difference = trained - np.asarray(row["rollout_logprobs"], np.float64)
                # The engine has no logprobs of what an environment wrote.
                if "weight_version" in row:
                    foreign = np.asarray(row["weight_version"]) < 0
                    difference[foreign] = math.nan
                    own = np.where(foreign, math.nan, row["rollout_logprobs"])
                    tokens["rollout_logprobs"] = _token_values(own, 4)
                tokens["mismatch"] = _token_values(difference, 7)
            else:
                tokens["logprobs"] = _token_values(trained, 4)
        self._rows.append(
            {
                "step": row["step"],
                "data": row["data"],
                "group": row.get("group", 0),
                "prompt": self._prompts.setdefault(prompt, len(self._prompts)),
                "response": [self._piece(piece) for piece in row.get("response_tokens", ())],
                "tokens": tokens,
                "values": values,
                "meta": (row.get("meta") or "")[:MOST_META],
            }
        )

    def _piece(self, text: str) -> int:
        return self._pieces.setdefault(text, len(self._pieces))

    def encoded(self) -> dict[str, Any]:
        return {
            "pieces": list(self._pieces),
            "prompts": [list(prompt) for prompt in self._prompts],
            "rows": self._rows,
        }


def _token_values(values: np.ndarray, digits: int) -> Any:
    """Return the values of a row's tokens, rounded; one number where all are the same."""
    rounded = [None if math.isnan(value) else value for value in np.round(values, digits).tolist()]
    if rounded and all(value == rounded[0] for value in rounded):
        return rounded[0]
    return rounded


# --- times ---


def timeline_contents(folder: Path, most_spans: int) -> dict[str, Any]:
    """Return the spans of steps that lie evenly, and sums over all recorded steps.

    The slowest steps are among them.
    """
    names = ("step", "process", "role", "name", "start", "seconds", "waited", "waited_for")
    spans: dict[int, list[tuple]] = defaultdict(list)
    for part in parts_of(folder / RECORDING, TIMELINE):
        own = read_columns(part, names)
        for step, *rest in zip(*(own[name] for name in names), strict=True):
            spans[step].append(tuple(rest))

    waits: Counter[tuple[str, str]] = Counter()
    busy: Counter[str] = Counter()
    lengths: dict[int, float] = {}
    for step, of_step in spans.items():
        lengths[step] = _length(of_step)
        # What a process waited for before the step is not of the step.
        first = min(span[3] for span in of_step)
        spans[step] = [(*s[:5], min(s[5], s[3] - first), s[6]) for s in of_step]
        of_step = spans[step]
        if step == 0:
            continue
        for process, _role, name, _start, seconds, waited, cause in of_step:
            if process == "controller":
                waits[process, cause] += seconds
                continue
            if "/" not in name:
                busy[process] += seconds
            if waited and cause:
                waits[process, cause] += waited
    shown = _steps_to_show({step: len(own) for step, own in spans.items()}, lengths, most_spans)
    texts: dict[str, int] = {}

    def text(value: str) -> int:
        return texts.setdefault(value, len(texts))

    encoded = {}
    for step in shown:
        first = min(span[3] for span in spans[step])
        encoded[step] = [
            [
                text(process),
                text(role),
                text(name),
                round((start - first) * 1e3, 1),
                round(seconds * 1e3, 1),
                round(waited * 1e3, 1),
                text(cause),
            ]
            for process, role, name, start, seconds, waited, cause in spans[step]
        ]
    return {
        "texts": list(texts),
        "steps": encoded,
        "recorded": len(spans),
        "every": recorded_every(folder, TIMELINE),
        "seconds": sum(length for step, length in lengths.items() if step),
        "busy": dict(busy),
        "waits": [[process, cause, seconds] for (process, cause), seconds in waits.most_common(40)],
    }


def _length(spans: Iterable[tuple]) -> float:
    starts = [span[3] for span in spans]
    ends = [span[3] + span[4] for span in spans]
    return max(ends) - min(starts) if starts else 0.0


def _steps_to_show(
    counts: Mapping[int, int], lengths: Mapping[int, float], most_spans: int
) -> list[int]:
    """Return the steps whose spans are shown: the slowest ones, and others evenly."""
    ordered = sorted(counts)
    slowest = sorted(ordered, key=lambda step: -lengths[step])[:5]
    every = 1
    while True:
        chosen = sorted({*ordered[::every], *ordered[-1:], *slowest})
        if sum(counts[step] for step in chosen) <= most_spans or every > len(ordered):
            return chosen
        every *= 2
