"""RolloutEngineConformance: an engine says what the model says, with the weights it was given, once per request."""

from __future__ import annotations

from hybridflow.kit.testing.engine_flow import EngineFlow
from hybridflow.kit.testing.engine_requests import EngineRequests
from hybridflow.kit.testing.engine_sampling import EngineSampling
from hybridflow.kit.testing.engine_tokens import EngineTokens


class RolloutEngineConformance(EngineTokens, EngineSampling, EngineRequests, EngineFlow):
    """Give a fixture `start`: a function ModelSpec -> your engine, started, without weights.

    Flags: `aborts`, `sleeps`, `prefixes`, `filters`, `biases`, `boxes`, `recomputes`; `architectures`, `width`,
    `tolerance`, `samples` (kit/testing/engine_base.py says what each means).
    """
