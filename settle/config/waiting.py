"""How threads of torch's operators wait for each other: they spin briefly, then they sleep.

By default the OpenMP library lets them spin for milliseconds. Where each thread has a core that is
as quick as it gets; beside other work, those that spin take the cores of those that they wait for,
and a step takes ten times as long and more (bench/busy.py). The library reads the variable when it
is loaded, with torch, so it is set before.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

VARIABLE = "GOMP_SPINCOUNT"
"""Read by libgomp, with which torch is built."""
BRIEFLY = "2000"
"""Turns of the loop, some microseconds: most waits are shorter."""
OTHERS = ("OMP_WAIT_POLICY",)
"""Variables by which a user says how threads wait."""
SPIN = "spin"
"""The key in [runtime] that leaves threads to spin."""


def waiting_variables(spin: bool) -> dict[str, str]:
    """Return what a process's environment gets: nothing where it spins, or where a user decided."""
    if spin or any(name in os.environ for name in (VARIABLE, *OTHERS)):
        return {}
    return {VARIABLE: BRIEFLY}


def wait_briefly(tables: Mapping[str, Any]) -> bool:
    """Set this process's variables, unless a [runtime] of these tables says spin.

    Returns False where it is too late: torch is imported.
    """
    stages = tables.get("stages")
    own = list(stages.values()) if isinstance(stages, Mapping) else []
    variables = waiting_variables(any(_spins(table) for table in (tables, *own)))
    if variables and "torch" in sys.modules:
        return False
    os.environ.update(variables)
    return True


def _spins(table: Any) -> bool:
    """Return whether [runtime], or a runtime's own table in it, says spin."""
    runtime = table.get("runtime") if isinstance(table, Mapping) else None
    if not isinstance(runtime, Mapping):
        return False
    inner = [value for value in runtime.values() if isinstance(value, Mapping)]
    return any(one.get(SPIN) is True for one in (runtime, *inner))
