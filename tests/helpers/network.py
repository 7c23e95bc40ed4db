"""What processes listen at."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Collection

LOOPBACK = re.compile(r"(127\.0\.0\.\d+|\[::1\]|\[::ffff:127\.0\.0\.1\]):\d+")


def listening(processes: Collection[str]) -> dict[str, str]:
    """Address -> line of `ss`, of what these processes listen at, by TCP."""
    lines = subprocess.run(
        ["ss", "-Hltnp"], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    return {
        line.split()[3]: line
        for line in lines
        if set(processes) & set(re.findall(r"pid=(\d+)", line))
    }


def beyond_loopback(addresses: dict[str, str]) -> list[str]:
    return [line for address, line in addresses.items() if not LOOPBACK.fullmatch(address)]
