"""Configurations with values that no job can mean, through `show`: sentences, soon, and no file."""

from __future__ import annotations

import contextlib
import copy
import io
import random
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from helpers.drawn_configs import drawn, mutated, toml, write_pairs

from campaign.cases import Result
from hybridflow.cli.main import main

BATCH = 100
LIMIT_S = 5
"""Processor seconds that `show` may take."""


class TooLong(BaseException):
    """`show` has worked for longer."""


class Configs:
    """A case is a hundred configurations; an item is the seed of one."""

    name = "configs"

    def draw(self, draws: random.Random) -> list[int]:
        return [draws.getrandbits(32) for _ in range(BATCH)]

    def do(self, items: Sequence[int], folder: Path) -> Result:
        result = Result()
        write_pairs(folder)
        wrong(folder, drawn(random.Random(0)))  # imports take longer than a show
        for seed in items:
            draws = random.Random(seed)
            tables = mutated(draws, drawn(draws))
            try:
                toml(tables)
            except Exception:  # what was mixed up is no TOML
                continue
            result.counts["configs"] += 1
            if found := wrong(folder, tables):
                least = reduced(tables, lambda fewer: bool(wrong(folder, fewer)))
                result.problem(
                    f"{found}\nthe configuration of seed {seed}, reduced:\n{toml(least)}"
                )
        return result


def wrong(folder: Path, tables: Mapping[str, Any]) -> str:
    """What is wrong with how `show` takes a configuration; "": nothing."""
    try:
        (folder / "c.toml").write_text(toml(tables))
    except Exception:  # reduced too far
        return ""
    before = sorted(path.name for path in folder.iterdir())

    def too_long(number: int, frame: Any) -> None:
        raise TooLong

    previous = signal.signal(signal.SIGPROF, too_long)
    said = io.StringIO()
    signal.setitimer(signal.ITIMER_PROF, LIMIT_S)
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            status = main(["show", "c.toml"])
    except TooLong:
        return f"show works for more than {LIMIT_S} s"
    except BaseException as error:
        return f"show ends in {type(error).__name__}: {error}"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, previous)
    if status not in (0, 1):
        return f"show ends with status {status}"
    if "Traceback" in said.getvalue():
        return f"show prints a traceback: {said.getvalue()[-500:]}"
    if (after := sorted(path.name for path in folder.iterdir())) != before:
        return f"show leaves files: {set(after) - set(before)}"
    return ""


def reduced(tables: Mapping[str, Any], fails: Any) -> dict[str, Any]:
    """The tables without all keys that can be left out."""
    kept = copy.deepcopy(dict(tables))
    again = True
    while again:
        again = False
        for path in list(_paths(kept)):
            fewer = copy.deepcopy(kept)
            table = fewer
            for key in path[:-1]:
                table = table.get(key, {})
            if not isinstance(table, dict) or path[-1] not in table:
                continue
            del table[path[-1]]
            if fails(fewer):
                kept, again = fewer, True
    return kept


def _paths(tables: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """The outer ones first, so that whole tables go at once."""
    found = [(key,) for key in tables]
    for key, value in tables.items():
        if isinstance(value, dict):
            found += [(key, *path) for path in _paths(value)]
    return found
