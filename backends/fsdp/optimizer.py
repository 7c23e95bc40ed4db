"""AdamW on each rank's own shards, as plain tensors: fused, on any mix of meshes, without DTensor's dispatch."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import nn

from hybridflow.backends.fsdp.sharding import local
from hybridflow.core.contracts.training import OptimizerConfig
from hybridflow.kit.checkpoint import MOMENTS


class ShardedAdamW:
    """torch.optim.AdamW over views of the parameters' storage. `relink` after that storage has moved.

    copies: parameter -> how many ranks hold each of its elements.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        copies: Mapping[str, int],
        config: OptimizerConfig,
    ):
        self.parameters, self.copies = dict(parameters), copies
        self.shards = {
            n: nn.Parameter(local(p.detach())) for n, p in parameters.items() if local(p).numel()
        }
        self._adamw = torch.optim.AdamW(
            self.shards.values() or [torch.zeros(0)],  # a rank may hold nothing
            lr=config.lr, betas=config.betas, eps=config.eps, weight_decay=config.weight_decay, fused=True,
        )  # fmt: skip

    def relink(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """The storage of these parameters has moved (to another device, say): follow it, with the moments."""
        self.parameters |= {name: p for name, p in parameters.items() if name in self.copies}
        for name in parameters.keys() & self.shards.keys():
            shard = self.shards[name]
            shard.data = local(parameters[name].detach())
            moments = self._adamw.state.get(shard, {})
            for key, value in moments.items():  # a fused AdamW wants its step counts there too
                moments[key] = value.to(shard.device)

    def grad_norm(self, world: int, device: torch.device) -> float:
        """Global L2 norm; each element counts once, however many ranks hold it. One all-reduce."""
        shares: dict[int, list[torch.Tensor]] = {}
        for name, parameter in self.parameters.items():
            if parameter.grad is not None and (piece := local(parameter.grad)).numel():
                shares.setdefault(self.copies[name], []).append(piece)
        total = torch.zeros((), dtype=torch.float32, device=device)
        for held_by, grads in shares.items():
            total += torch.stack(torch._foreach_norm(grads)).square().sum().to(device) / held_by
        if world > 1:
            dist.all_reduce(total)
        return float(total.sqrt())

    def step(self, lr: float, scale: float) -> None:
        """One step with gradients times `scale`."""
        for name, shard in self.shards.items():
            grad = self.parameters[name].grad
            shard.grad = None if grad is None else local(grad)
        grads = [shard.grad for shard in self.shards.values() if shard.grad is not None]
        if scale != 1.0 and grads:
            torch._foreach_mul_(grads, scale)
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
        """Parameter -> moment -> this rank's part, of those it has a part of; zeros before the first step. Writing to
        them counts."""
        return {
            name: {m: values for m, values in self._moments(shard).items() if m in MOMENTS}
            for name, shard in self.shards.items()
        }

    def set_step(self, step: int) -> None:
        for shard in self.shards.values():
            self._moments(shard)["step"].fill_(float(step))

    def _moments(self, shard: nn.Parameter) -> dict[str, torch.Tensor]:
        moments = self._adamw.state[shard]
        if not moments:
            moments["step"] = torch.zeros((), dtype=torch.float32, device=shard.device)
            moments |= {
                m: torch.zeros_like(shard, memory_format=torch.preserve_format) for m in MOMENTS
            }
        return moments
