"""DeepSpeed's ZeRO 1, 2 and 3 on Hugging Face models.

DeepSpeed's engine runs with `managed_gradient_accumulation` off: each backward adds to the gradients, each step uses
and clears them. A frozen role of stage 1 or 2 has no state to spread, and is the plain module.

This module is imported to check a config, so what takes seconds to import is imported where it is used.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hybridflow.core.contracts.training import LossFunction, MicroBatch, TrainingBackend
from hybridflow.core.values.metrics import Metrics
from hybridflow.core.values.weights import Box, Param, Shard, WeightLayout
from hybridflow.kit.checkpoint import MOMENTS, StatePart, flat_parts, load_state, save_state
from hybridflow.kit.huggingface.config import lora_problems
from hybridflow.kit.layouts import zero3_layout

if TYPE_CHECKING:
    from hybridflow.kit.huggingface.lora import Adapters


class DeepSpeedBackend(TrainingBackend):
    """A plugin of kind "training_backend", name "deepspeed"."""

    @classmethod
    def problems(cls, config, layout, kind) -> list[str]:
        found = []
        if config.precision == "bf16" and config.stage == 1:
            found.append(
                "backend deepspeed: stage 1 in bf16 is another optimizer of DeepSpeed's, without ZeRO's gradient clearing on "
                "overflow; set backend.stage to 2 or 3"
            )
        return found + lora_problems(config.lora)

    def build(self) -> None:
        from hybridflow.kit.huggingface.modeling import (
            RoleModel,
            build_hf_model,
            canonical,
            ties_of,
        )

        context, config, trained = self.context, self.config, self.optimizer_config is not None
        lora = config.lora if trained else None
        self._dtype = torch.bfloat16 if config.precision == "bf16" else torch.float32
        # DeepSpeed takes its float32 masters from the weights that it is given, so these begin in float32 ...
        masters = trained and lora is None
        hf, self._hf_config = build_hf_model(
            self.model_spec, torch.float32 if masters else self._dtype
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
        self._named: dict[str, Any] = {canonical(n): p for n, p in self.module.named_parameters()}
        self._trained = [name for name, p in self._named.items() if p.requires_grad]
        self._shapes = {name: tuple(p.shape) for name, p in self._named.items()}
        self._sharded = config.stage == 3
        self.engine: Any = None
        self._has_gradients = False
        if not trained and not self._sharded:
            self.module.to(context.device)
            return
        cut = trained and self._dtype != torch.float32
        values = {n: self._named[n].detach().clone() for n in self._trained} if cut else {}
        self._initialize()
        self._set_masters(values)  # ... and get back what bfloat16 has cut off

    def _initialize(self) -> None:
        deepspeed = _deepspeed(self.context.device)
        optimizer, wanted = None, self.optimizer_config
        learnt = [p for p in self.module.parameters() if p.requires_grad]
        if wanted is not None:
            options: dict[str, Any] = {
                "lr": wanted.lr,
                "betas": wanted.betas,
                "eps": wanted.eps,
                "weight_decay": wanted.weight_decay,
            }
            if self.config.adam == "cpu":
                from deepspeed.ops.adam import DeepSpeedCPUAdam

                optimizer = DeepSpeedCPUAdam(learnt, adamw_mode=True, **options)
            else:
                optimizer = torch.optim.AdamW(learnt, fused=True, **options)
        self.engine, *_ = deepspeed.initialize(
            model=self.module,
            optimizer=optimizer,
            config=self._settings(),
            dist_init_required=False,
        )
        self.zero = self.engine.optimizer

    def _settings(self) -> dict[str, Any]:
        """DeepSpeed's config."""
        config, wanted = self.config, self.optimizer_config
        zero: dict[str, Any] = {
            "stage": config.stage, "overlap_comm": config.overlap and self.context.device.type == "cuda",
            "reduce_bucket_size": config.bucket_elements, "allgather_bucket_size": config.bucket_elements,
        }  # fmt: skip
        if config.stage == 3:
            zero |= {
                "stage3_param_persistence_threshold": config.persist_elements,
                "stage3_prefetch_bucket_size": config.bucket_elements,
            }
        pin = self.context.device.type == "cuda"
        if config.offload_optimizer and wanted is not None:
            zero["offload_optimizer"] = {"device": "cpu", "pin_memory": pin}
        if config.offload_parameters:
            zero["offload_param"] = {"device": "cpu", "pin_memory": pin}
        found: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1,
            "managed_gradient_accumulation": False, "zero_optimization": zero | config.zero,
            "zero_force_ds_cpu_optimizer": False, "wall_clock_breakdown": False,
            "gradient_clipping": wanted.max_grad_norm if wanted is not None else 0.0,
        }  # fmt: skip
        if self._dtype == torch.bfloat16:
            found["bf16"] = {"enabled": True, "check_grad_overflow": True}
            found["data_types"] = {"grad_accum_dtype": "fp32"}
        return found

    # Compute
    def forward(
        self, micros: Sequence[MicroBatch], needs: Sequence[str], temperature: float = 1.0
    ) -> list[dict[str, torch.Tensor]]:
        model = self.module if self.engine is None else self.engine
        with torch.no_grad():
            return [dict(model(micro, needs, temperature)) for micro in micros]

    def forward_backward(
        self,
        micros: Sequence[MicroBatch],
        needs: Sequence[str],
        loss: LossFunction,
        temperature: float = 1.0,
    ) -> None:
        for at, micro in enumerate(micros):
            outputs: Mapping[str, torch.Tensor] = self.engine(micro, needs, temperature)
            share = loss(at, outputs)
            # DeepSpeed averages over dp; the loss is a sum.
            self.engine.backward(share * self.context.layout.dp, scale_wrt_gas=False)
            self._has_gradients = True

    def optim_step(self) -> Metrics:
        assert self.optimizer_config is not None, "a frozen role cannot be updated"
        lr = self.optimizer_config.lr_at(self.version)
        if not self._has_gradients:  # which DeepSpeed's step does not expect
            self.version += 1
            return Metrics.of(grad_norm=0.0, lr=lr)
        for group in self.zero.param_groups:
            group["lr"] = lr
        self.engine.step()
        self._has_gradients = False
        norm = float("inf") if self.zero.overflow else float(self.engine.get_global_grad_norm())
        if norm < float("inf"):
            self.version += 1
        return Metrics.of(grad_norm=norm, lr=lr)

    # Weights
    def _model(self) -> dict[str, Any]:
        """Without adapters."""
        adapters = self._adapters.names if self._adapters is not None else ()
        return {name: p for name, p in self._named.items() if name not in adapters}

    def layout(self) -> WeightLayout:
        world = self.context.layout.world
        params = {name: Param(self._shapes[name], self._dtype) for name in self._model()}
        if self._sharded:
            return zero3_layout(params, world, self._ties)
        held = {n: dict.fromkeys(range(world), (Box.full(p.shape),)) for n, p in params.items()}
        return WeightLayout.by_name(params, held, range(world), self._ties)

    def named_shards(self) -> Iterator[tuple[str, Box, Shard]]:
        adapters = self._whole_adapters()
        for name, box, values in self._held(self._model()):
            yield (
                name,
                box,
                self._adapters.shard(name, box, values, adapters) if self._adapters else values,
            )

    def _held(self, names: Iterable[str]) -> Iterator[tuple[str, Box, torch.Tensor]]:
        """Views of what this rank holds, without adapters' values."""
        for name in names:
            parameter, shape = self._named[name], self._shapes[name]
            if not self._sharded:
                yield name, Box.full(shape), parameter.detach()
                continue
            shard = parameter.ds_tensor.detach()
            for box, at in self._boxes(name, self.context.rank, shard.numel()):
                yield name, box, shard.narrow(0, at, box.numel).view(box.shape)

    def _boxes(self, name: str, rank: int, length: int) -> Iterator[tuple[Box, int]]:
        """Stage 3: what a rank's flat shard, `length` elements long, holds: boxes, and where they begin in it."""
        return ((box, at) for _, _, box, at in self._flat(name, rank * length, length))

    def _flat(
        self, name: str, start: int, length: int
    ) -> Iterator[tuple[str, tuple[int, ...], Box, int]]:
        """The boxes of elements start..start + length of a parameter, as flat_parts gives them."""
        shape = self._shapes[name]
        return flat_parts([(name, shape, Box.full(shape), 0)], start, start + length)

    def _whole_adapters(self) -> dict[str, torch.Tensor]:
        """Their values on every rank. Collective where there are any."""
        if self._adapters is None:
            return {}
        return {name: whole.clone() for name, whole in self._whole(sorted(self._adapters.names))}

    def full_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        adapters = self._whole_adapters()
        for name, whole in self._whole(self._model()):
            yield name, self._merged(name, whole, adapters)

    def _merged(
        self, name: str, whole: torch.Tensor, adapters: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        """With its adapters, box by box as the ranks hold it: the bits that engines get."""
        if self._adapters is None or name not in self._adapters.of:
            return whole
        if not self._sharded:
            return self._adapters.merged(name, Box.full(whole.shape), whole, adapters)
        made, length = whole.clone(), self._named[name].ds_tensor.numel()
        for rank in range(self.context.layout.world):
            for box, _ in self._boxes(name, rank, length):
                made[box.slices()] = self._adapters.merged(name, box, whole[box.slices()], adapters)
        return made

    def _whole(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        if not self._sharded:
            yield from ((name, self._named[name].detach()) for name in names)
            return
        import deepspeed

        for name in names:
            parameter = self._named[name]
            with deepspeed.zero.GatheredParameters([parameter]):
                yield name, parameter.detach()

    # Files
    def _state(self) -> Iterator[StatePart]:
        """Masters and moments that this rank has of what is trained; of a frozen role the weights."""
        if self.optimizer_config is None:
            for name, box, values in self._held(self._named):
                yield StatePart(f"model.{name}", self._shapes[name], box, values)
            return
        for name in self._trained:
            for entry, start, values in self._kept(name, self._named[name]):
                for _, shape, box, at in self._flat(name, start, values.numel()):
                    yield StatePart(f"{entry}.{name}", shape, box, values.narrow(0, at, box.numel))

    def _kept(self, name: str, parameter: Any) -> Iterator[tuple[str, int, torch.Tensor]]:
        """(entry, first element of the parameter, flat values) of its float32 state on this rank."""
        if self._sharded:
            group, at, length = self.zero.grad_position[self.zero.get_param_id(parameter)]
            flat, start = self.zero.fp32_partitioned_groups_flat[group], self.context.rank * length
        elif (mapping := parameter._hp_mapping) is not None:
            flat = self.zero.single_partition_of_fp32_groups[mapping.param_group_index]
            at, length = mapping.hp_fragment_address.start, mapping.hp_fragment_address.numel
            start = mapping.lp_fragment_address.start
        else:
            return
        yield "model", start, flat.detach().narrow(0, at, length)
        moments = self._moments(flat)
        for moment in MOMENTS:
            yield f"optimizer.{moment}", start, moments[moment].narrow(0, at, length)

    def _moments(self, flat: torch.Tensor) -> dict[str, Any]:
        """AdamW's state of a flat buffer; zeros before the first step."""
        moments = self.zero.optimizer.state[flat]
        if not moments:
            moments["step"] = (
                0 if self.config.adam == "cpu" else torch.zeros((), device=flat.device)
            )
            moments |= {m: torch.zeros_like(flat.detach()) for m in MOMENTS}
        return moments

    def save(self, folder: Path) -> None:
        save_state(self._state(), self.version, folder, self.context.rank)

    def load(self, folder: Path) -> None:
        self.version = load_state(self._state(), folder, self.context.role)
        if self.optimizer_config is None:
            return
        for moments in self.zero.optimizer.state.values():
            moments["step"] = (
                self.version
                if self.config.adam == "cpu"
                else moments["step"].fill_(float(self.version))
            )
        if self._sharded:
            self._weights_from_masters()
        else:
            whole = [
                StatePart(f"model.{n}", self._shapes[n], b, values)
                for n, b, values in self._held(self._trained)
            ]
            load_state(whole, folder, self.context.role)

    def _weights_from_masters(self) -> None:
        """Stage 3: the compute weights of this rank, and those that are kept whole."""
        for parameter in (self._named[name] for name in self._trained):
            group, at, length = self.zero.grad_position[self.zero.get_param_id(parameter)]
            masters = self.zero.fp32_partitioned_groups_flat[group].detach().narrow(0, at, length)
            parameter.ds_tensor.detach()[:length].copy_(masters)
        if whole := self.zero.persistent_parameters:
            whole[0].partition(whole)
            whole[0].all_gather(whole)

    def _set_masters(self, values: Mapping[str, torch.Tensor]) -> None:
        """Write whole float32 values into the masters of this rank."""
        for name, whole in values.items():
            for entry, start, kept in self._kept(name, self._named[name]):
                if entry == "model":
                    kept.copy_(whole.flatten()[start : start + kept.numel()])

    def export_hf(self, folder: Path) -> None:
        from hybridflow.kit.huggingface.export import export_role

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
            self._dtype,
            self.context,
            more,
        )

    # Memory
    def offload(self) -> None:
        if self.context.device.type == "cuda":
            if self.engine is None:
                self.module.to("cpu")
            elif self.optimizer_config is not None and not self.config.offload_parameters:
                self.engine.offload_states()
            torch.cuda.empty_cache()

    def onload(self) -> None:
        if self.context.device.type == "cuda":
            if self.engine is None:
                self.module.to(self.context.device)
            elif self.optimizer_config is not None and not self.config.offload_parameters:
                self.engine.reload_states()


def _deepspeed(device: torch.device) -> Any:
    """The package, set up for the process groups and the device that are there already."""
    if device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("LOCAL_RANK", str(device.index or 0))
    import deepspeed
    import deepspeed.ops
    from deepspeed.utils import groups

    if groups._WORLD_GROUP is not None and not _is_there(
        groups._WORLD_GROUP
    ):  # of a group that has ended since
        groups._release_process_group_references()
    if device.type == "cpu":  # else minutes of compiling for a collective over shared memory
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(
        dist_backend="gloo" if device.type == "cpu" else "nccl",
        auto_mpi_discovery=False,
        verbose=False,
    )
    return deepspeed


def _is_there(group: Any) -> bool:
    try:
        torch.distributed.get_process_group_ranks(group)
    except (KeyError, ValueError, RuntimeError):
        return False
    return True
