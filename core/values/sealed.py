"""JSON files that are complete or absent, with a checksum of their content.

    {"step": 20, ..., "sha256": "9f3a..."}

The checksum is that of the file's name and the other keys, so that a file which was damaged, edited
by hand or put in the place of another one is never taken for what a run wrote.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hybridflow.core.errors import DamagedError
from hybridflow.core.values.text import parse_json

SUM = "sha256"
"""Key of the checksum."""
PARTIAL = ".partial"
"""End of the name of a file that is being written, or was when its process was killed."""


def write_sealed(file: Path, fields: Mapping[str, Any]) -> None:
    """Write `fields` as JSON: into a file beside, which then takes the place of `file`.

    Raises TypeError for values that JSON does not know.
    """
    plain = json.loads(json.dumps(fields))
    partial = file.with_name(f"{file.name}{PARTIAL}")
    with open(partial, "w") as written:
        json.dump({**plain, SUM: _sum(file, plain)}, written, indent=2)
        written.write("\n")
        written.flush()
        os.fsync(written.fileno())
    os.replace(partial, file)
    flush_file(file.parent)


def read_sealed(file: Path) -> dict[str, Any]:
    """Return what `write_sealed` was given, without the checksum.

    Raises DamagedError for a file that is missing, is no JSON, or has another content.
    """
    try:
        fields = parse_json(file.read_bytes())
    except (OSError, ValueError) as error:
        raise DamagedError(f"{file} cannot be read: {error}") from error
    if not isinstance(fields, dict) or fields.pop(SUM, None) != _sum(file, fields):
        raise DamagedError(
            f"{file} is not as it was written: its content does not have the checksum {SUM!r} in it"
        )
    return fields


def flush_file(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def _sum(file: Path, fields: Mapping[str, Any]) -> str:
    content = file.name + json.dumps(fields, sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()
