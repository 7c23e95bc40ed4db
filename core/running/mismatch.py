"""Adds a diagnosis to the error that an engine's logprobs differ from its trainer's."""

from __future__ import annotations

from hybridflow.core.context import GroupRoleHandle
from hybridflow.core.errors import HybridFlowError, MismatchError
from hybridflow.core.rollouts.separate import SeparateRollout
from hybridflow.core.rollouts.weight_sync import first_of


def explained(error: MismatchError, step: int, role: GroupRoleHandle) -> MismatchError:
    """Return the error of an update of `role`, with the step and a comparison of the weights."""
    return MismatchError(
        f"step {step}: {error.message}; {_cause(role)}",
        role=error.role,
        phase=error.phase,
        rank=error.rank,
    )


def _cause(role: GroupRoleHandle) -> str:
    """Compare all weights; return in words which differ, or other likely causes."""
    rollout = role.rollout
    try:
        if isinstance(rollout, SeparateRollout):
            different = rollout.compared(role.group.version().result())
        else:
            different = rollout.compared().result()[0]
    except HybridFlowError as error:
        return f"its weights could not be compared: {error}"

    if different:
        return f"{len(different)} parameters differ, the first is {first_of(different)}"
    return (
        "the checksums of all weights that can be read back agree, so look at what the engine "
        "caches, at its precision and its sampling (another temperature than the run's?); where an "
        "engine is meant to differ (quantized, say), raise run.mismatch_stop and set "
        "algorithm.correction"
    )
