"""Damages a file of a run, as disks, copies, people and attackers do."""

from __future__ import annotations

import random
from pathlib import Path

WAYS = (
    "bit", "byte", "zeros", "cut", "empty", "longer", "gone", "digit", "junk", "json", "other", "folder",
)  # fmt: skip
"""How a file is damaged: one bit or byte, zeros inside, its end missing, nothing left, more at its end, removed, a
digit that is another one, other bytes, other JSON, the content of another file of the run, a folder in its place."""
JSONS = (
    b"[]",
    b"null",
    b"{}",
    b'{"step": -1}',
    b'{"step": 1000000000}',
    b"[" * 50_000,
    b'"' + b"9" * 5_000,
)


REFUSED = ("run.json", "done.json")
"""Files without which nobody knows what the run was; any other one has a way round it."""


class Touches:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def damage(run: Path, draw: random.Random, way: str) -> Path:
    """Damage one file of a run's folder, drawn from all; return its path in the folder."""
    files = sorted(path for path in run.rglob("*") if path.is_file() and path.name != ".lock")
    if way == "digit":
        files = [path for path in files if any(48 <= byte < 58 for byte in path.read_bytes())]
    file = draw.choice(files)
    content = bytearray(file.read_bytes())
    at = draw.randrange(max(len(content), 1))
    match way:
        case "bit" if content:
            content[at] ^= 1 << draw.randrange(8)
        case "byte" if content:
            content[at] = draw.randrange(256)
        case "zeros":
            content[at : at + 64] = bytes(len(content[at : at + 64]))
        case "cut":
            del content[at:]
        case "empty":
            content.clear()
        case "longer":
            content += draw.randbytes(50)
        case "digit":
            place = draw.choice([n for n, byte in enumerate(content) if 48 <= byte < 58])
            content[place] = 48 + (content[place] - 48 + draw.randrange(1, 10)) % 10
        case "junk":
            content = bytearray(draw.randbytes(len(content)))
        case "json":
            content = bytearray(draw.choice(JSONS))
        case "other":
            content = bytearray(draw.choice([path for path in files if path != file]).read_bytes())
    if way in ("gone", "folder"):
        file.unlink()
        if way == "folder":
            file.mkdir()
    else:
        file.write_bytes(content)
    return file.relative_to(run)


def wrong(status: int, printed: str, way: str, file: Path) -> str:
    """What is wrong with how a resume took a damaged file, but for the weights; "": nothing."""
    if "Traceback" in printed:
        return "it ends in a traceback"
    if status and file.name not in REFUSED and not (way == "folder" and file.suffix == ".jsonl"):
        return "it is refused, and need not be"
    if status and file.name not in printed:
        return "it is not named"
    return ""
