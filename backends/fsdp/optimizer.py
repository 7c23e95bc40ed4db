"""AdamW (arXiv:1711.05101) on each rank's own shards.

The shards are plain tensors, so the fused kernel runs over any mix of meshes, without DTensor's
dispatch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch import nn

from hybridflow.backends.fsdp.sharding import local
from hybridflow.core.contracts.training import OptimizerConfig
from hybridflow.kit.checkpoint import MOMENTS


class ShardedAdamW:
    """torch.optim.AdamW over views of the parameters' storage.

    Call `relink` after that storage has moved. `copies` has for each parameter the number of ranks
    that hold each of its elements.
    """

    parameters: dict[str, nn.Parameter]
    """The trained parameters by name, whose gradients FSDP fills."""
    copies: Mapping[str, int]
    """Parameter -> the number of ranks that hold each of its elements."""
    shards: dict[str, nn.Parameter]
    """This rank's shards as plain tensors, without empty ones."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        copies: Mapping[str, int],
        config: OptimizerConfig,
    ):
        self.parameters = dict(parameters)
        self.copies = copies
        self.shards = {}
        for name, parameter in parameters.items():
            if local(parameter).numel():
                self.shards[name] = nn.Parameter(local(parameter.detach()))

        # All shards of a rank may be empty, and torch refuses an empty list.
        self._adamw = torch.optim.AdamW(
            self.shards.values() or [torch.zeros(0)],
            lr=config.lr,
            betas=config.betas,
            eps=config.eps,
            weight_decay=config.weight_decay,
            fused=True,
        )

    def relink(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Follow parameters whose storage has moved (to another device, say), with the moments."""
        self.parameters |= {name: p for name, p in parameters.items() if name in self.copies}
        for name in parameters.keys() & self.shards.keys():
            shard = self.shards[name]
            shard.data = local(parameters[name].detach())

            # A fused AdamW wants its step counts on the same device too.
            state = self._adamw.state.get(shard, {})
            for key, value in state.items():
                state[key] = value.to(shard.device)

    def grad_norm(self, world: int, device: torch.device) -> float:
        """Compute the global L2 norm of the gradients with one all-reduce over all ranks.

        Each element counts once, however many ranks hold it:
        norm^2 = sum over ranks and their gradients g of |g|^2 / copies(g).
        """
        # Gradients with equally many copies share one kernel and one division.
        by_copies: dict[int, list[torch.Tensor]] = {}
        for name, parameter in self.parameters.items():
            if parameter.grad is None:
                continue
            piece = local(parameter.grad)
            if piece.numel():
                by_copies.setdefault(self.copies[name], []).append(piece)

        total = torch.zeros((), dtype=torch.float32, device=device)
        for copies, grads in by_copies.items():
            norms = torch.stack(torch._foreach_norm(grads))
            total += norms.square().sum().to(device) / copies
        if world > 1:
            dist.all_reduce(total)
        return float(total.sqrt())

    def step(self, lr: float, scale: float) -> None:
        """Take one step with the gradients times `scale`, and drop them."""
        # AdamW reads the gradients of its own shards.
        for name, shard in self.shards.items():
            grad = self.parameters[name].grad
            if grad is None:
                shard.grad = None
            else:
                shard.grad = local(grad)

        grads = [shard.grad for shard in self.shards.values() if shard.grad is not None]
        if scale != 1.0 and grads:
            torch._foreach_mul_(grads, scale)

        # The learning rate follows the schedule of the role.
        for group in self._adamw.param_groups:
            group["lr"] = lr
        self._adamw.step()
        self.clear()

    def clear(self) -> None:
        """Drop the gradients."""
        for parameter in self.parameters.values():
            parameter.grad = None
        for shard in self.shards.values():
            shard.grad = None

    def moments(self) -> dict[str, dict[str, torch.Tensor]]:
        """Return this rank's part of exp_avg and exp_avg_sq by parameter, as views to write into.

        They are zeros before the first step. Parameters whose part on this rank is empty are left
        out.
        """
        moments = {}
        for name, shard in self.shards.items():
            # The state has a step count too, which is no moment.
            state = self._moments(shard)
            moments[name] = {moment: state[moment] for moment in state if moment in MOMENTS}
        return moments

    def state(self) -> Iterator[torch.Tensor]:
        """Yield all tensors of AdamW's state."""
        for state in self._adamw.state.values():
            yield from state.values()

    def set_step(self, step: int) -> None:
        """Set the number of steps taken, from which AdamW corrects the bias of its moments."""
        for shard in self.shards.values():
            self._moments(shard)["step"].fill_(float(step))

    def _moments(self, shard: nn.Parameter) -> dict[str, torch.Tensor]:
        """Return AdamW's state of a shard, made as AdamW makes it if it had no step yet."""
        # The state is a defaultdict, so a new one is filled in place.
        state = self._adamw.state[shard]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=shard.device)
            for moment in MOMENTS:
                state[moment] = torch.zeros_like(shard, memory_format=torch.preserve_format)
        return state
