"""Megatron-Core's tensor, pipeline and sequence parallelism with its distributed optimizer.

Process groups are the role's own (groups.py), so roles of different layouts live in one process. On a CPU every call
into Megatron goes through `on_cpu` (cpu.py).

This module is imported to check a config, so what takes seconds to import is imported where it is used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from hybridflow.backends.megatron.cpu import no_warnings_of_what_is_meant, on_cpu
from hybridflow.core.contracts.training import LossFunction, MicroBatch, TrainingBackend
from hybridflow.core.values.metrics import Metrics
from hybridflow.core.values.weights import Box, WeightLayout
from hybridflow.core.workers.micro_batch import dummy_micro_batch
from hybridflow.kit.checkpoint import MOMENTS, StatePart, flat_parts, load_state, save_state
from hybridflow.kit.huggingface.shapes import shape_of

Finish = Callable[[int, dict[str, torch.Tensor]], torch.Tensor]
"""(number of the micro-batch, outputs) -> a scalar; called on the last stage."""
Input = tuple[torch.Tensor, torch.Tensor, Any]
"""(ids [B, S], where each row starts in their flat order [rows], what says which rows are packed, or None)."""


class MegatronBackend(TrainingBackend):
    """A plugin of kind "training_backend", name "megatron"."""

    @classmethod
    def problems(cls, config, layout, kind) -> list[str]:
        found = []
        if config.virtual_stages > 1 and layout.pp == 1:
            found.append(f"backend.virtual_stages {config.virtual_stages} needs pp > 1, got pp 1")
        if config.sequence_parallel and layout.tp == 1:
            found.append("backend.sequence_parallel needs tp > 1, got tp 1")
        return found

    def build(self) -> None:
        """Raises ModelError for a model that Megatron does not have, or whose sizes the layout does not divide."""
        if not dist.is_initialized():
            raise RuntimeError(
                "backend megatron needs torch.distributed, which every runtime sets up"
            )
        no_warnings_of_what_is_meant()
        with on_cpu(self.context.device):
            self._build()

    def _build(self) -> None:
        from hybridflow.backends.megatron import modules, weights
        from hybridflow.backends.megatron.groups import group_collection
        from hybridflow.kit.huggingface.modeling import hf_config

        context, config, spec = self.context, self.config, self.model_spec
        self._hf_config = hf_config(spec)
        self._megatron = modules.transformer_config(
            self._hf_config, config, context.layout, context.device
        )
        self._dtype = self._megatron.params_dtype
        shape = shape_of(self._hf_config.to_dict())
        self._shape = weights.RoleShape(
            shape, spec.kind, context.layout, config.virtual_stages, config.vocab_multiple
        )
        self._groups = group_collection(context)
        _prepare_random(context.seed)
        self.chunks = modules.build_chunks(
            self._hf_config,
            self._megatron,
            spec.kind,
            context.layout,
            self._groups,
            self._shape.padded_vocab,
        )
        for chunk in self.chunks:
            chunk.to(context.device, self._dtype)
            for parameter in chunk.parameters():
                parameter.requires_grad_(self.optimizer_config is not None)
                parameter.data.zero_()  # padding stays so
        self._layout = self._shape.layout_of(self._dtype)
        self._pieces = list(weights.local_pieces(self.chunks, self._shape, context.coords.tp))
        self._models: list[Any] = list(self.chunks)
        self.optimizer: Any = None
        weights.fill(self.named_shards(), spec)
        if self.optimizer_config is not None:
            self._make_optimizer()
            if self._dtype != torch.float32:
                masters = (
                    (p.entry.removeprefix("model."), p.box, p.values)
                    for p in self._state()
                    if p.entry.startswith("model.")
                )
                weights.fill(masters, spec)

    def _make_optimizer(self) -> None:
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        ddp = DistributedDataParallelConfig(
            use_distributed_optimizer=True, grad_reduce_in_fp32=True, overlap_grad_reduce=False, overlap_param_gather=False,
        )  # fmt: skip
        self._models = [
            DistributedDataParallel(
                self._megatron, ddp, chunk, disable_bucketing=at > 0, pg_collection=self._groups
            )
            for at, chunk in enumerate(self.chunks)
        ]
        wanted = self.optimizer_config
        assert wanted is not None
        settings = OptimizerConfig(
            optimizer="adam", lr=wanted.lr, weight_decay=wanted.weight_decay, adam_beta1=wanted.betas[0],
            adam_beta2=wanted.betas[1], adam_eps=wanted.eps, clip_grad=wanted.max_grad_norm, bf16=self._dtype == torch.bfloat16,
            params_dtype=self._dtype, use_distributed_optimizer=True,
        )  # fmt: skip
        self.optimizer = get_megatron_optimizer(
            settings, self._models, use_gloo_process_groups=False, pg_collection=self._groups
        )
        self._clear()

    def _optimizers(self) -> list[Any]:
        """The distributed optimizers that hold parameters."""
        return [
            o
            for o in getattr(self.optimizer, "chained_optimizers", [self.optimizer])
            if not o.is_stub_optimizer
        ]

    # Compute
    def forward(
        self, micros: Sequence[MicroBatch], needs: Sequence[str], temperature: float = 1.0
    ) -> list[dict[str, torch.Tensor]]:
        """On other stages than the last, an empty dict per micro-batch."""
        found: list[dict[str, torch.Tensor]] = [{} for _ in micros]

        def keep(at: int, outputs: dict[str, torch.Tensor]) -> torch.Tensor:
            found[at] = outputs
            return next(iter(outputs.values())).sum()

        with torch.no_grad():
            self._run(micros, needs, temperature, keep, forward_only=True)
        return found

    def forward_backward(
        self,
        micros: Sequence[MicroBatch],
        needs: Sequence[str],
        loss: LossFunction,
        temperature: float = 1.0,
    ) -> None:
        self._run(micros, needs, temperature, loss, forward_only=False)

    def _run(
        self, micros: Sequence[MicroBatch], needs: Sequence[str], temperature: float, finish: Finish, forward_only: bool
    ) -> None:  # fmt: skip
        """Megatron's schedule over the micro-batches."""
        from hybridflow.backends.megatron.outputs import role_outputs

        layout, count = self.context.layout, len(micros)
        padded = list(micros)
        if self.config.virtual_stages > 1:  # the interleaved schedule wants a multiple of pp
            topk = micros[0].topk_ids
            width = 0 if topk is None else topk.shape[-1]
            padded += [
                dummy_micro_batch(self.context.device, width) for _ in range(-count % layout.pp)
            ]
        inputs = [self._input(micro) for micro in padded]
        if (
            self.config.virtual_stages > 1
        ):  # and equal shapes: it mistakes one neighbour's for the other's
            inputs = _alike(inputs)

        def step(numbers: Iterator[int], model: Any) -> tuple[torch.Tensor, Any]:
            at = next(numbers)
            micro = padded[at]
            ids, starts, packed = inputs[at]
            hidden = model(
                input_ids=ids, position_ids=None, attention_mask=None, packed_seq_params=packed
            )
            chunk = getattr(model, "module", model)

            def end(hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
                outputs = role_outputs(
                    chunk, hidden, micro, starts, needs, temperature, self._shape.shape.vocab
                )
                if at < count:
                    value = finish(at, outputs)
                else:
                    value = sum(
                        (o.sum() * 0.0 for o in outputs.values()),
                        hidden.new_zeros((), dtype=torch.float32),
                    )
                return value, torch.zeros((), dtype=torch.int), None

            return hidden, end

        with on_cpu(self.context.device):
            self._schedule(step, len(padded), inputs[0][0].shape, forward_only)

    def _schedule(
        self, step: Callable[..., Any], count: int, shape: Sequence[int], forward_only: bool
    ) -> None:
        """shape: [B, S] of the micro-batches, used where they are alike."""
        from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
        from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

        virtual = self.config.virtual_stages if self.config.virtual_stages > 1 else None
        many = len(self._models) > 1
        run = get_forward_backward_func(self.context.layout.pp, virtual)
        more = (
            {"p2p_communicator": P2PCommunicator(self._groups.pp, self._megatron)}
            if self.context.layout.pp > 1
            else {}
        )
        numbers = [iter(range(count)) for _ in self._models]
        run(
            forward_step_func=step, data_iterator=numbers if many else numbers[0],
            model=self._models if many else self._models[0], num_microbatches=count, seq_length=shape[1],
            micro_batch_size=shape[0], forward_only=forward_only, pg_collection=self._groups, **more,
        )  # fmt: skip

    def _input(self, micro: MicroBatch) -> Input:
        tp = self.context.layout.tp if self._megatron.sequence_parallel else 1
        ids = micro.ids
        if not self.config.packing:
            if lacking := -ids.shape[1] % tp:
                ids = F.pad(ids, (0, lacking))
            return ids, torch.arange(len(ids)) * ids.shape[1], None
        lengths = micro.prompt_lengths + micro.response_lengths
        real = torch.arange(ids.shape[1])[None] < lengths[:, None]
        flat = ids[real.to(ids.device)]
        starts = lengths.cumsum(0) - lengths
        packed_ids, packed = _packed(flat, lengths.tolist(), len(flat) + -len(flat) % tp)
        return packed_ids, starts, packed

    def optim_step(self) -> Metrics:
        from megatron.core.distributed import finalize_model_grads
        from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

        wanted = self.optimizer_config
        assert wanted is not None, "a frozen role cannot be updated"
        lr = wanted.lr_at(self.version)
        with on_cpu(self.context.device), torch.no_grad():
            finalize_model_grads(self._models, None, pg_collection=self._groups)
            self.optimizer.prepare_grads()
            norm = float(self.optimizer.get_grad_norm())
            if math.isfinite(norm):
                for optimizer in self._optimizers():
                    for group in optimizer.param_groups:
                        group["lr"], group["weight_decay"] = lr, wanted.weight_decay
                    if wanted.max_grad_norm:
                        clip_grad_by_total_norm_fp32(
                            optimizer.get_parameters(), wanted.max_grad_norm, norm
                        )
                self.optimizer.step_with_ready_grads()
                self.version += 1
            self._clear()
        return Metrics.of(grad_norm=norm, lr=lr)

    def _clear(self) -> None:
        for model in self._models:
            model.zero_grad_buffer()
        self.optimizer.zero_grad()

    # Weights
    def layout(self) -> WeightLayout:
        return self._layout

    def named_shards(self) -> Iterator[tuple[str, Box, torch.Tensor]]:
        for parameter, pieces in self._pieces:
            flat = parameter.detach().view(-1)
            for name, _, box, place in pieces:
                if box.numel:
                    yield name, box, flat.narrow(0, place, box.numel).view(box.shape)

    def full_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        held = self._layout.shards()
        mine: dict[str, list[tuple[Box, torch.Tensor]]] = {}
        for name, box, values in self.named_shards():
            mine.setdefault(name, []).append((box, values))
        for name, param in self._layout.params.items():
            whole = torch.zeros(param.shape, dtype=param.dtype, device=self.context.device)
            if self.context.layout.world == 1:
                for box, values in mine[name]:
                    whole[box.slices()] = values
                yield name, whole
                continue
            for box, rank in _owners(held[name]).items():
                values = whole[box.slices()].contiguous()
                if rank == self.context.rank:
                    values = next(v for b, v in mine[name] if b == box).contiguous()
                dist.broadcast(values, src=rank)
                whole[box.slices()] = values
            yield name, whole

    # Files
    def _state(self) -> Iterator[StatePart]:
        """Masters and moments that this rank has; of a frozen role the weights."""
        shapes = {name: param.shape for name, param in self._layout.params.items()}
        if self.optimizer is None:
            for name, box, values in self.named_shards():
                yield StatePart(f"model.{name}", shapes[name], box, values)
            return
        masters = {parameter: kept for o in self._optimizers() for parameter, kept in _masters(o)}
        for parameter, pieces in self._pieces:
            if parameter not in masters:  # other dp ranks have all of it
                continue
            start, master, moments = masters[parameter]
            for entry, values in (
                ("model", master),
                *((f"optimizer.{m}", moments[m]) for m in MOMENTS),
            ):
                places = [p for p in pieces if p[2].numel]
                for name, shape, box, at in flat_parts(places, start, start + values.numel()):
                    yield StatePart(
                        f"{entry}.{name}", shape, box, values.view(-1).narrow(0, at, box.numel)
                    )

    def save(self, folder: Path) -> None:
        save_state(self._state(), self.version, folder, self.context.rank)

    def load(self, folder: Path) -> None:
        self.version = load_state(self._state(), folder, self.context.role)
        if self.optimizer is None:
            return
        for optimizer in self._optimizers():
            for _, (_, _, moments) in _masters(optimizer):
                moments["step"].fill_(float(self.version))
        load_state(
            (StatePart(f"model.{n}", self._layout.params[n].shape, b, v) for n, b, v in self.named_shards()), folder,
            self.context.role,
        )  # fmt: skip

    def export_hf(self, folder: Path) -> None:
        from transformers import (
            AutoModelForCausalLM,
            AutoModelForSequenceClassification,
            GenerationConfig,
        )

        from hybridflow.kit.huggingface.export import export_role

        policy = self.model_spec.kind == "policy"
        auto: Any = AutoModelForCausalLM if policy else AutoModelForSequenceClassification
        hf = auto._model_mapping[type(self._hf_config)]
        generation = GenerationConfig.from_model_config(self._hf_config) if policy else None
        export_role(
            self.full_parameters(),
            hf,
            self._hf_config,
            generation,
            folder,
            self._dtype,
            self.context,
        )

    # Memory
    def offload(self) -> None:
        if self.context.device.type == "cuda":
            self._move("cpu")
            torch.cuda.empty_cache()

    def onload(self) -> None:
        if self.context.device.type == "cuda":
            self._move(self.context.device)

    def _move(self, device: Any) -> None:
        """Weights, and of a trained role gradients, masters and moments."""
        if self.optimizer is None:
            for chunk in self.chunks:
                chunk.to(device)
            return
        for model in self._models:
            for buffer in (*model.buffers, *model.expert_parallel_buffers):
                (buffer.offload_to_cpu if str(device) == "cpu" else buffer.reload_from_cpu)()
        for optimizer in self._optimizers():
            for _, (_, master, moments) in _masters(optimizer):
                if self._dtype != torch.float32:
                    master.data = master.data.to(device)
                for name in MOMENTS:
                    moments[name].data = moments[name].data.to(device)


def _packed(flat: torch.Tensor, rows: list[int], total: int) -> tuple[torch.Tensor, Any]:
    """([1, total] ids, what says which rows are packed); what is added is a row of its own."""
    from megatron.core.packed_seq_params import PackedSeqParams

    if lacking := total - len(flat):
        flat, rows = F.pad(flat, (0, lacking)), [*rows, lacking]
    ends = torch.tensor([0, *rows], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(flat.device)
    packed = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=ends,
        cu_seqlens_kv=ends,
        max_seqlen_q=max(rows),
        max_seqlen_kv=max(rows),
    )
    packed.lengths = rows
    return flat[None], packed


def _alike(inputs: Sequence[Input]) -> list[Input]:
    """The same with rows and tokens added so that all have one shape."""
    rows, width = (max(ids.shape[dim] for ids, _, _ in inputs) for dim in (0, 1))
    found: list[Input] = []
    for ids, starts, packed in inputs:
        if packed is not None:
            longer, packed = _packed(ids[0], packed.lengths, width)
            found.append((longer, starts, packed))
            continue
        wider = F.pad(ids, (0, width - ids.shape[1], 0, rows - len(ids)))
        found.append((wider, torch.arange(len(starts)) * width, None))
    return found


def _owners(held: Mapping[int, tuple[Box, ...]]) -> dict[Box, int]:
    """Each box once, with the first rank that has it; the same on every rank."""
    found: dict[Box, int] = {}
    for rank in sorted(held):
        for box in held[rank]:
            if box.numel:
                found.setdefault(box, rank)
    return found


def _masters(
    optimizer: Any,
) -> Iterator[tuple[torch.nn.Parameter, tuple[int, torch.Tensor, dict[str, Any]]]]:
    """(Megatron's parameter, (first element, masters, AdamW's state)) of what a distributed optimizer has on this rank."""
    pairs = ((optimizer.model_float16_groups, optimizer.shard_fp32_from_float16_groups),
             (optimizer.model_fp32_groups, optimizer.shard_fp32_groups))  # fmt: skip
    for models, shards in pairs:
        for group, kept in zip(models, shards, strict=True):
            for parameter, master in zip(group, kept, strict=True):
                moments = optimizer.optimizer.state[master]
                if not moments:  # torch makes them in the first step
                    moments["step"] = torch.zeros((), dtype=torch.float32)
                    moments |= {m: torch.zeros_like(master.detach()) for m in MOMENTS}
                yield (
                    parameter,
                    (
                        optimizer._get_model_param_range_map(parameter)["param"].start,
                        master.detach(),
                        moments,
                    ),
                )


def _prepare_random(seed: int) -> None:
    """Megatron forks a generator of this name around embeddings and recomputed layers; nothing is drawn from it."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    if (
        parallel_state._GLOBAL_MEMORY_BUFFER is None
    ):  # scratch space for gathered activations, of whoever needs it next
        parallel_state._set_global_memory_buffer()
    tracker = get_cuda_rng_tracker()
    if "model-parallel-rng" not in tracker.get_states():
        with torch.random.fork_rng(devices=[]):
            tracker.add("model-parallel-rng", seed)
