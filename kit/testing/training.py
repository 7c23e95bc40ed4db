"""TrainingBackendConformance: outputs and gradients are Hugging Face's, and weights are where they are said to be."""

from __future__ import annotations

from hybridflow.kit.testing.backend_gradients import BackendGradients
from hybridflow.kit.testing.backend_outputs import BackendOutputs
from hybridflow.kit.testing.backend_weights import BackendWeights


class TrainingBackendConformance(BackendOutputs, BackendGradients, BackendWeights):
    """Give a fixture `build`: a function (ModelSpec, OptimizerConfig or None) -> your backend, built, on one rank.

    `one_rank()` of hybridflow.kit.testing makes its context. Flags: `architectures`, `kinds`, `trains`, `topk`;
    `tolerance`, `gradient_tolerance`, `weight_tolerance` (kit/testing/backend_base.py says what each means).
    """
