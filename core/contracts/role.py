"""The roles of an algorithm: models, and rewards."""

from __future__ import annotations

import attrs

KINDS = ("policy", "value", "score", "reward")


@attrs.frozen
class Role:
    """A model, or a reward, that an algorithm needs.

    kind: "policy" (next-token logits), "value" (a value per token), "score" (a score per sequence: a reward or cost model
    that is trained), "reward" (scores rows: a function, a model or several of them; never trained).
    """

    name: str
    kind: str = attrs.field(default="policy", validator=attrs.validators.in_(KINDS))
    trained: bool = False
    generates: bool = False
    """Whether it has a rollout engine."""
    writes: str | None = None
    """The column that its verb makes; by default old_logprobs for the actor, <role>_logprobs for other policies, values
    for `critic` (cost_values for `cost_critic`), scores (costs for `cost`) for scores and rewards."""

    @property
    def column(self) -> str:
        if self.writes is not None:
            return self.writes
        if self.kind == "policy":
            return "old_logprobs" if self.trained else f"{self.name}_logprobs"
        if self.kind == "value":
            return self.name.removesuffix("critic") + "values"
        return "costs" if self.name == "cost" else "scores"
