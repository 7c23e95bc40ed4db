"""Serves the page of runs on the loopback address, with newer data when the runs have written some.

/KEY/            the page, with the data of now
/KEY/data.json   the data of now, which the page asks for every few seconds

The key is made for each server: other users of the machine reach the port, and do not know it.
"""

from __future__ import annotations

import json
import secrets
import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any

from hybridflow.core.errors import HybridFlowError
from hybridflow.core.values.files import CONSOLE, DONE, MARK, METRICS, RECORDING
from hybridflow.report.building import page, stamped
from hybridflow.report.contents import contents

LOOPBACK = "127.0.0.1"
DATA = "data.json"
"""The address of the data, from that of the page."""


class PageServer:
    """Serves in a thread of its own while it is entered."""

    def __init__(self, folders: Sequence[Path], port: int = 0):
        """Listen on a port of the loopback address; 0: any. Raises OSError where it is taken."""
        self.folders = folders
        self.ended = threading.Event()
        """Set when the server ends."""
        self._lock = threading.Lock()
        self._seen: Any = None
        self._data: dict[str, Any] = {}
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                server.answer(self)

            def log_message(self, format: str, *arguments: Any) -> None:
                """Say nothing of each request."""

        self._http = ThreadingHTTPServer((LOOPBACK, port), Handler)
        self._http.daemon_threads = True
        self.port = self._http.server_address[1]
        self._path = f"/{secrets.token_urlsafe(16)}/"
        self.address = f"http://{LOOPBACK}:{self.port}{self._path}"
        self._thread = threading.Thread(target=self._http.serve_forever, daemon=True)

    def __enter__(self) -> PageServer:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.ended.set()
        self._http.shutdown()
        self._http.server_close()

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        """Answer a request; one for another host, or without the key, is refused.

        A page of another site, whose name points at this machine, would name another host.
        """
        host = request.headers.get("Host", "")
        if host not in (f"{LOOPBACK}:{self.port}", f"localhost:{self.port}"):
            request.send_error(403, "this address is not served")
            return
        path = request.path.partition("?")[0]
        if path not in (self._path, self._path + DATA):
            request.send_error(404)
            return
        try:
            data = self.data()
        except HybridFlowError as error:  # the run was deleted meanwhile, say
            request.send_error(503, str(error).partition("\n")[0])
            return
        if path == self._path:
            text, kind = page(data, live=DATA), "text/html; charset=utf-8"
        else:
            text, kind = json.dumps(data, allow_nan=False), "application/json"
        body = text.encode()
        request.send_response(200)
        for name, value in (
            ("Content-Type", kind),
            ("Content-Length", str(len(body))),
            ("Cache-Control", "no-store"),
            ("X-Content-Type-Options", "nosniff"),
        ):
            request.send_header(name, value)
        request.end_headers()
        request.wfile.write(body)

    def data(self) -> dict[str, Any]:
        """Return what the page shows, read anew where a run has written since."""
        with self._lock:
            seen = self._written()
            if seen != self._seen:
                self._data = stamped(contents(self.folders), DATA)
                self._seen = seen
            return self._data

    def _written(self) -> list[tuple[str, int, int]]:
        """Return each file that the page is made of, with its size and time."""
        names = (MARK, METRICS, CONSOLE, DONE, f"{RECORDING}/*.*")
        found = []
        for folder in self.folders:
            for name in names:
                for path in sorted(folder.rglob(name)):
                    try:
                        stat = path.stat()
                    except FileNotFoundError:
                        continue
                    found.append((str(path), stat.st_size, stat.st_mtime_ns))
        return found
