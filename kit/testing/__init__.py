"""The conformance kit: one class of pytest tests for each contract that a plugin can fulfil.

A plugin's author subclasses the class of their contract, gives one fixture that makes their part,
and pytest tests it by the same invariants as the project's own parts. Flags of the class leave out
what a part cannot do. docs/conformance.md lists the classes, fixtures and flags.
"""

from hybridflow.kit.testing.algorithms import AlgorithmConformance
from hybridflow.kit.testing.commands import CommandConformance
from hybridflow.kit.testing.data import DataSourceConformance
from hybridflow.kit.testing.engine_base import give_weights
from hybridflow.kit.testing.environments import EnvironmentConformance
from hybridflow.kit.testing.losses import LossConformance
from hybridflow.kit.testing.models import Reference, reference, tiny_config
from hybridflow.kit.testing.passes import one_rank
from hybridflow.kit.testing.planners import PlannerConformance
from hybridflow.kit.testing.protocols import ProtocolConformance
from hybridflow.kit.testing.random_columns import RowShapes
from hybridflow.kit.testing.rewards import RewardConformance, sample
from hybridflow.kit.testing.rollout import RolloutEngineConformance
from hybridflow.kit.testing.runs import TinyRun
from hybridflow.kit.testing.runtimes import RuntimeConformance
from hybridflow.kit.testing.tokenizers import TokenizerConformance
from hybridflow.kit.testing.trackers import TrackerConformance
from hybridflow.kit.testing.training import TrainingBackendConformance
from hybridflow.kit.testing.transports import TransportConformance

__all__ = [
    "AlgorithmConformance",
    "CommandConformance",
    "DataSourceConformance",
    "EnvironmentConformance",
    "LossConformance",
    "PlannerConformance",
    "ProtocolConformance",
    "Reference",
    "RewardConformance",
    "RolloutEngineConformance",
    "RowShapes",
    "RuntimeConformance",
    "TinyRun",
    "TokenizerConformance",
    "TrackerConformance",
    "TrainingBackendConformance",
    "TransportConformance",
    "give_weights",
    "one_rank",
    "reference",
    "sample",
    "tiny_config",
]
