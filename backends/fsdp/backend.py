"""FSDP2 (torch.distributed.fsdp.fully_shard) on Hugging Face models, with tensor parallelism.

A single rank in float32 without offload runs the plain module: the same numbers, without FSDP's hooks.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from hybridflow.backends.fsdp.export import write_hf_folder
from hybridflow.backends.fsdp.modeling import RoleModel, build_hf_model
from hybridflow.backends.fsdp.sharding import apply_fsdp, apply_tensor_parallel, boxes_of, copies, device_mesh, local
from hybridflow.core.errors import HybridFlowError
from hybridflow.core.metrics import Metrics
from hybridflow.core.training import LossFunction, MicroBatch, TrainingBackend
from hybridflow.core.weights import Box, Param, WeightLayout

MOMENTS = ("exp_avg", "exp_avg_sq")


class FSDPBackend(TrainingBackend):
    """A plugin of kind "training_backend", name "fsdp"."""

    @classmethod
    def problems(cls, config, layout, kind) -> list[str]:
        found = []
        if layout.pp > 1 or layout.cp > 1 or layout.ep > 1:
            found.append(f"backend fsdp has the axes dp and tp; got {layout}: set pp, cp and ep to 1")
        if layout.dp % config.replicas:
            found.append(f"backend.replicas must divide dp, got replicas {config.replicas} and dp {layout.dp}")
        return found

    def build(self) -> None:
        context, trained = self.context, self.optimizer_config is not None
        bf16 = self.config.precision == "bf16"
        hf = build_hf_model(self.model_spec, torch.float32 if trained or not bf16 else torch.bfloat16)
        self.module = RoleModel(hf, self.model_spec.kind).to(context.device)
        self.module.requires_grad_(trained)
        if self.config.activation_checkpointing and trained:
            hf.gradient_checkpointing_enable({"use_reentrant": False})
        self.module.train(trained)
        layout = context.layout
        self.sharded = layout.world > 1 or bf16 or self.config.cpu_offload
        if self.sharded:
            mesh = device_mesh(layout, self.config.replicas, context.device)
            if layout.tp > 1:
                apply_tensor_parallel(self.module, mesh["tp"])
            apply_fsdp(self.module, mesh, self.config)
        if self.config.compile:
            for layer in getattr(hf.base_model, "layers", []):
                layer.compile()
        self.parameters = dict(self._canonical())
        self.optimizer = None
        if self.optimizer_config is not None:
            c = self.optimizer_config
            self.optimizer = torch.optim.AdamW(
                self.parameters.values(), lr=c.lr, betas=c.betas, eps=c.eps, weight_decay=c.weight_decay, fused=True
            )

    def _canonical(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Parameters under the names of the exported safetensors; tied ones once."""
        for name, parameter in self.module.named_parameters():
            yield name.removeprefix("hf."), parameter

    # Compute
    def forward(
        self, micros: Sequence[MicroBatch], needs: Sequence[str], temperature: float = 1.0
    ) -> list[dict[str, torch.Tensor]]:
        with torch.no_grad():
            return [self.module(micro, needs, temperature) for micro in micros]

    def forward_backward(
        self, micros: Sequence[MicroBatch], needs: Sequence[str], loss: LossFunction, temperature: float = 1.0
    ) -> None:
        for at, micro in enumerate(micros):
            if isinstance(self.module, FSDPModule):
                self.module.set_requires_gradient_sync(at == len(micros) - 1)
            outputs: Mapping[str, torch.Tensor] = self.module(micro, needs, temperature)
            share = loss(at, outputs)
            if not share.requires_grad:  # every term had weight 0; the ranks' backwards must still meet
                share = share + sum(o.sum() * 0.0 for o in outputs.values())
            (share * self.context.layout.dp).backward()  # FSDP averages over dp; the loss is a sum

    def optim_step(self) -> Metrics:
        assert self.optimizer is not None and self.optimizer_config is not None, "a frozen role cannot be updated"
        config = self.optimizer_config
        lr = config.lr_at(self.version)
        norm = self._grad_norm()
        if config.max_grad_norm and norm > config.max_grad_norm:
            scale = config.max_grad_norm / (norm + 1e-6)
            torch._foreach_mul_([local(p.grad) for p in self.parameters.values() if p.grad is not None], scale)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.version += 1
        return Metrics.of(grad_norm=norm, lr=lr)

    def _grad_norm(self) -> float:
        """Global L2 norm; each element counts once, however many ranks hold it. One all-reduce."""
        world = self.context.layout.world
        shares: dict[int, list[torch.Tensor]] = {}
        for parameter in self.parameters.values():
            if parameter.grad is not None:
                shares.setdefault(copies(parameter.grad, world), []).append(local(parameter.grad))
        total = torch.zeros((), dtype=torch.float32, device=self.context.device)
        for held_by, grads in shares.items():
            norms = torch.stack(torch._foreach_norm([g for g in grads if g.numel()] or [total]))
            total += norms.to(total.device).square().sum() / held_by
        if world > 1:
            dist.all_reduce(total)
        return float(total.sqrt())

    # Weights
    def layout(self) -> WeightLayout:
        world = self.context.layout.world
        held: dict[int, dict[str, tuple[Box, ...]]] = {rank: {} for rank in range(world)}
        params = {}
        for name, p in self.parameters.items():
            params[name] = Param(tuple(p.shape), p.dtype)
            mesh, placements = (p.device_mesh, p.placements) if isinstance(p, DTensor) else (None, None)
            for rank, boxes in self._everywhere(boxes_of(p.shape, mesh, placements, world)).items():
                held[rank][name] = boxes
        return WeightLayout(params, held, self._ties())

    def _everywhere(self, boxes: dict[int, tuple[Box, ...]]) -> dict[int, tuple[Box, ...]]:
        """Boxes over one dp mesh -> over all ranks: what tensor parallelism replicates stands on every tp rank."""
        layout = self.context.layout
        if len(boxes) == layout.world:
            return boxes
        by_dp = {layout.coords(rank).dp: held for rank, held in boxes.items()}
        return {rank: by_dp[layout.coords(rank).dp] for rank in range(layout.world)}

    def _ties(self) -> dict[str, str]:
        names = dict(self.module.named_parameters(remove_duplicate=False))
        kept = {id(p): name for name, p in self.module.named_parameters()}
        return {
            n.removeprefix("hf."): kept[id(p)].removeprefix("hf.") for n, p in names.items() if kept[id(p)] != n
        }  # fmt: skip

    def named_shards(self) -> Iterator[tuple[str, Box, torch.Tensor]]:
        layout = self.layout()
        for name, parameter in self.parameters.items():
            for box in layout.held[self.context.rank][name]:
                yield name, box, local(parameter.detach())

    def full_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self.parameters.items():
            whole = parameter.detach()
            if isinstance(whole, DTensor):
                device = self.context.device
                whole = whole.to(device).full_tensor() if self.config.cpu_offload else whole.full_tensor()
            yield name, whole

    # Files
    def _state(self) -> dict[str, torch.Tensor]:
        state = {f"model.{name}": p.detach() for name, p in self.parameters.items()}
        if self.optimizer is not None:
            for name, p in self.parameters.items():
                moments = self.optimizer.state[p]
                if not moments:  # before the first step AdamW has none
                    moments["step"] = torch.zeros((), dtype=torch.float32, device=local(p).device)
                    moments |= {m: torch.zeros_like(p.detach(), memory_format=torch.preserve_format) for m in MOMENTS}
                state |= {f"optimizer.{m}.{name}": moments[m] for m in MOMENTS}
        return state

    def save(self, folder: Path) -> None:
        dcp.save(self._state(), checkpoint_id=folder)
        if self.context.rank == 0:
            (folder / "counters.json").write_text(json.dumps({"version": self.version}))

    def load(self, folder: Path) -> None:
        try:
            self.version = json.loads((folder / "counters.json").read_text())["version"]
            dcp.load(self._state(), checkpoint_id=folder)
        except (OSError, KeyError, ValueError, dcp.api.CheckpointException) as error:
            raise HybridFlowError(
                f"checkpoint {folder} of role {self.context.role!r} cannot be read: {error}"
            ) from error
        if self.optimizer is not None:
            for p in self.parameters.values():
                self.optimizer.state[p]["step"].fill_(float(self.version))

    def export_hf(self, folder: Path) -> None:
        tensors = {}
        dtype = torch.bfloat16 if self.config.precision == "bf16" else torch.float32
        for name, whole in self.full_parameters():
            if self.context.rank == 0:
                tensors[name] = whole.to("cpu", dtype).contiguous().clone()
        if self.context.rank == 0:
            write_hf_folder(self.module.hf, tensors, folder)
        if self.context.world_size > 1:
            dist.barrier()

    # Memory
    def offload(self) -> None:
        self._move("cpu")

    def onload(self) -> None:
        self._move(self.context.device)

    def _move(self, device: torch.device | str) -> None:
        if self.config.cpu_offload or self.context.device.type == "cpu":
            return
        self.module.to(device)
        for moments in self.optimizer.state.values() if self.optimizer is not None else ():
            for key, value in moments.items():
                if isinstance(value, torch.Tensor) and key != "step":
                    moments[key] = value.to(device)
        torch.cuda.empty_cache()
