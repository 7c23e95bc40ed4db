"""What trackers of other services tell of a run, and the id by which they go on with it."""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs

from hybridflow.core.contracts.observer import SampleRow
from hybridflow.core.errors import DamagedError
from hybridflow.core.running.origin import SECRET
from hybridflow.core.validators import non_negative
from hybridflow.core.values.files import MARK, SETTINGS, STARTS, TRACKED
from hybridflow.core.values.sealed import read_sealed, write_sealed

FIRST = ("step", "data", "group", "prompt", "response", "scores", "costs", "outcome")
"""The columns of a table of samples; further row columns follow."""
HIDDEN = ("sample_id", "tokens", "meta", "record_id", "finish_reason")
"""Row columns that are of no interest in a table."""


@attrs.frozen(slots=False)
class ServiceConfig:
    """Settings of every tracker that has runs of its own."""

    project: str = "hybridflow"
    """The project, or experiment, that the run belongs to."""
    run_name: str | None = None
    """Name of the run; by default the path of its folder in run.folder."""
    group: str | None = None
    """Name of the group of runs that it belongs to."""
    tags: tuple[str, ...] = ()
    samples_every: int = attrs.field(default=10, validator=non_negative)
    """Steps between two tables of training samples; those of validations are all written. 0: no
    tables."""


@attrs.frozen
class RunFacts:
    """What is told of a run beside its metrics."""

    name: str
    config: dict[str, Any]
    """The resolved settings by dotted key, without the values of keys."""
    origin: dict[str, Any]
    """How it was started last: command, host, git (core.running.origin)."""


def run_facts(folder: Path, config: ServiceConfig) -> RunFacts:
    """Return what run.json says of a run, as far as it can be read."""
    mark: dict[str, Any] = {}
    with contextlib.suppress(DamagedError):
        mark = read_sealed(folder / MARK)
    settings = mark.get(SETTINGS) or {}
    starts = mark.get(STARTS) or [{}]
    # A stage's folder lies in that of its run, and that in run.folder.
    name = folder.name
    with contextlib.suppress(ValueError, KeyError):
        name = str(folder.resolve().relative_to(Path(settings["run.folder"]).resolve()))
    shown = {key: hide_key(key, value) for key, value in settings.items()}
    return RunFacts(config.run_name or name, shown, starts[-1])


def hide_key(key: str, value: Any) -> Any:
    """Return a setting, by its dotted key, with *** in the place of the values of keys in it."""
    if SECRET.match(f"{key.rpartition('.')[2]}=") and isinstance(value, str):
        return "***"
    if isinstance(value, dict):
        return {name: hide_key(name, own) for name, own in value.items()}
    return value


def remembered_id(folder: Path, tracker: str, step: int) -> tuple[str, bool]:
    """Return the id of the tracker's run, and whether the tracker has it already.

    A run that begins at step 0 gets a new one. It is kept in the run's folder.
    """
    known = _known(folder)
    if step and tracker in known:
        return known[tracker], True
    own = secrets.token_hex(8)
    remember_id(folder, tracker, own)
    return own, False


def remember_id(folder: Path, tracker: str, own: str) -> None:
    """Keep the id of the tracker's run in the run's folder."""
    write_sealed(folder / TRACKED, {**_known(folder), tracker: own})


def _known(folder: Path) -> dict[str, str]:
    with contextlib.suppress(DamagedError):
        return read_sealed(folder / TRACKED)
    return {}


def is_due(every: int, step: int, rows: Sequence[SampleRow]) -> bool:
    """Return whether rows are to become a table: of every so many steps, and every validation."""
    if not every or not rows:
        return False
    return rows[0]["data"] != "train" or step == 1 or step % every == 0


def sample_table(rows: Sequence[SampleRow]) -> tuple[list[str], list[list[Any]]]:
    """Return the titles and the cells of a table of samples: texts and row columns."""
    names = dict.fromkeys(
        name
        for row in rows
        for name, value in row.items()
        if isinstance(value, str | int | float) and name not in HIDDEN
    )
    titles = [name for name in FIRST if name in names]
    titles += [name for name in names if name not in FIRST]
    return titles, [[row.get(title) for title in titles] for row in rows]


def plain_json(value: Any) -> str:
    """Return a setting as a service that takes text gets it."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
