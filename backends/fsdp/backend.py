"""FSDP2 (torch.distributed.fsdp.fully_shard) on Hugging Face models, with tensor parallelism.

A single rank in float32 without offload runs the plain module: the same numbers, without FSDP's
hooks. Checking a config imports this module, so slow imports are made where they are used.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hybridflow.backends.fsdp.fit import why_not_cut
from hybridflow.backends.fsdp.gather import ShardedParameter, whole_parameters
from hybridflow.core.contracts.training import (
    PARTS,
    LossFunction,
    MicroBatch,
    TrainingBackend,
    Writing,
)
from hybridflow.core.values.metrics import Metrics
from hybridflow.core.values.weights import Box, Param, Shard, WeightLayout
from hybridflow.kit.checkpoint import StatePart, load_state, save_state
from hybridflow.kit.offload import Residence

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.fsdp import FSDPModule

    from hybridflow.backends.fsdp.optimizer import ShardedAdamW
    from hybridflow.kit.huggingface.lora import Adapters
    from hybridflow.kit.huggingface.modeling import RoleModel
    from hybridflow.kit.huggingface.saved import SavedForm


class FSDPBackend(TrainingBackend):
    """A plugin of kind "training_backend", name "fsdp"."""

    module: RoleModel
    """The role's model, sharded in place."""
    parameters: dict[str, torch.nn.Parameter]
    """All parameters, adapters too, by canonical name; DTensors under FSDP."""
    optimizer: ShardedAdamW | None
    """The optimizer of this rank's shards; None for a frozen role."""

    residence: Residence
    """Moves this rank's weights and optimizer state between device and host."""

    _hf_config: Any
    """The Hugging Face config of the model, for exports."""
    _adapters: Adapters | None
    """The low-rank adapters; None without LoRA."""
    _trained: set[str]
    """Names of the parameters that have gradients."""
    _dtype: torch.dtype
    """The dtype in which the model is built; a few parameters may be wider."""
    _form: SavedForm
    """How the model's parameters make up the canonical ones."""
    _ties: dict[str, str]
    """Tied parameter -> the one that it is tied to."""
    _gathered: list[FSDPModule]
    """Modules that FSDP gathers one by one, the root last; none for a plain module."""
    _boxes: dict[str, dict[int, Box]]
    """Name -> rank -> the box of the parameter that it holds."""
    _replica: list[int]
    """The ranks of this rank's HSDP replica, in order."""
    _replica_group: ProcessGroup | None
    """Their process group; None for the default one."""

    @classmethod
    def problems(cls, config, layout, model) -> list[str]:
        """Return problems: of the model; replicas that do not divide dp; of tp, and of LoRA."""
        from hybridflow.kit.huggingface.checks import adapter_problems, meta_model, model_problems

        problems = model_problems(model)
        if not problems:
            problems = why_not_cut(meta_model(model), layout.tp)
            problems += adapter_problems(model, config.lora)
        if layout.dp % config.replicas:
            problems.append(
                f"backend.replicas must divide dp, got replicas {config.replicas} and "
                f"dp {layout.dp}"
            )
        if config.lora is not None and layout.tp > 1:
            problems.append(
                f"backend fsdp: lora needs tp 1, got {layout}: "
                "set layout.tp = 1, or leave backend.lora out"
            )
        return problems

    def build(self) -> None:
        """Build the model on meta, shard it, read this rank's shards, and make the optimizer."""
        self._build_module()
        self._shard_module()
        self._read_weights()
        self._build_optimizer()
        self.residence = Residence(
            self.context.device,
            {"weights": self._weight_tensors, "optimizer": self._optimizer_tensors},
        )

    def _build_module(self) -> None:
        """Build the model on meta.

        With adapters it is built whole, since peft puts its layers into it.
        """
        from hybridflow.kit.huggingface.loading import empty_model
        from hybridflow.kit.huggingface.modeling import RoleModel, build_hf_model, ties_of
        from hybridflow.kit.huggingface.saved import SavedForm

        config = self.config
        trained = self.optimizer_config is not None
        lora = config.lora if trained else None

        # Weights that an optimizer changes are float32 masters; frozen ones may be bfloat16.
        masters = trained and lora is None
        wide = masters or config.precision != "bf16"
        self._dtype = torch.float32 if wide else torch.bfloat16
        build = empty_model if lora is None else build_hf_model
        hf, self._hf_config = build(self.model_spec, self._dtype)
        self.packing, _ = config.packing(self._hf_config.to_dict())
        self._form = SavedForm.of(hf)
        self.module = RoleModel(hf, self.model_spec.kind)
        self.module.requires_grad_(trained)

        # With adapters the model itself is frozen again.
        self._adapters = None
        if lora is not None:
            from hybridflow.kit.huggingface.lora import Adapters

            self._adapters = Adapters(self.module, lora, self.model_spec.init_seed)

        if config.activation_checkpointing and trained:
            hf.gradient_checkpointing_enable({"use_reentrant": False})
        self.module.train(trained)

        # Sharding replaces the parameters, so ties are read before.
        self._ties = ties_of(self.module)

    def _shard_module(self) -> None:
        """Cut the model over tp and dp on its device, and record every rank's boxes."""
        from hybridflow.backends.fsdp import sharding
        from hybridflow.kit.huggingface.loading import allocate, move_buffers

        context = self.context
        config = self.config
        layout = context.layout

        # Parameters have no memory yet.
        move_buffers(self.module, context.device)

        # A single rank in float32 without offload needs no FSDP.
        self._gathered = []
        if layout.world > 1 or config.precision == "bf16" or config.cpu_offload:
            mesh = sharding.device_mesh(layout, config.replicas, context.device)
            if layout.tp > 1:
                sharding.apply_tensor_parallel(self.module, mesh["tp"])
            self._gathered = sharding.apply_fsdp(self.module, mesh, config)
        home = torch.device("cpu") if config.cpu_offload else context.device
        allocate(self.module, home)

        # Models without a list of layers are not compiled.
        if config.compile:
            for layer in getattr(self.module.hf.base_model, "layers", []):
                layer.compile()

        # FSDP has put other parameters into the module, so they are collected now.
        self.parameters = dict(self._canonical())
        self._trained = set()
        self._boxes = {}
        for name, parameter in self.parameters.items():
            self._boxes[name] = sharding.boxes_of(parameter, layout, config.replicas)
            if parameter.requires_grad:
                self._trained.add(name)
        self._replica, self._replica_group = sharding.replica_group(
            layout,
            config.replicas,
            context.rank,
        )

    def _read_weights(self) -> None:
        """Read this rank's shards from the model's folder, or draw them."""
        from hybridflow.kit.huggingface.loading import Part, fill

        if self._adapters is not None:
            return

        def parts() -> Iterator[Part]:
            for name, box, shard in self._form.shards(self._stored_shards()):
                assert isinstance(shard, torch.Tensor)
                yield name, box, shard

        fill(parts(), self.model_spec, self._dtype)

    def _build_optimizer(self) -> None:
        """Make AdamW over this rank's shards of parameters with gradients, for a trained role."""
        from hybridflow.backends.fsdp import sharding
        from hybridflow.backends.fsdp.optimizer import ShardedAdamW

        self.optimizer = None
        if self.optimizer_config is None:
            return
        layout = self.context.layout
        learnt = {}
        copies = {}
        for name, parameter in self.parameters.items():
            if name in self._trained:
                learnt[name] = parameter
                copies[name] = sharding.copies(parameter, layout, self.config.replicas)
        self.optimizer = ShardedAdamW(learnt, copies, self.optimizer_config)

    def _canonical(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Yield the parameters under the names of the exported safetensors.

        Tied parameters come once; adapters come too.
        """
        from hybridflow.kit.huggingface.modeling import canonical

        for name, parameter in self.module.named_parameters():
            yield canonical(name), parameter

    def _buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the buffers of the checkpoint by canonical name; they are whole on each rank.

        No step changes them. Such is the bias by which a router chooses its experts (deepseek_v3,
        glm4_moe).
        """
        from hybridflow.kit.huggingface.modeling import canonical, saved_buffers

        for name, values in saved_buffers(self.module):
            yield canonical(name), values

    def _model(self) -> dict[str, torch.nn.Parameter]:
        """Return the parameters without adapters."""
        adapters = self._adapters.names if self._adapters is not None else ()
        return {name: p for name, p in self.parameters.items() if name not in adapters}

    def _local(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return this rank's shard, without gradients."""
        from hybridflow.backends.fsdp.sharding import local

        return local(parameter.detach())

    # --- compute ---

    def forward(
        self,
        micros: Sequence[MicroBatch],
        needs: Sequence[str],
        temperature: float = 1.0,
    ) -> list[dict[str, torch.Tensor]]:
        """Compute the outputs, then free the weights that FSDP gathered for them."""
        with torch.no_grad():
            outputs = [self.module(micro, needs, temperature) for micro in micros]
        self._reshard()
        return outputs

    def _reshard(self) -> None:
        """Free gathered weights: without a backward pass they would stay, and become outdated."""
        for module in self._gathered:
            module.reshard()

    def forward_backward(
        self,
        micros: Sequence[MicroBatch],
        needs: Sequence[str],
        loss: LossFunction,
        temperature: float = 1.0,
    ) -> None:
        """Add up gradients over the micro-batches, each cut to this rank's shard at once."""
        for index, micro in enumerate(micros):
            self._set_last(index == len(micros) - 1)
            outputs: Mapping[str, torch.Tensor] = self.module(micro, needs, temperature)
            share = loss(index, outputs)

            # FSDP averages gradients over dp, and the contract wants their sum.
            (share * self.context.layout.dp).backward()

    def _set_last(self, last: bool) -> None:
        """Sum gradients over HSDP's replicas once, after the last micro-batch.

        Inside a replica every micro-batch reduce-scatters them, since otherwise every rank would
        hold the gradients of the whole model. Before the last micro-batch, weights stay gathered if
        reshard_after_forward is false.
        """
        # The root passes the settings on to the modules below it, the second where it recurses.
        if self._gathered:
            root = self._gathered[-1]
            if self.config.replicas > 1:
                root.set_requires_all_reduce(last)
            every = not self.config.reshard_after_forward
            root.set_reshard_after_backward(last, recurse=every)

    def optim_step(self) -> Metrics:
        """Clip by the global norm as torch.nn.utils.clip_grad_norm_ does, and step AdamW."""
        assert self.optimizer is not None and self.optimizer_config is not None, (
            "a frozen role cannot be updated"
        )
        config = self.optimizer_config
        lr = config.lr_at(self.version)
        norm = self.optimizer.grad_norm(self.context.layout.world, self.context.device)

        # There is no step with gradients that are NaN or infinite
        if norm < float("inf"):
            clip = config.max_grad_norm and norm > config.max_grad_norm
            scale = 1.0
            if clip:
                scale = config.max_grad_norm / (norm + 1e-6)
            self.optimizer.step(lr, scale)
            self.residence.changed()
            self.version += 1
        else:
            self.optimizer.clear()
        return Metrics.of(grad_norm=norm, lr=lr)

    # --- weights ---

    def layout(self) -> WeightLayout:
        """Return one box per rank and parameter, or none where the rank's part is empty."""
        held: dict[int, dict[str, tuple[Box, ...]]] = {}
        for rank in range(self.context.layout.world):
            held[rank] = {}
        params = {}
        for name, parameter in self._model().items():
            params[name] = Param(tuple(parameter.shape), parameter.dtype)
            for rank, box in self._boxes[name].items():
                held[rank][name] = (box,) if box.numel else ()
        for name, values in self._buffers():
            params[name] = Param(tuple(values.shape), values.dtype)
            for boxes in held.values():
                boxes[name] = (Box.full(values.shape),)
        return self._form.layout(WeightLayout(params, held, self._ties))

    def named_shards(self) -> Iterator[tuple[str, Box, Shard]]:
        """Yield this rank's shards; adapted ones are LazyShards that merge when they are read."""
        yield from self._form.shards(self._stored_shards())

    def _stored_shards(self) -> Iterator[tuple[str, Box, Shard]]:
        """Yield this rank's shards of the parameters as the model runs with them."""
        adapters = self._whole_adapters()
        for name, parameter in self._model().items():
            box = self._boxes[name][self.context.rank]
            local = self._local(parameter)
            # A rank's part of a small parameter may be empty.
            if not box.numel:
                continue
            if self._adapters:
                yield name, box, self._adapters.shard(name, box, local, adapters)
            else:
                yield name, box, local
        for name, values in self._buffers():
            yield name, Box.full(values.shape), values

    def _whole_adapters(self) -> dict[str, torch.Tensor]:
        """Return the adapters' whole values on every rank; collective where there are adapters."""
        if self._adapters is None:
            return {}
        names = self._adapters.names
        parameters = {name: p for name, p in self.parameters.items() if name in names}

        # A gathered tensor is valid only until the next one, hence the clones.
        return {name: whole.clone() for name, whole in self._gather(parameters, {})}

    @torch.no_grad()
    def adopt(self, name: str, storage: torch.Tensor) -> bool:
        """Refuse under FSDP, which owns its storage, and for adapted weights (merged for engines).

        The optimizer follows the parameter into the new storage.
        """
        parameter = self.parameters.get(name)
        if parameter is None or self._gathered:
            return False
        if self._adapters is not None and name in self._adapters.of:
            return False

        # The storage must fit the parameter as it is.
        ours = (parameter.dtype, parameter.shape, parameter.device)
        theirs = (storage.dtype, storage.shape, storage.device)
        if ours != theirs:
            return False

        storage.copy_(parameter)
        parameter.data = storage
        if self.optimizer is not None:
            self.optimizer.relink({name: parameter})
        return True

    def full_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield whole parameters with adapters merged, gathered over one HSDP replica."""
        gathered = self._gather(self._model(), self._whole_adapters())
        yield from self._form.whole(chain(gathered, self._buffers()))

    def _gather(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        adapters: Mapping[str, torch.Tensor],
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield whole parameters, with adapters merged shard by shard.

        Merged bits depend on the box, so they are those that `named_shards` gives.
        """
        rank = self.context.rank
        device = self.context.device

        def pieces() -> Iterator[ShardedParameter]:
            for name, parameter in parameters.items():
                boxes = self._boxes[name]
                local = self._local(parameter)
                if adapters and self._adapters is not None:
                    local = self._adapters.merged(name, boxes[rank], local, adapters)
                yield ShardedParameter(name, tuple(parameter.shape), local, boxes)

        # A single rank has whole parameters already.
        if self.context.layout.world == 1:
            for piece in pieces():
                yield piece.name, piece.local.to(device)
        else:
            # Each HSDP replica holds all weights, so its ranks gather among themselves.
            yield from whole_parameters(
                pieces(),
                self._replica,
                self._replica_group,
                device,
            )

    # --- files ---

    def _state(self) -> Iterator[StatePart]:
        """Yield this rank's weights and moments for a checkpoint.

        Under LoRA only trained parameters are saved: the others are in the model's own folder.
        """
        rank = self.context.rank
        moments = self.optimizer.moments() if self.optimizer is not None else {}
        for name, parameter in self.parameters.items():
            if self._adapters is not None and name not in self._trained:
                continue
            shape = tuple(parameter.shape)
            box = self._boxes[name][rank]
            yield StatePart(f"model.{name}", shape, box, self._local(parameter))
            # Parameters whose part on this rank is empty have no moments.
            for moment, values in moments.get(name, {}).items():
                yield StatePart(f"optimizer.{moment}.{name}", shape, box, values)

    def save(self, folder: Path) -> Writing:
        """Write the shards (kit/checkpoint.py)."""
        return save_state(
            self._state(),
            self.version,
            folder,
            self.context.rank,
        )

    def load(self, folder: Path) -> None:
        """Read the shards of this layout from files of any layout or backend."""
        self.version = load_state(self._state(), folder, self.context.role)
        self.residence.changed()
        if self.optimizer is not None:
            self.optimizer.set_step(self.version)

    def export_hf(self, folder: Path, dtype: torch.dtype | None = None) -> None:
        """Write the model with its adapters merged, and peft's files of them in adapter/."""
        from hybridflow.kit.huggingface.export import export_role

        hf = self.module.hf
        computed = torch.bfloat16 if self.config.precision == "bf16" else torch.float32
        generation = getattr(hf, "generation_config", None)

        # Gathering adapters is collective, so it happens here and not on rank 0 alone.
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
            dtype or computed,
            self.context,
            export_adapters,
        )

    # --- memory ---

    def offload(self, parts: Sequence[str] = PARTS) -> None:
        """Move parts to the host; a role with cpu_offload is there already."""
        if self._moves:
            self.residence.offload(parts)

    def onload(self, parts: Sequence[str] = PARTS) -> None:
        """Move parts back to the device."""
        if self._moves:
            self.residence.onload(parts)

    @property
    def _moves(self) -> bool:
        return self.context.device.type != "cpu" and not self.config.cpu_offload

    def _weight_tensors(self) -> Iterator[torch.Tensor]:
        """Yield this rank's shards and the buffers."""
        for parameter in self.parameters.values():
            yield self._local(parameter)
        yield from self.module.buffers()

    def _optimizer_tensors(self) -> Iterator[torch.Tensor]:
        """Yield the optimizer's state, which exists from the first step on."""
        if self.optimizer is not None:
            yield from self.optimizer.state()
