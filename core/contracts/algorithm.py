"""The contract of algorithms: which roles, one step as a dataflow, and the losses."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from hybridflow.core.contracts.loss import Loss
from hybridflow.core.contracts.role import Role
from hybridflow.core.contracts.step import StepContext


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
    def step(self, ctx: StepContext) -> None:
        """One iteration: draw, generate, score, update."""

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

    @property
    def rows_per_update(self) -> int | None:
        """Sequences of one optimizer step, if the config determines it (for `hybridflow show` and checks)."""
        return self.rows_per_step

    def updates_per_step(self) -> int | None:
        """Optimizer steps of the actor per iteration, if the config determines it (for `hybridflow show`)."""
        return None

    def state_dict(self) -> dict[str, Any]:
        """What must survive a restart (coefficients, multipliers, leftovers), JSON-like."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: B027
        """The inverse of state_dict."""
