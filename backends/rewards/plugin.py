"""The built-in rewards."""

from __future__ import annotations

from hybridflow.core.plugins import Descriptor, hookimpl


@hookimpl
def hybridflow_plugins() -> list[Descriptor]:
    here = "hybridflow.backends.rewards"
    return [
        Descriptor("reward", "exact_match", f"{here}.exact_match:ExactMatch"),
        Descriptor("reward", "code", f"{here}.code:CodeReward"),
        Descriptor("reward", "environment", f"{here}.environment:EnvironmentReward"),
        Descriptor(
            "reward", "math", f"{here}.math:MathReward", requires=("math_verify",), extra="math"
        ),
    ]
