"""The engine says what the trainer would: checked before a step trains on an engine's first words.

start, resume, or an engine that was started anew
  first generation           its logprobs beside the trainer's, of the same tokens and weights
  first one after a sync     again, for what an engine caches may be of the weights before
"""

from __future__ import annotations

from typing import Any

import attrs
import torch

from hybridflow.core.context import Generation, RoleHandle
from hybridflow.core.errors import HybridFlowError
from hybridflow.core.job.job import Job, ModelRole
from hybridflow.core.rollouts.separate import SeparateRollout
from hybridflow.core.rollouts.weight_sync import first_of

COLUMN = "agreement_logprobs"
"""The trainer's logprobs; no algorithm sees them."""
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Keys of a model's config that say that it is a mixture of experts."""


@attrs.define
class _Due:
    """What is to be checked of one role's engines."""

    left: int = 2
    """Generations that are still to be checked, each with another version of the weights."""
    version: int | None = None
    """That of the last one that was checked."""


class Agreement:
    """Compares logprobs of engines and trainers; `check` is called before weights change."""

    def __init__(self, job: Job):
        self.job = job
        self._due: dict[str, _Due] = {}

    def check(self, generation: Generation) -> None:
        """Check a generation if it is due. Raises HybridFlowError where the logprobs differ."""
        role = generation.role
        due = self._due.setdefault(role.role.name, _Due())
        # An engine that was started anew is checked again.
        if generation.made.metrics.maxima.get("engine_restarts"):
            due = self._due[role.role.name] = _Due()

        # Logprobs of another temperature are not the trainer's.
        spec = self.job.models[role.role.name].spec
        setting, limit = self._limit(spec)
        comparable = (generation.sampling.temperature or 1.0) == spec.temperature
        if not due.left or not comparable:
            return
        # Each of the two generations has weights of its own.
        version = role.group.version().result()
        if version == due.version:
            return

        # Tokens of earlier weights, in a prefix, say nothing.
        batch = generation.batch
        scored = batch.join(role.group.logprobs(batch, {"logprobs": COLUMN}, 0))
        compared = generation.ctx.tasks.compute(scored, _Gap(version)).metrics.values()
        if not compared["tokens"]:
            return
        # It counts as checked where there was something to compare.
        due.left -= 1
        due.version = version
        nats = compared["nats"]
        # `not <=`, because comparisons with NaN are false.
        if not nats <= limit:
            raise HybridFlowError(
                f"step {generation.ctx.step}: logprobs of {role.role.name}'s engine and trainer, "
                f"of the same tokens and weights (version {version}), differ by {nats:.3g} nats "
                f"on average, more than run.{setting} = {limit:g}; {_cause(role)}"
            )

    def _limit(self, spec: ModelRole) -> tuple[str, float]:
        """Return the setting that holds for a model and its value."""
        run = self.job.run
        # Plugins may name their precision otherwise: they get the strictest limit.
        precision = getattr(spec.backend_config, "precision", "fp32")
        dtype = getattr(spec.engine_config, "dtype", "float32")
        if precision == "fp32" and dtype == "float32":
            return "agreement_fp32", run.agreement_fp32
        if any(spec.model.hf_config.get(key) for key in EXPERTS):
            return "agreement_experts", run.agreement_experts
        return "agreement_bf16", run.agreement_bf16


@attrs.frozen
class _Gap:
    """The mean absolute difference of logprobs, over the tokens that one version made."""

    version: int

    def __call__(
        self,
        agreement_logprobs: torch.Tensor,
        rollout_logprobs: torch.Tensor,
        loss_mask: torch.Tensor,
        weight_version: torch.Tensor,
    ) -> dict[str, Any]:
        mask = (loss_mask > 0) & (weight_version == self.version)
        difference = (agreement_logprobs - rollout_logprobs).abs()[mask].double()
        return {"nats": float(difference.mean()), "tokens": float(mask.sum())}


def _cause(role: RoleHandle) -> str:
    """Compare all weights, and say which differ, or what else it may be."""
    rollout = role.rollout
    if isinstance(rollout, SeparateRollout):
        different = rollout.compared(role.group.version().result())
    else:
        different = rollout.compared().result()[0]
    if different:
        return f"{len(different)} parameters differ, the first is {first_of(different)}"
    return (
        "the checksums of all weights that can be read back agree, so look at what the engine "
        "caches, at its precision and its sampling"
    )
