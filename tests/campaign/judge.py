"""A judge for runs that are attacked: an OpenAI-compatible address whose grades depend on the question alone.

python -m campaign.judge PORT
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
import zlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

START_S = 30.0


class Handler(BaseHTTPRequestHandler):
    """Answers chat completions."""

    def do_POST(self) -> None:
        asked = self.rfile.read(int(self.headers["Content-Length"]))
        text = json.loads(asked)["messages"][-1]["content"]
        message = {"role": "assistant", "content": f"Score: {zlib.crc32(text.encode()) % 11}"}
        answer = {
            "id": "1", "object": "chat.completion", "created": 0, "model": "any",
            "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
        }  # fmt: skip
        content = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


class Server(ThreadingHTTPServer):
    request_queue_size = 128  # of five, a busy machine's judge refuses some


def start_judge(port: int = 0) -> tuple[subprocess.Popen[bytes], int]:
    """A judge's process, and its port: a free one, or that which is given."""
    if not port:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
    process = subprocess.Popen([sys.executable, "-m", "campaign.judge", str(port)])
    deadline = time.monotonic() + START_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return process, port
        except OSError:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)


if __name__ == "__main__":
    Server(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
