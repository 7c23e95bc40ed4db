"""Settings of rollout engines that can run in a process of their own.

Their configs inherit these.
"""

from __future__ import annotations

from typing import Any

import attrs

from hybridflow.core.contracts.rollout import EngineSettings
from hybridflow.core.validators import at_least, positive
from hybridflow.core.values.model import ModelSpec
from hybridflow.core.values.parallel import GenerationLayout
from hybridflow.kit.huggingface.checks import meta_model, model_problems


@attrs.frozen
class ProcessConfig(EngineSettings):
    """Settings of an engine in a process of its own: restarts and time limits.

    An engine for which such a process is optional also has the field `own_process: bool`.
    """

    restarts: int = attrs.field(default=0, validator=at_least(0))
    """How often, in a run, a worker restarts its engine's own process after that has died.
    Unfinished requests are retried. Above 0 the worker keeps a copy of the weights in host
    memory."""
    start_timeout_s: float = attrs.field(default=600.0, validator=positive)
    """Seconds until an engine in a process of its own must have started."""
    hang_timeout_s: float = attrs.field(default=600.0, validator=positive)
    """Seconds without any progress after which an engine in a process of its own, with requests to
    answer, counts as dead."""

    bucket_mb: float = attrs.field(default=128.0, validator=positive)
    """Size of the memory, in MB (10^6 bytes), through which each rank's weights go to an engine in
    a process of its own."""

    def problems(self, model: ModelSpec, generation: GenerationLayout, device: str) -> list[str]:
        """Return problems: of restarts without a process to restart, and of the model.

        What is wrong with the model itself is the trainer's to say.
        """
        problems = []
        if self.restarts and not self.own_process:
            problems.append(
                "rollout.restarts is for an engine in a process of its own; set "
                "rollout.own_process = true"
            )
        if not model_problems(model):
            problems += self.unsupported(meta_model(model).config, generation, device)
        return problems

    def unsupported(self, hf_config: Any, generation: GenerationLayout, device: str) -> list[str]:
        """Return why the engine cannot run a model of a Hugging Face config in this layout."""
        return []
