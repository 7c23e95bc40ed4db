"""The roles of an algorithm: its models and its rewards."""

from __future__ import annotations

import attrs

KINDS = ("policy", "value", "score", "reward")
"""The kinds of role; Role says what each one is."""


@attrs.frozen
class Role:
    """A model, or a reward, that an algorithm needs.

    kind: "policy": a model with next-token logits.
        "value": a model with a value per token.
        "score": a trained model with a score per sequence (a reward or cost model).
        "reward": scores for rows, by a function, a model or several of them; never trained.
    """

    # Name and kind
    name: str
    kind: str = attrs.field(default="policy", validator=attrs.validators.in_(KINDS))

    # Use in the algorithm
    trained: bool = False
    """Whether the algorithm updates its weights."""
    generates: bool = False
    """Whether it has a rollout engine."""
    writes: str | None = None
    """The column that the role's verb writes. None chooses it by kind and name: see `column`."""

    @property
    def column(self) -> str:
        """The column that the role's verb writes.

        Without `writes` it is old_logprobs for a trained policy and <name>_logprobs for another
        one; values for `critic` and cost_values for `cost_critic`; costs for `cost`, and scores
        for any other score or reward.
        """
        if self.writes is not None:
            return self.writes

        # A trained policy's column stands in the ratio of PPO as the old policy.
        if self.kind == "policy":
            return "old_logprobs" if self.trained else f"{self.name}_logprobs"
        if self.kind == "value":
            return self.name.removesuffix("critic") + "values"
        return "costs" if self.name == "cost" else "scores"
