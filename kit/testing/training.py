"""TrainingBackendConformance: a backend's outputs, gradients and weights are Hugging Face's."""

from __future__ import annotations

from hybridflow.kit.testing.backend_gradients import BackendGradients
from hybridflow.kit.testing.backend_outputs import BackendOutputs
from hybridflow.kit.testing.backend_ranks import BackendRanks
from hybridflow.kit.testing.backend_weights import BackendWeights


class TrainingBackendConformance(BackendOutputs, BackendGradients, BackendWeights, BackendRanks):
    """Subclass it and give `backend`, its class, and `config`, its settings.

    It is built on one rank, and on two where its `problems` allow dp 2, each a process. Other class
    attributes say what the backend can: `architectures`, `kinds`, `trains`, `topk`, `layouts`, and
    `tolerance`, `gradient_tolerance`, `weight_tolerance` (kit/testing/backend_base.py).
    """
