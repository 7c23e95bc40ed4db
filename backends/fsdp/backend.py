"""FSDP2 (torch.distributed.fsdp.fully_shard) on Hugging Face models, with tensor parallelism.

A single rank in float32 without offload runs the plain module: the same numbers, without FSDP's hooks.

This module is imported to check a config, so what takes seconds to import is imported where it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from hybridflow.backends.fsdp.gather import Piece, whole_parameters
from hybridflow.core.contracts.training import LossFunction, MicroBatch, TrainingBackend
from hybridflow.core.values.metrics import Metrics
from hybridflow.core.values.weights import Box, Param, Shard, WeightLayout
from hybridflow.kit.checkpoint import StatePart, load_state, save_state
from hybridflow.kit.huggingface.config import lora_problems

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

    from hybridflow.kit.huggingface.lora import Adapters


class FSDPBackend(TrainingBackend):
    """A plugin of kind "training_backend", name "fsdp"."""

    @classmethod
    def problems(cls, config, layout, kind) -> list[str]:
        found = []
        if layout.dp % config.replicas:
            found.append(
                f"backend.replicas must divide dp, got replicas {config.replicas} and dp {layout.dp}"
            )
        if config.lora is not None and layout.tp > 1:
            found.append(
                f"backend fsdp: lora needs tp 1, got {layout}: set layout.tp = 1, or leave backend.lora out"
            )
        return found + lora_problems(config.lora)

    def build(self) -> None:
        from hybridflow.backends.fsdp import sharding
        from hybridflow.backends.fsdp.optimizer import ShardedAdamW
        from hybridflow.kit.huggingface.modeling import RoleModel, build_hf_model, ties_of

        context, config, trained = self.context, self.config, self.optimizer_config is not None
        bf16, lora = config.precision == "bf16", config.lora if trained else None
        masters = trained and lora is None
        hf, self._hf_config = build_hf_model(
            self.model_spec, torch.float32 if masters or not bf16 else torch.bfloat16
        )
        self.module = RoleModel(hf, self.model_spec.kind)
        self.module.requires_grad_(trained)
        self._adapters: Adapters | None = None
        if lora is not None:
            from hybridflow.kit.huggingface.lora import Adapters

            self._adapters = Adapters(self.module, lora, self.model_spec.init_seed)
        if config.activation_checkpointing and trained:
            hf.gradient_checkpointing_enable({"use_reentrant": False})
        self.module.train(trained)
        self._ties = ties_of(self.module)
        self._gathered: list[FSDPModule] = []
        layout = context.layout
        if layout.world > 1 or bf16 or config.cpu_offload:
            mesh = sharding.device_mesh(layout, config.replicas, context.device)
            if layout.tp > 1:
                sharding.apply_tensor_parallel(self.module, mesh["tp"])
            # Moves each piece to the device as it cuts it.
            self._gathered = sharding.apply_fsdp(self.module, mesh, config)
        else:
            self.module.to(context.device)
        if config.compile:
            for layer in getattr(hf.base_model, "layers", []):
                layer.compile()
        self.parameters = dict(self._canonical())
        self._trained = {name for name, p in self.parameters.items() if p.requires_grad}
        self._boxes = {
            name: sharding.boxes_of(p, layout, config.replicas)
            for name, p in self.parameters.items()
        }
        self._replica, self._replica_group = sharding.replica_group(
            layout, config.replicas, context.rank
        )
        self.optimizer = None
        if self.optimizer_config is not None:
            learnt = {n: p for n, p in self.parameters.items() if n in self._trained}
            held = {n: sharding.copies(p, layout, config.replicas) for n, p in learnt.items()}
            self.optimizer = ShardedAdamW(learnt, held, self.optimizer_config)

    def _canonical(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Parameters under the names of the exported safetensors, tied ones once; and adapters."""
        from hybridflow.kit.huggingface.modeling import canonical

        for name, parameter in self.module.named_parameters():
            yield canonical(name), parameter

    def _model(self) -> dict[str, torch.nn.Parameter]:
        """Without adapters."""
        adapters = self._adapters.names if self._adapters is not None else ()
        return {name: p for name, p in self.parameters.items() if name not in adapters}

    def _local(self, parameter: torch.Tensor) -> torch.Tensor:
        """What this rank holds of it."""
        from hybridflow.backends.fsdp.sharding import local

        return local(parameter.detach())

    # Compute
    def forward(
        self, micros: Sequence[MicroBatch], needs: Sequence[str], temperature: float = 1.0
    ) -> list[dict[str, torch.Tensor]]:
        with torch.no_grad():
            outputs = [self.module(micro, needs, temperature) for micro in micros]
        self._reshard()
        return outputs

    def _reshard(self) -> None:
        """Free gathered weights: after a forward without a backward they would stay, and grow stale."""
        for module in self._gathered:
            module.reshard()

    def forward_backward(
        self,
        micros: Sequence[MicroBatch],
        needs: Sequence[str],
        loss: LossFunction,
        temperature: float = 1.0,
    ) -> None:
        for at, micro in enumerate(micros):
            self._set_last(at == len(micros) - 1)
            outputs: Mapping[str, torch.Tensor] = self.module(micro, needs, temperature)
            share = loss(at, outputs)
            (share * self.context.layout.dp).backward()  # FSDP averages over dp; the loss is a sum

    def _set_last(self, last: bool) -> None:
        """Reduce gradients once, after the last micro-batch; until then keep what may stay gathered."""
        if self._gathered:
            root = self._gathered[-1]
            root.set_requires_gradient_sync(last)
            root.set_reshard_after_backward(last, recurse=not self.config.reshard_after_forward)

    def optim_step(self) -> Metrics:
        assert self.optimizer is not None and self.optimizer_config is not None, (
            "a frozen role cannot be updated"
        )
        config = self.optimizer_config
        lr = config.lr_at(self.version)
        norm = self.optimizer.grad_norm(self.context.layout.world, self.context.device)
        if norm < float("inf"):
            clip = config.max_grad_norm and norm > config.max_grad_norm
            self.optimizer.step(lr, config.max_grad_norm / (norm + 1e-6) if clip else 1.0)
            self.version += 1
        else:
            self.optimizer.clear()
        return Metrics.of(grad_norm=norm, lr=lr)

    # Weights
    def layout(self) -> WeightLayout:
        held: dict[int, dict[str, tuple[Box, ...]]] = {
            rank: {} for rank in range(self.context.layout.world)
        }
        params = {}
        for name, p in self._model().items():
            params[name] = Param(tuple(p.shape), p.dtype)
            for rank, box in self._boxes[name].items():
                held[rank][name] = (box,) if box.numel else ()
        return WeightLayout(params, held, self._ties)

    def named_shards(self) -> Iterator[tuple[str, Box, Shard]]:
        adapters = self._whole_adapters()
        for name, parameter in self._model().items():
            box, values = self._boxes[name][self.context.rank], self._local(parameter)
            if box.numel:
                yield (
                    name,
                    box,
                    self._adapters.shard(name, box, values, adapters) if self._adapters else values,
                )

    def _whole_adapters(self) -> dict[str, torch.Tensor]:
        """Their values on every rank. Collective where there are any."""
        if self._adapters is None:
            return {}
        mine = {name: p for name, p in self.parameters.items() if name in self._adapters.names}
        return {name: whole.clone() for name, whole in self._gather(mine, {})}

    @torch.no_grad()
    def adopt(self, name: str, storage: torch.Tensor) -> bool:
        parameter = self.parameters.get(name)
        if parameter is None or self._gathered:  # FSDP's storage is its own
            return False
        if (
            self._adapters is not None and name in self._adapters.of
        ):  # the engine gets merged values
            return False
        if (parameter.dtype, parameter.shape, parameter.device) != (
            storage.dtype,
            storage.shape,
            storage.device,
        ):
            return False
        storage.copy_(parameter)
        parameter.data = storage
        if self.optimizer is not None:
            self.optimizer.relink({name: parameter})
        return True

    def full_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._gather(self._model(), self._whole_adapters())

    def _gather(
        self, parameters: Mapping[str, torch.nn.Parameter], adapters: Mapping[str, torch.Tensor]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Whole parameters, with their adapters merged as shards of this layout are."""

        def pieces() -> Iterator[Piece]:
            for name, p in parameters.items():
                local = self._local(p)
                if adapters and self._adapters is not None:
                    local = self._adapters.merged(
                        name, self._boxes[name][self.context.rank], local, adapters
                    )
                yield Piece(name, tuple(p.shape), local, self._boxes[name])

        if self.context.layout.world == 1:
            yield from ((piece.name, piece.local.to(self.context.device)) for piece in pieces())
            return
        yield from whole_parameters(
            pieces(), self._replica, self._replica_group, self.context.device
        )

    # Files
    def _state(self) -> Iterator[StatePart]:
        """Of LoRA what is trained alone: the rest is in the model's own folder."""
        rank, moments = (
            self.context.rank,
            self.optimizer.moments() if self.optimizer is not None else {},
        )
        for name, parameter in self.parameters.items():
            if self._adapters is not None and name not in self._trained:
                continue
            shape, box = tuple(parameter.shape), self._boxes[name][rank]
            yield StatePart(f"model.{name}", shape, box, self._local(parameter))
            for moment, values in moments.get(name, {}).items():
                yield StatePart(f"optimizer.{moment}.{name}", shape, box, values)

    def save(self, folder: Path) -> None:
        save_state(self._state(), self.version, folder, self.context.rank)

    def load(self, folder: Path) -> None:
        self.version = load_state(self._state(), folder, self.context.role)
        if self.optimizer is not None:
            self.optimizer.set_step(self.version)

    def export_hf(self, folder: Path) -> None:
        from hybridflow.kit.huggingface.export import export_role

        dtype = torch.bfloat16 if self.config.precision == "bf16" else torch.float32
        hf = self.module.hf
        generation = getattr(hf, "generation_config", None)
        more = (
            partial(self._adapters.export, self._whole_adapters(), folder / "adapter")
            if self._adapters
            else None
        )
        export_role(
            self.full_parameters(),
            type(hf),
            self._hf_config,
            generation,
            folder,
            dtype,
            self.context,
            more,
        )

    # Memory
    def offload(self) -> None:
        if self.context.device.type != "cpu" and not self.config.cpu_offload:
            self._move(lambda tensor: tensor.to("cpu"))
            torch.cuda.empty_cache()

    def onload(self) -> None:
        if self.context.device.type != "cpu" and not self.config.cpu_offload:
            self._move(lambda tensor: tensor.to(self.context.device))

    def _move(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Give weights, buffers and optimizer another storage. A change of device is one; a copy is the test's."""
        self.module._apply(change)
        self.parameters = dict(self._canonical())  # FSDP may have new objects
        if self.optimizer is not None:
            self.optimizer.relink(self.parameters)
