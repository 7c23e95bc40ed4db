"""Registers the built-in rewards."""

from __future__ import annotations

from hybridflow.core.plugins import Descriptor, hookimpl


@hookimpl
def hybridflow_plugins() -> list[Descriptor]:
    """Return the descriptors of the built-in rewards; none is imported."""
    package = "hybridflow.backends.rewards"
    return [
        Descriptor("reward", "exact_match", f"{package}.exact_match:ExactMatch"),
        Descriptor(
            "reward",
            "code",
            f"{package}.code:CodeReward",
            diagnosis="hybridflow.kit.sandbox.programs:diagnose",
        ),
        Descriptor("reward", "environment", f"{package}.environment:EnvironmentReward"),
        Descriptor(
            "reward",
            "judge",
            f"{package}.judge:Judge",
            requires=("openai",),
            extra="judge",
        ),
        Descriptor("reward", "trl", f"{package}.foreign:TRLReward"),
        Descriptor("reward", "verl", f"{package}.foreign:VerlReward"),
        Descriptor(
            "reward",
            "math",
            f"{package}.math:MathReward",
            requires=("math_verify",),
            extra="math",
        ),
    ]
