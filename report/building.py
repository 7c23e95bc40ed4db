"""Writes a report: one HTML file with everything in it, and a trace for Perfetto beside it."""

from __future__ import annotations

import base64
import gzip
import html
import json
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any

from hybridflow.core.errors import ConfigError
from hybridflow.core.names import reason
from hybridflow.core.values.files import TRACE
from hybridflow.core.values.sealed import PARTIAL
from hybridflow.report.contents import contents
from hybridflow.report.trace import write_trace

PAGE = files("hybridflow.report") / "page"
VENDOR = files("hybridflow.report") / "vendor"


def write_report(folders: Sequence[Path], file: Path, state: str | None = None) -> Path:
    """Write the report of the runs in these folders, and a trace into each run's folder.

    state: of the runs, where it is not what their folders say. Raises ConfigError where there is no
    run, or the file cannot be written.
    """
    found = contents(folders, state)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_name(f"{file.name}{PARTIAL}")
        partial.write_text(page(found), encoding="utf-8")
        partial.replace(file)
        for run in found["runs"]:
            write_trace(Path(run["folder"]), Path(run["folder"]) / TRACE)
    except OSError as error:
        raise ConfigError(f"{file}: cannot be written: {reason(error)}") from error
    return file


def page(found: dict[str, Any], live: str | None = None) -> str:
    """Return the page of what `contents` returned.

    live: the address from which the page fetches newer data.
    """
    names = [run["folder"].rstrip("/").rpartition("/")[2] for run in found["runs"]]
    title = f"{', '.join(names[:4])}{' ...' if len(names) > 4 else ''}"
    parts = {
        "VERSION": version("hybridflow"),
        "TITLE": html.escape(title),
        "STYLES": _text("vendor", "uPlot.min.css") + _text("page", "page.css"),
        "CHARTS": _text("vendor", "uPlot.iife.min.js"),
        "SCRIPT": _text("page", "page.js"),
        "DATA": packed(stamped(found, live)),
    }
    text = _text("page", "page.html")
    for name, value in parts.items():
        text = text.replace(f"__{name}__", value)
    return text


def stamped(found: dict[str, Any], live: str | None) -> dict[str, Any]:
    """Return the data with when and by what they were made."""
    return {
        **found,
        "version": version("hybridflow"),
        "made": datetime.now(UTC).isoformat(sep=" ", timespec="seconds"),
        "live": live,
    }


def packed(found: dict[str, Any]) -> str:
    """Return JSON that is compressed, as letters that may stand in HTML."""
    plain = json.dumps(found, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return base64.b64encode(gzip.compress(plain.encode(), 6, mtime=0)).decode()


def _text(folder: str, name: str) -> str:
    return ((PAGE if folder == "page" else VENDOR) / name).read_text(encoding="utf-8")
