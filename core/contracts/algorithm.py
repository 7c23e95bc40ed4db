"""The contract of algorithms: the roles they need, one step as a dataflow, and the losses."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from hybridflow.core.contracts.loss import Loss
from hybridflow.core.contracts.role import Role
from hybridflow.core.contracts.rollout import SamplingParams
from hybridflow.core.contracts.step import StepContext


class Algorithm(ABC):
    """An algorithm in one file: its config, its roles, its step and its losses.

    `Config` is a frozen attrs class, filled from the table `[algorithm]`. A step reads like the
    paper's pseudo-code; see docs/algorithms.md.
    """

    Config: ClassVar[type]
    data_columns: ClassVar[tuple[str, ...]] = ()
    """Columns that the data must have beside prompts: "response_ids" (supervised training),
    "preferred" (pairs), "unsafe" (cost models)."""

    def __init__(self, config: Any):
        self.config = config

    # --- what every algorithm defines ---

    @abstractmethod
    def roles(self) -> tuple[Role, ...]:
        """Return the roles needed under this config (a reference only if its KL is used, say)."""

    @abstractmethod
    def step(self, ctx: StepContext) -> None:
        """Run one iteration: draw prompts, generate, score, update."""

    # --- what is known before a run, for checks and for `hybridflow show` ---

    @property
    def data_sets(self) -> Mapping[str, tuple[str, ...]]:
        """Data sets beside [data], each a config table of its own: name -> its `data_columns`."""
        return {}

    def losses(self) -> Mapping[str, Loss]:
        """Map each trained role to its loss, for checks before a run and the conformance kit."""
        return {}

    def problems(self, sampling: SamplingParams) -> list[str]:
        """Return problems of the config beyond single values; called before anything starts.

        `sampling` is [sampling], with which the step's responses are generated.
        """
        return []

    @property
    def rows_per_step(self) -> int | None:
        """The number of sequences that a step trains on, if the config determines it."""
        return None

    @property
    def rows_per_update(self) -> int | None:
        """The number of sequences in one optimizer step, if the config determines it."""
        return self.rows_per_step

    def updates_per_step(self) -> int | None:
        """Return how many optimizer steps the actor takes per step, if the config determines it."""
        return None

    @property
    def corrects_staleness(self) -> bool:
        """Whether its losses weigh tokens by the policy that generated them, `rollout_logprobs`.

        run.max_staleness needs that: tokens are then of weights before the present ones.
        """
        return False

    # --- what a checkpoint keeps ---

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a checkpoint saves (coefficients, multipliers), JSON-like."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: B027
        """Restore the state that `state_dict` returned."""
