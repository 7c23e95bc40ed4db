"""Runs what the README tells a reader to type after the demo, in a folder with the files that it shows.

    python ci/readme.py

It needs the demo's run in runs/arithmetic, and exits with the status of the first command that fails.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FILE = re.compile(r"^<!-- file: (\S+) -->\n```\w*\n(.*?)^```$", re.M | re.S)
SHELL = re.compile(r"^<!-- shell -->\n```\n(.*?)^```$", re.M | re.S)
TYPED = "12+34=\n"
"""What is typed where a command asks."""


def main() -> int:
    page = (ROOT / "README.md").read_text()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for path, text in FILE.findall(page):
            (folder / path).write_text(text)
        for there in (".venv", "runs/arithmetic"):
            (folder / there).parent.mkdir(exist_ok=True)
            (folder / there).symlink_to(ROOT / there)
        script = (
            "".join(SHELL.findall(page)) + f"python {ROOT}/ci/answers.py my-model --right 0.8\n"
        )
        command = ["bash", "-euo", "pipefail", "-c", f"set -x\n{script}"]
        return subprocess.run(command, cwd=folder, input=TYPED, text=True).returncode


if __name__ == "__main__":
    sys.exit(main())
