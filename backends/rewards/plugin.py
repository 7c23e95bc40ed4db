"""Registers the built-in rewards."""

from __future__ import annotations

from hybridflow.core.plugins import Descriptor, hookimpl


@hookimpl
def hybridflow_plugins() -> list[Descriptor]:
    """Return the descriptors of the rewards "exact_match", "code", "environment" and "math"."""
    package = "hybridflow.backends.rewards"
    return [
        Descriptor("reward", "exact_match", f"{package}.exact_match:ExactMatch"),
        Descriptor("reward", "code", f"{package}.code:CodeReward"),
        Descriptor("reward", "environment", f"{package}.environment:EnvironmentReward"),
        Descriptor(
            "reward",
            "math",
            f"{package}.math:MathReward",
            requires=("math_verify",),
            extra="math",
        ),
    ]
