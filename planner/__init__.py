"""Auto-mapping: which models share which devices, in which layouts, how long a step takes and whether it fits."""

from hybridflow.planner.cluster import Cluster, Device, Nodes
from hybridflow.planner.search import Mapping, NothingFitsError, plan_mapping
from hybridflow.planner.workload import PlannedModel, Task, Workload

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
