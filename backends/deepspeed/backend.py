"""DeepSpeed's ZeRO 1, 2 and 3 on Hugging Face models.

DeepSpeed's engine runs with `managed_gradient_accumulation` off: each backward pass adds to the
gradients, and each step uses and clears them. A frozen role of stage 1 or 2 has no state to shard:
it is the plain module, without an engine.

Stage 3 flattens each parameter and cuts it into one equal part per rank, the last one padded. A
part is described by boxes. A parameter of shape [3, 4] on two ranks:

     0  1  2  3        rank 0 holds elements 0 to 5:   boxes [0:1, 0:4] and [1:2, 0:2]
     4  5 | 6  7       rank 1 holds elements 6 to 11:  boxes [1:2, 2:4] and [2:3, 0:4]
     8  9 10 11

This module is imported to check a config, so modules that take seconds to import are imported where
they are used.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hybridflow.core.contracts.training import (
    PARTS,
    LossFunction,
    MicroBatch,
    TrainingBackend,
    Writing,
)
from hybridflow.core.values.metrics import Metrics
from hybridflow.core.values.weights import Box, Param, Shard, WeightLayout
from hybridflow.kit.checkpoint import MOMENTS, StatePart, flat_parts, load_state, save_state
from hybridflow.kit.layouts import zero3_layout
from hybridflow.kit.offload import Residence

if TYPE_CHECKING:
    from hybridflow.kit.huggingface.lora import Adapters


def _everywhere(shape: tuple[int, ...], ranks: Iterable[int]) -> dict[int, tuple[Box, ...]]:
    """Return the boxes of a parameter that every rank holds whole."""
    return dict.fromkeys(ranks, (Box.full(shape),))


class DeepSpeedBackend(TrainingBackend):
    """The training backend "deepspeed": data parallelism with sharded state."""

    @classmethod
    def problems(cls, config, layout, model) -> list[str]:
        """Return problems: of the model; of LoRA; stage 1 in bf16."""
        from hybridflow.kit.huggingface.checks import adapter_problems, model_problems

        problems = model_problems(model)
        if not problems:
            problems = adapter_problems(model, config.lora)
        if config.precision == "bf16" and config.stage == 1:
            problems.append(
                "backend deepspeed: stage 1 in bf16 uses another optimizer of DeepSpeed's, which "
                "does not clear gradients on overflow as ZeRO does; set backend.stage to 2 or 3"
            )
        return problems

    def build(self) -> None:
        """Build the model (on meta for stage 3, then cut it), read its values, make the engine."""
        from hybridflow.kit.huggingface.loading import allocate, move_buffers

        config = self.config
        trained = self.optimizer_config is not None
        self._sharded = config.stage == 3
        self._build_module()

        # Whole shapes: cutting empties the parameters.
        shapes = {name: tuple(values.shape) for name, values in self._canonical()}
        self._shapes: dict[str, tuple[int, ...]] = shapes
        if self._adapters is None and self._sharded:
            self._cut_module()
        elif self._adapters is None:
            allocate(self.module, self.context.device)
        move_buffers(self.module, self.context.device)

        # Cutting has put other parameters into the module.
        self._named: dict[str, Any] = dict(self._canonical())
        self._trained = [name for name, values in self._named.items() if values.requires_grad]
        if self._adapters is None:
            self._read([*self._held(self._named), *self._saved_buffers()])

        # A frozen role of stage 1 or 2 has no state to shard.
        self.engine: Any = None
        self._has_gradients = False
        if trained or self._sharded:
            self._initialize()
        else:
            self.module.to(self.context.device)

        # DeepSpeed makes masters of rounded weights: give them the float32 values instead.
        if trained and self._dtype != torch.float32 and self._adapters is None:
            self._read(self._masters())
        self.residence = Residence(
            self.context.device,
            {"weights": self._weight_tensors, "optimizer": self._optimizer_tensors},
            scratch={"optimizer": self._gradient_buffers},
        )

    def _build_module(self) -> None:
        """Build the model on meta, in the dtype in which it runs.

        With adapters it is built whole, since peft puts its layers into it.
        """
        from hybridflow.kit.huggingface.loading import empty_model
        from hybridflow.kit.huggingface.modeling import RoleModel, build_hf_model, ties_of
        from hybridflow.kit.huggingface.saved import SavedForm

        config = self.config
        trained = self.optimizer_config is not None
        lora = config.lora if trained else None
        self._dtype = torch.bfloat16 if config.precision == "bf16" else torch.float32
        build = empty_model if lora is None else build_hf_model
        hf, self._hf_config = build(self.model_spec, self._dtype)
        self.packing, _ = config.packing(self._hf_config.to_dict())
        self._form = SavedForm.of(hf)
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

    def _canonical(self) -> Iterator[tuple[str, Any]]:
        """Yield the module's parameters by canonical name."""
        from hybridflow.kit.huggingface.modeling import canonical

        for name, parameter in self.module.named_parameters():
            yield canonical(name), parameter

    def _cut_module(self) -> None:
        """Allocate only this rank's part of each parameter, by DeepSpeed's zero.Init."""
        deepspeed = _import_deepspeed(self.context.device)
        whole = _OneByOne(self.module, self.context.device, self._dtype)
        deepspeed.zero.Init(module=whole, config_dict_or_path=self._settings(), dtype=self._dtype)

    def _saved_buffers(self) -> Iterator[tuple[str, Box, torch.Tensor]]:
        """Yield the buffers that checkpoints have; they are whole on every rank.

        No step changes them: the bias by which a router chooses its experts (deepseek_v3).
        """
        from hybridflow.kit.huggingface.modeling import canonical, saved_buffers

        for name, buffer in saved_buffers(self.module):
            yield canonical(name), Box.full(buffer.shape), buffer

    def _masters(self) -> Iterator[tuple[str, Box, torch.Tensor]]:
        """Yield this rank's float32 masters."""
        for part in self._state():
            if part.entry.startswith("model."):
                yield part.entry.removeprefix("model."), part.box, part.values

    def _read(self, parts: Iterable[tuple[str, Box, torch.Tensor]]) -> None:
        """Read boxes of the stored parameters from the model's folder, or draw them."""
        from hybridflow.kit.huggingface.loading import Part, fill

        found: list[Part] = []
        for name, box, values in self._form.shards(parts):
            assert isinstance(values, torch.Tensor)  # no adapters
            found.append((name, box, values))
        fill(found, self.model_spec, torch.float32)

    def _initialize(self) -> None:
        """Make the optimizer of a trained role, and wrap the module in DeepSpeed's engine."""
        deepspeed = _import_deepspeed(self.context.device)
        optimizer: Any = None
        settings = self.optimizer_config
        learnt = [parameter for parameter in self.module.parameters() if parameter.requires_grad]

        # A frozen role has no optimizer: stage 3 then only shards its weights.
        if settings is not None:
            options: dict[str, Any] = {
                "lr": settings.lr,
                "betas": settings.betas,
                "eps": settings.eps,
                "weight_decay": settings.weight_decay,
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
        """Return DeepSpeed's config, under the names of its documentation."""
        config = self.config
        optimizer = self.optimizer_config
        on_gpu = self.context.device.type != "cpu"

        zero: dict[str, Any] = {
            "stage": config.stage,
            "overlap_comm": config.overlap and on_gpu,
            "reduce_bucket_size": config.bucket_elements,
            "allgather_bucket_size": config.bucket_elements,
        }
        if config.stage == 3:
            # Which parameters stay whole, and how many elements are gathered ahead.
            zero |= {
                "stage3_param_persistence_threshold": config.persist_elements,
                "stage3_prefetch_bucket_size": config.bucket_elements,
            }
        if config.offload_optimizer and optimizer is not None:
            zero["offload_optimizer"] = {
                "device": "cpu",
                "pin_memory": on_gpu,
            }
        if config.offload_parameters:
            zero["offload_param"] = {
                "device": "cpu",
                "pin_memory": on_gpu,
            }

        # The sizes of batches have no effect: the caller runs the micro-batches and calls the step.
        settings: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "managed_gradient_accumulation": False,
            "zero_optimization": zero | config.zero,
            "zero_force_ds_cpu_optimizer": False,
            "wall_clock_breakdown": False,
            "gradient_clipping": optimizer.max_grad_norm if optimizer is not None else 0.0,
        }
        if self._dtype == torch.bfloat16:
            settings["bf16"] = {"enabled": True, "check_grad_overflow": True}
            settings["data_types"] = {"grad_accum_dtype": "fp32"}
        return settings

    # --- passes and updates ---

    def forward(
        self,
        micros: Sequence[MicroBatch],
        needs: Sequence[str],
        temperature: float = 1.0,
    ) -> list[dict[str, torch.Tensor]]:
        """Return the outputs of each micro-batch: float32, without gradients."""
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
        """Accumulate gradients of the losses' sum over micro-batches and dp ranks."""
        for index, micro in enumerate(micros):
            outputs: Mapping[str, torch.Tensor] = self.engine(micro, needs, temperature)
            share = loss(index, outputs)

            # DeepSpeed averages gradients over dp; the loss is a sum over dp.
            self.engine.backward(share * self.context.layout.dp, scale_wrt_gas=False)
            self._has_gradients = True

    def optim_step(self) -> Metrics:
        """Clip, step and clear the gradients; without any gradients only count the step.

        The metric grad_norm is infinite where DeepSpeed reports an overflow; the weights and
        `version` are then unchanged.
        """
        assert self.optimizer_config is not None, "a frozen role cannot be updated"
        lr = self.optimizer_config.lr_at(self.version)

        # DeepSpeed's step expects gradients.
        if not self._has_gradients:
            self.version += 1
            return Metrics.of(grad_norm=0.0, lr=lr)

        # The step clips by itself ("gradient_clipping").
        for group in self.zero.param_groups:
            group["lr"] = lr
        self.engine.step()
        self.residence.changed()
        self._has_gradients = False

        # DeepSpeed skips the update on an overflow, and its norm is then meaningless.
        norm = float("inf")
        if not self.zero.overflow:
            norm = float(self.engine.get_global_grad_norm())
        if norm < float("inf"):
            self.version += 1
        return Metrics.of(grad_norm=norm, lr=lr)

    # --- access to the weights ---

    def _model(self) -> dict[str, Any]:
        """Return the model's parameters by canonical name, without adapters."""
        adapters = self._adapters.names if self._adapters is not None else ()
        return {name: values for name, values in self._named.items() if name not in adapters}

    def layout(self) -> WeightLayout:
        """Return each rank's boxes: a part of each parameter in stage 3, else everything."""
        world = self.context.layout.world
        params = {}
        for name in self._model():
            params[name] = Param(self._shapes[name], self._dtype)
        ranks = range(world)
        if self._sharded:
            shards = dict(zero3_layout(params, world, self._ties).shards())
        else:
            shards = {name: _everywhere(param.shape, ranks) for name, param in params.items()}
        for name, box, values in self._saved_buffers():
            params[name] = Param(box.shape, values.dtype)
            shards[name] = _everywhere(box.shape, ranks)
        return self._form.layout(WeightLayout.by_name(params, shards, ranks, self._ties))

    def named_shards(self) -> Iterator[tuple[str, Box, Shard]]:
        """Yield this rank's shards; with adapters a LazyShard, which merges them when read.

        A collective call with adapters.
        """
        yield from self._form.shards(self._stored_shards())

    def _stored_shards(self) -> Iterator[tuple[str, Box, Shard]]:
        """Yield this rank's shards of the parameters as the model runs with them."""
        adapters = self._whole_adapters()
        for name, box, values in self._held(self._model()):
            shard: Shard = values
            if self._adapters:
                shard = self._adapters.shard(name, box, values, adapters)
            yield name, box, shard
        yield from self._saved_buffers()

    def _held(self, names: Iterable[str]) -> Iterator[tuple[str, Box, torch.Tensor]]:
        """Yield views of this rank's stored shards of these parameters, adapters not merged."""
        for name in names:
            parameter = self._named[name]
            shape = self._shapes[name]
            if not self._sharded:
                yield name, Box.full(shape), parameter.detach()
                continue

            # Boxes beyond the parameter's end (padding) are empty and do not appear.
            shard = parameter.ds_tensor.detach()
            for box, offset in self._boxes(name, self.context.rank, shard.numel()):
                yield name, box, shard.narrow(0, offset, box.numel).view(box.shape)

    def _boxes(
        self,
        name: str,
        rank: int,
        length: int,
    ) -> Iterator[tuple[Box, int]]:
        """Return the (box, offset) pairs of a rank's flat shard in stage 3.

        length: elements of the shard; offset: where the box's elements begin in it.
        """
        parts = self._flat(name, rank * length, length)
        return ((box, offset) for _, _, box, offset in parts)

    def _flat(
        self,
        name: str,
        start: int,
        length: int,
    ) -> Iterator[tuple[str, tuple[int, ...], Box, int]]:
        """Return the boxes of a parameter's elements start..start + length, as flat_parts does."""
        shape = self._shapes[name]
        piece = (name, shape, Box.full(shape), 0)
        return flat_parts([piece], start, start + length)

    def _whole_adapters(self) -> dict[str, torch.Tensor]:
        """Return copies of the adapters' whole values. A collective call where there are any."""
        if self._adapters is None:
            return {}
        names = sorted(self._adapters.names)
        return {name: values.clone() for name, values in self._whole(names)}

    def full_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the whole canonical parameters, adapters merged, one after the other."""
        yield from self._form.whole(self._stored_parameters())

    def _stored_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the whole parameters as the model runs with them, adapters merged."""
        adapters = self._whole_adapters()
        for name, values in self._whole(self._model()):
            yield name, self._merged(name, values, adapters)
        for name, _, values in self._saved_buffers():
            yield name, values

    def _merged(
        self,
        name: str,
        whole: torch.Tensor,
        adapters: Mapping[str, torch.Tensor],
    ) -> torch.Tensor:
        """Return a whole parameter with its adapters merged, bit for bit as engines get it.

        Stage 3 merges box by box, as the ranks do for engines: a product of another shape may round
        differently.
        """
        if self._adapters is None or name not in self._adapters.of:
            return whole
        if not self._sharded:
            return self._adapters.merged(name, Box.full(whole.shape), whole, adapters)

        merged = whole.clone()
        length = self._named[name].ds_tensor.numel()
        for rank in range(self.context.layout.world):
            for box, _ in self._boxes(name, rank, length):
                part = whole[box.slices()]
                merged[box.slices()] = self._adapters.merged(name, box, part, adapters)
        return merged

    def _whole(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield whole stored values; in stage 3 they are gathered one by one, on all ranks."""
        if not self._sharded:
            yield from ((name, self._named[name].detach()) for name in names)
            return

        import deepspeed

        for name in names:
            parameter = self._named[name]
            with deepspeed.zero.GatheredParameters([parameter]):
                yield name, parameter.detach()

    # --- files ---

    def _state(self) -> Iterator[StatePart]:
        """Yield this rank's masters and moments, or the weights of a frozen role."""
        if self.optimizer_config is None:
            for name, box, values in self._held(self._named):
                yield StatePart(f"model.{name}", self._shapes[name], box, values)
            return

        for name in self._trained:
            for entry, start, values in self._kept(name, self._named[name]):
                for _, shape, box, offset in self._flat(name, start, values.numel()):
                    part = values.narrow(0, offset, box.numel)
                    yield StatePart(f"{entry}.{name}", shape, box, part)

    def _kept(
        self,
        name: str,
        parameter: Any,
    ) -> Iterator[tuple[str, int, torch.Tensor]]:
        """Yield this rank's optimizer state of a parameter: (entry, start, flat float32 values).

        start: the values' first element in the flattened parameter. DeepSpeed keeps one flat
        buffer per group of parameters, in which this parameter's part begins at `offset`.
        """
        if self._sharded:
            group, offset, length = self.zero.grad_position[self.zero.get_param_id(parameter)]
            flat = self.zero.fp32_partitioned_groups_flat[group]
            start = self.context.rank * length
        elif (mapping := parameter._hp_mapping) is not None:
            # Stages 1 and 2 map the model's weights (lp) to masters (hp: high precision).
            flat = self.zero.single_partition_of_fp32_groups[mapping.param_group_index]
            offset = mapping.hp_fragment_address.start
            length = mapping.hp_fragment_address.numel
            start = mapping.lp_fragment_address.start
        else:
            return  # all of it belongs to other ranks

        yield "model", start, flat.detach().narrow(0, offset, length)
        moments = self._moments(flat)
        for moment in MOMENTS:
            yield f"optimizer.{moment}", start, moments[moment].narrow(0, offset, length)

    def _moments(self, flat: torch.Tensor) -> dict[str, Any]:
        """Return AdamW's state of a flat buffer, which is made of zeros before the first step."""
        moments = self.zero.optimizer.state[flat]
        if not moments:
            # DeepSpeedCPUAdam counts steps in an int, torch's AdamW in a tensor.
            on_cpu = self.config.adam == "cpu"
            moments["step"] = 0 if on_cpu else torch.zeros((), device=flat.device)
            moments |= {moment: torch.zeros_like(flat.detach()) for moment in MOMENTS}
        return moments

    def save(self, folder: Path) -> Writing:
        """Write masters and moments, or a frozen role's weights. A collective call."""
        return save_state(self._state(), self.version, folder, self.context.rank)

    def load(self, folder: Path) -> None:
        """Restore the files of `save`, and set the model's weights from the masters.

        Raises CheckpointError when it cannot be read.
        """
        self.version = load_state(self._state(), folder, self.context.role)
        self.residence.changed()
        if self.optimizer_config is None:
            return

        # Adam corrects the bias of its moments by the number of steps.
        for moments in self.zero.optimizer.state.values():
            if self.config.adam == "cpu":
                moments["step"] = self.version
            else:
                moments["step"] = moments["step"].fill_(float(self.version))

        if self._sharded:
            self._weights_from_masters()
        else:
            weights = [
                StatePart(f"model.{name}", self._shapes[name], box, values)
                for name, box, values in self._held(self._trained)
            ]
            load_state(weights, folder, self.context.role, complete=False)

    def _weights_from_masters(self) -> None:
        """Copy the masters of stage 3 to the weights: this rank's shards, and those kept whole."""
        for parameter in (self._named[name] for name in self._trained):
            group, offset, length = self.zero.grad_position[self.zero.get_param_id(parameter)]
            flat = self.zero.fp32_partitioned_groups_flat[group].detach()
            masters = flat.narrow(0, offset, length)
            parameter.ds_tensor.detach()[:length].copy_(masters)

        # Parameters below `persist_elements` stay gathered: gather them anew from the shards.
        if persistent := self.zero.persistent_parameters:
            persistent[0].partition(persistent)
            persistent[0].all_gather(persistent)

    def export_hf(self, folder: Path, dtype: torch.dtype | None = None) -> None:
        """Write config.json and model.safetensors on rank 0, and adapters to folder/adapter.

        A collective call.
        """
        from hybridflow.kit.huggingface.export import export_role

        hf = self.module.hf
        generation = getattr(hf, "generation_config", None)
        export_adapters = None
        if self._adapters:
            adapters = self._whole_adapters()
            export_adapters = partial(self._adapters.export, adapters, folder / "adapter")
        export_role(
            self.full_parameters(),
            type(hf),
            self._hf_config,
            generation,
            folder,
            dtype or self._dtype,
            self.context,
            export_adapters,
        )

    # --- memory ---

    def offload(self, parts: Sequence[str] = PARTS) -> None:
        """Move parts to the host; those that DeepSpeed keeps there stay."""
        if self.context.device.type != "cpu":
            self._release_gathered()
            self.residence.offload(parts)

    def onload(self, parts: Sequence[str] = PARTS) -> None:
        """Move parts back to the device."""
        if self.context.device.type != "cpu":
            self.residence.onload(parts)

    def _release_gathered(self) -> None:
        """Free the whole parameters that stage 3 has prefetched."""
        if self._sharded:
            self.zero.empty_partition_cache()

    def _weight_tensors(self) -> Iterator[torch.Tensor]:
        """Yield buffers and weights: in stage 3 this rank's parts, and parameters kept whole."""
        for parameter in self._named.values():
            yield parameter.data
            if self._sharded:
                yield parameter.ds_tensor
        yield from self.module.buffers()

    def _optimizer_tensors(self) -> Iterator[torch.Tensor]:
        """Yield masters and moments."""
        if self.optimizer_config is None:
            return
        # The flat buffers of each group of parameters.
        if self._sharded:
            yield from self.zero.fp32_partitioned_groups_flat
        else:
            yield from self.zero.single_partition_of_fp32_groups
        for moments in self.zero.optimizer.state.values():
            yield from (value for value in moments.values() if isinstance(value, torch.Tensor))

    def _gradient_buffers(self) -> Iterator[torch.Tensor]:
        """Yield DeepSpeed's buffers of gradients, whose values are not needed between updates."""
        if self.optimizer_config is None:
            return
        for bucket in self.zero.ipg_buckets.values():
            buffers = bucket.buffer if isinstance(bucket.buffer, list) else [bucket.buffer]
            yield from (buffer for buffer in buffers if buffer is not None)
        if self._sharded:
            yield self.zero.grad_partitions_flat_buffer


class _OneByOne(torch.nn.Module):
    """Allocates a module's parameters one by one while DeepSpeed iterates over them to cut them."""

    def __init__(self, module: torch.nn.Module, device: torch.device, dtype: torch.dtype):
        super().__init__()
        self._places: dict[torch.nn.Parameter, list[tuple[torch.nn.Module, str]]] = {}
        self._device = device
        self._dtype = dtype
        for owner in module.modules():
            for key, parameter in owner._parameters.items():
                if parameter is not None:
                    self._places.setdefault(parameter, []).append((owner, key))

    def parameters(self, recurse: bool = True) -> Iterator[torch.nn.Parameter]:
        """Yield allocated parameters, which replace the module's parameters on meta."""
        for parameter, places in self._places.items():
            # Undefined values: those of the folder are read after the cut.
            memory = torch.empty(parameter.shape, device=self._device, dtype=self._dtype)
            real = torch.nn.Parameter(memory, requires_grad=parameter.requires_grad)
            # Tied names keep one parameter.
            for owner, key in places:
                owner._parameters[key] = real
            yield real


def _import_deepspeed(device: torch.device) -> Any:
    """Return the package, set up for the present process groups and this device."""
    # Variables that DeepSpeed reads to choose its accelerator and device.
    if device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("LOCAL_RANK", str(device.index or 0))
    import deepspeed
    import deepspeed.ops
    from deepspeed.utils import groups

    # An earlier run in this process may have left a process group that is destroyed by now.
    if groups._WORLD_GROUP is not None and not _group_exists(groups._WORLD_GROUP):
        groups._release_process_group_references()

    # Otherwise a collective over shared memory is compiled, for minutes.
    if device.type == "cpu":
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(
        dist_backend="gloo" if device.type == "cpu" else "nccl",
        auto_mpi_discovery=False,
        verbose=False,
    )
    return deepspeed


def _group_exists(group: Any) -> bool:
    """Return whether torch.distributed still knows a process group."""
    try:
        torch.distributed.get_process_group_ranks(group)
    except (KeyError, ValueError, RuntimeError):
        return False
    return True
