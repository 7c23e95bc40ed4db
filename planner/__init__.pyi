"""What `hybridflow.planner` has at its top."""

from .cluster import (
    Cluster as Cluster,
    Device as Device,
    Nodes as Nodes,
)
from .search import (
    Mapping as Mapping,
    NothingFitsError as NothingFitsError,
    plan_mapping as plan_mapping,
)
from .workload import (
    PlannedModel as PlannedModel,
    Task as Task,
    Workload as Workload,
)
