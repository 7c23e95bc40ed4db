"""How and where a run was started: the command line, the machine, and the state of git."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

GIT_S = 2.0
"""Seconds that git may take; a large repository on a slow disk is not worth more."""
SECRET = re.compile(r"(?i)([\w-]*(?:key|token|secret|password)\s*=).*", re.DOTALL)
"""A setting whose name says that its value is nobody's business: reward.options.api_key=..."""


def origin(folder: Path) -> dict[str, Any]:
    """Return how this process was started, JSON-like; `folder` is in the repository.

    `command` has the words of the command line, without the values of keys; `git` is None outside a
    repository, and where git is not installed or takes longer than GIT_S.
    """
    return {
        "command": without_keys(sys.argv),
        "folder": os.getcwd(),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "host": {
            "name": platform.node(),
            "system": platform.platform(),
            "cpus": os.cpu_count(),
            "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        },
        "git": git_state(folder),
    }


def without_keys(words: Sequence[str]) -> list[str]:
    """Return the words of a command line, with *** in the place of the values of keys."""
    return [SECRET.sub(r"\1***", word) for word in words]


def git_state(folder: Path) -> dict[str, Any] | None:
    """Return the commit, the branch (None if detached), and the files that differ from it."""
    commit = _git(folder, "rev-parse", "HEAD")
    changed = _git(folder, "status", "--porcelain", "--untracked-files=no")
    if commit is None or changed is None:
        return None
    return {
        "commit": commit,
        "branch": _git(folder, "symbolic-ref", "--short", "HEAD"),
        "changed": [line[3:] for line in changed.splitlines()],
    }


def _git(folder: Path, *arguments: str) -> str | None:
    """Return what git prints; None where it fails."""
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            text=True,
            timeout=GIT_S,
            # To look at a repository changes nothing in it.
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.rstrip("\n") if done.returncode == 0 else None
