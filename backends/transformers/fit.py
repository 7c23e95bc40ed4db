"""Which models the embedded engine runs, with which of its decoders, by their configs."""

from __future__ import annotations

from typing import Any

from hybridflow.backends.transformers.llama import unfit
from hybridflow.core.values.parallel import GenerationLayout
from hybridflow.kit.huggingface.models import keeps_state
from hybridflow.kit.huggingface.shapes import shape_of


def why_generic(hf_config: Any, fast: bool | None) -> str | None:
    """Return why the fast decoder does not run the model; None where it does."""
    return "fast = false" if fast is False else unfit(hf_config)


def why_not(hf_config: Any, fast: bool | None, generation: GenerationLayout | None) -> str | None:
    """Return why the engine cannot run the model in this layout; None where it can.

    `fast` is the setting of that name.
    """
    reason = why_generic(hf_config, fast)
    if reason is not None and fast:
        return (
            f"the fast decoder cannot run this model: {reason}; set fast = false, or leave it out"
        )
    if reason is not None and keeps_state(hf_config):
        return (
            f"layers of a {hf_config.model_type} keep a state instead of keys and values, which "
            "the embedded engine does not; take another engine"
        )

    # Only models of the fast decoder whose sizes tp divides can be cut.
    if generation is None or generation.tp == 1:
        return None
    tp = generation.tp
    if reason is not None:
        return (
            f"only the fast decoder has tensor parallelism, and it is not used here: {reason}; "
            f"the generation layout has tp {tp}: it must be 1"
        )
    problems = shape_of(hf_config.to_dict()).tensor_parallel_problems(tp)
    if problems:
        return f"the rollout model cannot be cut into {tp} parts: {'; '.join(problems)}"
    return None
