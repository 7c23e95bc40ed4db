"""Registers the environments of other libraries, each an extra of its own."""

from __future__ import annotations

from hybridflow.core.plugins import Descriptor, hookimpl


@hookimpl
def hybridflow_plugins() -> list[Descriptor]:
    """Return the descriptors; none of the libraries is imported."""
    here = "hybridflow.backends.environments"
    tasks = f"{here}.reasoning_gym"
    needs, extra = ("reasoning_gym",), "reasoning-gym"
    return [
        Descriptor(
            "environment",
            "gymnasium",
            f"{here}.gymnasium:Gymnasium",
            requires=("gymnasium",),
            extra="gymnasium",
        ),
        Descriptor(
            "data_source", "reasoning_gym", f"{tasks}:TaskSource", requires=needs, extra=extra
        ),
        Descriptor("reward", "reasoning_gym", f"{tasks}:TaskReward", requires=needs, extra=extra),
        Descriptor("environment", "reasoning_gym", f"{tasks}:Tries", requires=needs, extra=extra),
    ]
