"""RolloutEngineConformance: an engine generates what the model says with the weights it was given.

Every request is answered once. The checks are in four files by what they look at.
"""

from __future__ import annotations

from hybridflow.kit.testing.engine_flow import EngineFlow
from hybridflow.kit.testing.engine_requests import EngineRequests
from hybridflow.kit.testing.engine_sampling import EngineSampling
from hybridflow.kit.testing.engine_tokens import EngineTokens


class RolloutEngineConformance(EngineTokens, EngineSampling, EngineRequests, EngineFlow):
    """Subclass it and give a fixture `start`: a function ModelSpec -> your engine.

    The engine is started and has no weights yet. Class attributes say what the engine can: the
    flags `aborts`, `sleeps`, `prefixes`, `filters`, `biases`, `boxes`, `recomputes`, and
    `architectures`, `width`, `tolerance`, `samples`. See kit/testing/engine_base.py for each.
    """
