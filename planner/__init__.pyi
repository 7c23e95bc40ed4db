"""What `hybridflow.planner` has at its top."""

from .cluster import Cluster as Cluster
from .cluster import Device as Device
from .cluster import Nodes as Nodes
from .search import Mapping as Mapping
from .search import NothingFitsError as NothingFitsError
from .search import plan_mapping as plan_mapping
from .workload import PlannedModel as PlannedModel
from .workload import Task as Task
from .workload import Workload as Workload
