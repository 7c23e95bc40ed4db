"""Auto-mapping: which models share which devices, in which layouts, how long a step takes and whether it fits."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hybridflow.planner.cluster import Cluster, Device, Nodes
    from hybridflow.planner.search import Mapping, NothingFitsError, plan_mapping
    from hybridflow.planner.workload import PlannedModel, Task, Workload

_HOME = {
    "cluster": ("Cluster", "Device", "Nodes"),
    "search": ("Mapping", "NothingFitsError", "plan_mapping"),
    "workload": ("PlannedModel", "Task", "Workload"),
}
_WHERE = {name: module for module, names in _HOME.items() for name in names}

__all__ = [
    "Cluster",
    "Device",
    "Mapping",
    "Nodes",
    "NothingFitsError",
    "PlannedModel",
    "Task",
    "Workload",
    "plan_mapping",
]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"hybridflow.planner.{_WHERE[name]}"), name)
