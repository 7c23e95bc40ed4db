"""Auto-mapping: which models share which devices, in which layouts, how long a step takes and whether it fits."""

from hybridflow.core.mapping.cluster import Cluster, Device, Nodes
from hybridflow.core.mapping.search import Mapping, NothingFitsError, plan_mapping
from hybridflow.core.mapping.workload import PlannedModel, Task, Workload

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
