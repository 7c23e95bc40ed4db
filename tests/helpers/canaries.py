"""Things of this machine that a test makes, and that no program in the sandbox may get at."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

VARIABLE = "HYBRIDFLOW_TEST_CANARY"


@contextmanager
def canaries(place: Path) -> Iterator[dict[str, Any]]:
    """What `attacks` needs, in a folder; at the end it must be as it was."""
    secret = f"canary-{secrets.token_hex(16)}"
    folder = place / "canary"
    folder.mkdir()
    file = folder / "file"
    file.write_text(secret)
    for path in (file, *file.parents):
        if path in (Path(tempfile.gettempdir()), Path("/tmp")):
            break
        path.chmod(0o777)
    shared = Path("/dev/shm") / secret
    shared.write_text(secret)
    shared.chmod(0o666)
    os.environ[VARIABLE] = secret
    process = subprocess.Popen(["sleep", "600"])
    sockets = [
        socket.create_server(("127.0.0.1", 0)),
        socket.socket(socket.AF_UNIX),
        socket.socket(socket.AF_UNIX),
    ]
    sockets[1].bind(f"\0{secret}")
    sockets[2].bind(str(folder / "socket"))
    for listening in sockets:
        listening.listen()
    try:
        yield {
            "secret": secret,
            "file": str(file),
            "folder": str(folder),
            "variable": VARIABLE,
            "process": process.pid,
            "port": sockets[0].getsockname()[1],
            "abstract": secret,
            "socket": str(folder / "socket"),
        }
        assert file.read_text() == shared.read_text() == secret
        assert sorted(path.name for path in folder.iterdir()) == ["file", "socket"]
        assert process.poll() is None
    finally:
        del os.environ[VARIABLE]
        shared.unlink()
        process.kill()
        process.wait()
        for listening in sockets:
            listening.close()
