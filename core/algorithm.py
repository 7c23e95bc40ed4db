"""The contract of algorithms: which roles, one step as a dataflow, and the losses."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import attrs

from hybridflow.core.loss import Loss

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


class Algorithm(ABC):
    """One file: its config, its roles, its step, its losses.

    `Config` is a frozen attrs class, filled from `[algorithm]`. A step reads like the paper; see docs/algorithms.md.
    """

    Config: ClassVar[type]
    data_columns: ClassVar[tuple[str, ...]] = ()
    """Columns that its data must bring beside prompts: "response_ids" (supervised), "preferred" (pairs), "unsafe"."""

    def __init__(self, config: Any):
        self.config = config

    @abstractmethod
    def roles(self) -> tuple[Role, ...]:
        """What it needs under this config (a reference only if its KL is used, say)."""

    @abstractmethod
    def step(self, ctx: Any) -> None:
        """One iteration: draw, generate, score, update. `ctx` is core.context.StepContext."""

    @property
    def data_sets(self) -> Mapping[str, tuple[str, ...]]:
        """Data sets beside [data], each a table of its own name: name -> columns that it must bring (as data_columns)."""
        return {}

    def losses(self) -> Mapping[str, Loss]:
        """Trained role -> its loss, for checks before the start and for the conformance kit."""
        return {}

    def problems(self) -> list[str]:
        """What is wrong with the config beyond single values; said before anything starts."""
        return []

    @property
    def rows_per_step(self) -> int | None:
        """Sequences that a step trains on, if the config determines it (for `hybridflow show` and checks)."""
        return None

    def updates_per_step(self) -> int | None:
        """Optimizer steps of the actor per iteration, if the config determines it (for `hybridflow show`)."""
        return None

    def state_dict(self) -> dict[str, Any]:
        """What must survive a restart (coefficients, multipliers, leftovers), JSON-like."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: B027
        """The inverse of state_dict."""
