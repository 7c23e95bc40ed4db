"""TrainingBackendConformance: a backend's outputs, gradients and weights are Hugging Face's."""

from __future__ import annotations

from hybridflow.kit.testing.backend_gradients import BackendGradients
from hybridflow.kit.testing.backend_outputs import BackendOutputs
from hybridflow.kit.testing.backend_weights import BackendWeights


class TrainingBackendConformance(BackendOutputs, BackendGradients, BackendWeights):
    """Subclass it and give a fixture `build`: a function that returns your backend, built.

    It takes (ModelSpec, OptimizerConfig or None) and runs on one rank, whose context `one_rank()`
    of hybridflow.kit.testing makes. Class attributes say what the backend can: `architectures`,
    `kinds`, `trains`, `topk`, and `tolerance`, `gradient_tolerance`, `weight_tolerance`. See
    kit/testing/backend_base.py for each.
    """
