"""How threads of torch's operators wait for each other: they spin briefly, then they sleep.

By default the OpenMP library lets them spin for milliseconds. That is fastest where each thread has
a core of its own; beside other work, threads that spin take the cores from those that they wait
for, and a step takes ten times as long or more (bench/busy.py). The library reads the variable when
it is loaded, with torch, so it must be set before.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

VARIABLE = "GOMP_SPINCOUNT"
"""The environment variable that libgomp reads, with which torch is built."""
BRIEFLY = "2000"
"""Iterations of the spin loop, some microseconds: most waits are shorter."""
OTHERS = ("OMP_WAIT_POLICY",)
"""Other variables by which a user may set how threads wait."""
SPIN = "spin"
"""The key in [runtime] that leaves threads to spin."""


def waiting_variables(spin: bool) -> dict[str, str]:
    """Return the environment variables to set for a process.

    They are none if its threads should spin, or where the user has set VARIABLE or OTHERS.
    """
    if spin or any(name in os.environ for name in (VARIABLE, *OTHERS)):
        return {}
    return {VARIABLE: BRIEFLY}


def wait_briefly(tables: Mapping[str, Any]) -> bool:
    """Set this process's variables, unless a [runtime] of these tables has spin = true.

    Returns False where it is too late, because torch is already imported.
    """
    stages = tables.get("stages")
    own = list(stages.values()) if isinstance(stages, Mapping) else []
    variables = waiting_variables(any(_spins(table) for table in (tables, *own)))
    if variables and "torch" in sys.modules:
        return False
    os.environ.update(variables)
    return True


def _spins(table: Any) -> bool:
    """Return whether [runtime], or a runtime's own table in it, has spin = true."""
    runtime = table.get("runtime") if isinstance(table, Mapping) else None
    if not isinstance(runtime, Mapping):
        return False
    inner = [value for value in runtime.values() if isinstance(value, Mapping)]
    return any(one.get(SPIN) is True for one in (runtime, *inner))
