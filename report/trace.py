"""The timeline of a run in the trace event format, which ui.perfetto.dev and chrome://tracing open.

A process of the trace is a pool, and a thread one of its ranks. Waits are arguments of the calls
that ended them.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hybridflow.core.values.files import RECORDING
from hybridflow.core.values.sealed import PARTIAL
from hybridflow.kit.recording import TIMELINE, parts_of, read_rows


def write_trace(run: Path, file: Path) -> None:
    """Write the trace of a run, compressed; nothing where no timeline was recorded."""
    if not parts_of(run / RECORDING, TIMELINE):
        return
    partial = file.with_name(f"{file.name}{PARTIAL}")
    with gzip.open(partial, "wt", encoding="utf-8", compresslevel=5) as out:
        out.write('{"traceEvents":[\n')
        for number, event in enumerate(events(run)):
            out.write((",\n" if number else "") + json.dumps(event, separators=(",", ":")))
        out.write("\n]}\n")
    partial.replace(file)


def events(run: Path) -> Iterator[dict[str, Any]]:
    """Yield trace events, with times in microseconds since the first one."""
    begin: float | None = None
    places: dict[str, tuple[int, int]] = {}
    pools: dict[str, int] = {}
    for span in read_rows(run, TIMELINE):
        begin = span["start"] if begin is None else begin
        process = span["process"]
        if process not in places:
            pool, _, rank = process.rpartition("/")
            pool = pool or process
            if pool not in pools:
                pools[pool] = len(pools) + 1
                yield _named("process_name", pools[pool], 0, pool)
            thread = int(rank) if rank.isdigit() else 0
            places[process] = pools[pool], thread
            yield _named("thread_name", *places[process], process)
        pid, tid = places[process]
        told = {"step": span["step"]}
        if span["waited_for"]:
            told |= {"waited_s": round(span["waited"], 6), "waited_for": span["waited_for"]}
        yield {
            "ph": "X",
            "name": f"{span['role']}/{span['name']}",
            "cat": span["role"],
            "pid": pid,
            "tid": tid,
            "ts": round((span["start"] - begin) * 1e6),
            "dur": max(round(span["seconds"] * 1e6), 1),
            "args": told,
        }


def _named(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}
