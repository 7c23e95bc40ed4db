"""The conformance kit: subclass, give one fixture, and pytest tests your part like ours (docs/conformance.md)."""

from hybridflow.core.testing.algorithms import AlgorithmConformance
from hybridflow.core.testing.data import DataSourceConformance
from hybridflow.core.testing.engine_base import give_weights
from hybridflow.core.testing.losses import LossConformance
from hybridflow.core.testing.models import Reference, reference, tiny_config
from hybridflow.core.testing.passes import one_rank
from hybridflow.core.testing.protocols import ProtocolConformance
from hybridflow.core.testing.random_columns import Shape
from hybridflow.core.testing.rewards import RewardConformance, sample
from hybridflow.core.testing.rollout import RolloutEngineConformance
from hybridflow.core.testing.runs import TinyRun
from hybridflow.core.testing.runtimes import RuntimeConformance
from hybridflow.core.testing.training import TrainingBackendConformance
from hybridflow.core.testing.transports import TransportConformance

__all__ = [
    "AlgorithmConformance",
    "DataSourceConformance",
    "LossConformance",
    "ProtocolConformance",
    "Reference",
    "RewardConformance",
    "RolloutEngineConformance",
    "RuntimeConformance",
    "Shape",
    "TinyRun",
    "TrainingBackendConformance",
    "TransportConformance",
    "give_weights",
    "one_rank",
    "reference",
    "sample",
    "tiny_config",
]
