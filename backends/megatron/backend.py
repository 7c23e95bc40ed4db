"""Megatron-Core's tensor, pipeline and sequence parallelism with its distributed optimizer.

Process groups are the role's own (groups.py), so roles of different layouts live in one process. On
a CPU every call into Megatron goes through `on_cpu` (cpu.py).

A pass, on every rank; role_outputs (outputs.py) runs on the last pipeline stage alone:

    MicroBatch -> Input -> Megatron's schedule -> hidden [S, B, H] -> role_outputs -> Finish
                              |         ^
                              v         |
                       other pipeline stages

This module is imported to check a config, so modules that take seconds to import are imported where
they are used.
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
from hybridflow.core.contracts.training import (
    PARTS,
    LossFunction,
    MicroBatch,
    Packing,
    TrainingBackend,
    Writing,
    counted,
)
from hybridflow.core.processes.page import moved
from hybridflow.core.values.metrics import Metrics
from hybridflow.core.values.weights import Box, WeightLayout
from hybridflow.core.workers.micro_batch import dummy_micro_batch
from hybridflow.kit.checkpoint import MOMENTS, StatePart, flat_parts, load_state, save_state
from hybridflow.kit.huggingface.shapes import shape_of
from hybridflow.kit.offload import Residence

Finish = Callable[[int, dict[str, torch.Tensor]], torch.Tensor]
"""(index of the micro-batch, outputs) -> a scalar; called on the last pipeline stage."""
Input = tuple[torch.Tensor, torch.Tensor, Any]
"""(ids [1, tokens], the index of each row's first token [rows], PackedSeqParams)."""
Master = tuple[int, torch.Tensor, dict[str, Any]]
"""(first element in the flat parameter, float32 masters, AdamW's state) on this rank."""


class MegatronBackend(TrainingBackend):
    """The training backend "megatron": dp, tp and pp, with the optimizer sharded over dp."""

    @classmethod
    def problems(cls, config, layout, model) -> list[str]:
        """Return problems: of the model and how it is cut; settings without effect."""
        from hybridflow.backends.megatron.fit import why_not
        from hybridflow.kit.huggingface.checks import meta_model, model_problems

        problems = model_problems(model)
        if not problems:
            problems = why_not(meta_model(model).config, config, layout)
        if config.virtual_stages > 1 and layout.pp == 1:
            problems.append(
                f"backend.virtual_stages {config.virtual_stages} needs pp > 1, got pp 1"
            )
        if config.sequence_parallel and layout.tp == 1:
            problems.append("backend.sequence_parallel needs tp > 1, got tp 1")
        return problems

    def build(self) -> None:
        """Build this rank's chunks of layers with their weights, and the optimizer.

        Raises ModelError for a model that Megatron does not have, or whose sizes the layout does
        not divide, and RuntimeError without torch.distributed.
        """
        if not dist.is_initialized():
            raise RuntimeError(
                "backend megatron needs torch.distributed, which every runtime sets up"
            )
        no_warnings_of_what_is_meant()
        self.packing = Packing.PACKED
        with on_cpu(self.context.device):
            self._build()

    def _build(self) -> None:
        from hybridflow.backends.megatron import modules, weights
        from hybridflow.backends.megatron.groups import group_collection
        from hybridflow.kit.huggingface import loading
        from hybridflow.kit.huggingface.modeling import hf_config

        # The model's config for both libraries, and the mapping of canonical parameters.
        context = self.context
        config = self.config
        spec = self.model_spec
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

        # Zeros first: the padding of the vocabulary keeps them.
        for chunk in self.chunks:
            chunk.to(context.device, self._dtype)
            for parameter in chunk.parameters():
                parameter.requires_grad_(self.optimizer_config is not None)
                parameter.data.zero_()
        self._layout = self._shape.layout_of(self._dtype)
        self._pieces = list(weights.local_pieces(self.chunks, self._shape, context.coords.tp))
        self._models: list[Any] = list(self.chunks)
        self.optimizer: Any = None
        loading.fill(self.named_shards(), spec, torch.float32)

        if self.optimizer_config is not None:
            self._make_optimizer()

            # Masters are made of bfloat16 weights: give them the float32 values instead.
            if self._dtype != torch.float32:
                masters = (
                    (part.entry.removeprefix("model."), part.box, part.values)
                    for part in self._state()
                    if part.entry.startswith("model.")
                )
                loading.fill(masters, spec, torch.float32)

        self.residence = Residence(
            context.device,
            {"weights": self._weight_tensors, "optimizer": self._optimizer_tensors},
            scratch={"optimizer": self._gradient_buffers},
        )

    def _make_optimizer(self) -> None:
        """Wrap the chunks in Megatron's data parallelism and make its distributed optimizer."""
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        # Nothing overlaps: gradients are reduced, and weights gathered, within optim_step.
        ddp = DistributedDataParallelConfig(
            use_distributed_optimizer=True,
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=False,
            overlap_param_gather=False,
        )
        self._models = [
            DistributedDataParallel(
                self._megatron,
                ddp,
                chunk,
                disable_bucketing=index > 0,
                pg_collection=self._groups,
            )
            for index, chunk in enumerate(self.chunks)
        ]

        adam = self.optimizer_config
        assert adam is not None
        settings = OptimizerConfig(
            optimizer="adam",
            lr=adam.lr,
            weight_decay=adam.weight_decay,
            adam_beta1=adam.betas[0],
            adam_beta2=adam.betas[1],
            adam_eps=adam.eps,
            clip_grad=adam.max_grad_norm,
            bf16=self._dtype == torch.bfloat16,
            params_dtype=self._dtype,
            use_distributed_optimizer=True,
        )
        # Gloo groups would serve Megatron's own checkpoints, which are not used.
        self.optimizer = get_megatron_optimizer(
            settings, self._models, use_gloo_process_groups=False, pg_collection=self._groups
        )
        self._clear()

    def _optimizers(self) -> list[Any]:
        """Return the distributed optimizers that hold parameters."""
        optimizers = getattr(self.optimizer, "chained_optimizers", [self.optimizer])
        return [optimizer for optimizer in optimizers if not optimizer.is_stub_optimizer]

    # --- passes and updates ---

    def forward(
        self,
        micros: Sequence[MicroBatch],
        needs: Sequence[str],
        temperature: float = 1.0,
    ) -> list[dict[str, torch.Tensor]]:
        """Return the outputs of each micro-batch; empty dicts before the last pipeline stage."""
        results: list[dict[str, torch.Tensor]] = [{} for _ in micros]

        def keep(index: int, outputs: dict[str, torch.Tensor]) -> torch.Tensor:
            # The schedule requires a scalar, which is not used here.
            results[index] = outputs
            return next(iter(outputs.values())).sum()

        with torch.no_grad():
            self._run(micros, needs, temperature, keep, forward_only=True)
        return results

    def forward_backward(
        self,
        micros: Sequence[MicroBatch],
        needs: Sequence[str],
        loss: LossFunction,
        temperature: float = 1.0,
    ) -> None:
        """Accumulate gradients of the losses' sum over micro-batches and dp ranks."""
        self._run(micros, needs, temperature, loss, forward_only=False)

    def _run(
        self,
        micros: Sequence[MicroBatch],
        needs: Sequence[str],
        temperature: float,
        finish: Finish,
        forward_only: bool,
    ) -> None:
        """Run Megatron's schedule over the micro-batches, `finish` on the last pipeline stage."""
        from hybridflow.backends.megatron.outputs import role_outputs

        padded = self._padded(micros)
        inputs = [self._input(micro) for micro in padded]

        # The interleaved schedule requires equal shapes: it confuses those of its neighbours.
        if self.config.virtual_stages > 1:
            inputs = _alike(inputs)

        def step(numbers: Iterator[int], model: Any) -> tuple[torch.Tensor, Any]:
            """Run a chunk on its next micro-batch: (output, what ends the last chunk's pass)."""
            moved()
            index = next(numbers)
            ids, starts, packed = inputs[index]
            hidden = model(
                input_ids=ids, position_ids=None, attention_mask=None, packed_seq_params=packed
            )
            chunk = getattr(model, "module", model)

            def end(hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
                """Return (loss, 0 tokens, None): Megatron shall not divide by a token count."""
                micro = padded[index]
                vocab = self._shape.shape.vocab
                outputs = role_outputs(chunk, hidden, micro, starts, needs, temperature, vocab)
                if index < len(micros):
                    value = finish(index, outputs)
                else:
                    value = _zero_loss(hidden, outputs)
                return value, torch.zeros((), dtype=torch.int), None

            return hidden, end

        with on_cpu(self.context.device):
            self._schedule(step, len(padded), inputs[0][0].shape, forward_only)

    def _padded(self, micros: Sequence[MicroBatch]) -> list[MicroBatch]:
        """Return the micro-batches, and for interleaving dummies up to a multiple of pp."""
        padded = list(micros)
        if self.config.virtual_stages > 1:
            topk = micros[0].topk_ids
            width = 0 if topk is None else topk.shape[-1]
            lacking = -len(micros) % self.context.layout.pp
            padded += [dummy_micro_batch(self.context.device, width) for _ in range(lacking)]
        return padded

    def _schedule(
        self,
        step: Callable[..., Any],
        count: int,
        shape: Sequence[int],
        forward_only: bool,
    ) -> None:
        """Call Megatron's schedule, with or without pipeline stages, for `count` micro-batches.

        shape: [1, tokens] of the micro-batches, used where they are alike.
        """
        from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
        from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

        virtual = self.config.virtual_stages if self.config.virtual_stages > 1 else None
        run = get_forward_backward_func(self.context.layout.pp, virtual)
        more: dict[str, Any] = {}
        if self.context.layout.pp > 1:
            more["p2p_communicator"] = P2PCommunicator(self._groups.pp, self._megatron)

        # Each chunk passes over all micro-batches by itself, in the schedule's order:
        # one iterator of indices per chunk. A single chunk is not passed as a list.
        many = len(self._models) > 1
        numbers = [iter(range(count)) for _ in self._models]
        run(
            forward_step_func=step,
            data_iterator=numbers if many else numbers[0],
            model=self._models if many else self._models[0],
            num_microbatches=count,
            seq_length=shape[1],
            micro_batch_size=shape[0],
            forward_only=forward_only,
            pg_collection=self._groups,
            **more,
        )

    def _input(self, micro: MicroBatch) -> Input:
        """Return a micro-batch as input: packed, padded to a multiple of tp if tokens are cut."""
        if micro.prompt_at is not None:
            starts = micro.prompt_at
            flat = micro.ids[0]
            lengths = micro.lengths[starts.argsort()]
        else:
            # The tokens of padded rows without padding, row by row.
            lengths = micro.lengths
            rows, at = counted(lengths)
            real = rows * micro.ids.shape[1] + at
            flat = micro.ids.flatten().index_select(0, real.to(micro.ids.device))
            starts = lengths.cumsum(0) - lengths

        # Sequence parallelism cuts the tokens into tp equal parts.
        tp = self.context.layout.tp if self._megatron.sequence_parallel else 1
        total = len(flat) + -len(flat) % tp
        ids, packed = _packed(flat, lengths.tolist(), total)
        return ids, starts, packed

    def optim_step(self) -> Metrics:
        """Reduce, clip, step and clear the gradients; a norm that is not finite only clears."""
        from megatron.core.distributed import finalize_model_grads
        from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

        settings = self.optimizer_config
        assert settings is not None, "a frozen role cannot be updated"
        lr = settings.lr_at(self.version)

        with on_cpu(self.context.device), torch.no_grad():
            finalize_model_grads(self._models, None, pg_collection=self._groups)
            self.optimizer.prepare_grads()
            norm = float(self.optimizer.get_grad_norm())

            # The parts of the optimizer's own step, which would go on with any norm.
            if math.isfinite(norm):
                for optimizer in self._optimizers():
                    for group in optimizer.param_groups:
                        group["lr"] = lr
                        group["weight_decay"] = settings.weight_decay
                    if settings.max_grad_norm:
                        clip_grad_by_total_norm_fp32(
                            optimizer.get_parameters(), settings.max_grad_norm, norm
                        )
                self.optimizer.step_with_ready_grads()
                self.residence.changed()
                self.version += 1
            self._clear()
        return Metrics.of(grad_norm=norm, lr=lr)

    def _clear(self) -> None:
        """Zero the gradients: Megatron's buffers and the optimizer's views."""
        for model in self._models:
            model.zero_grad_buffer()
        self.optimizer.zero_grad()

    # --- access to the weights ---

    def layout(self) -> WeightLayout:
        """Return which boxes of each canonical parameter each rank holds."""
        return self._layout

    def named_shards(self) -> Iterator[tuple[str, Box, torch.Tensor]]:
        """Yield canonical name, box and a view of Megatron's storage; padding is left out."""
        for parameter, pieces in self._pieces:
            flat = parameter.detach().view(-1)
            for name, _, box, place in pieces:
                if box.numel:
                    yield name, box, flat.narrow(0, place, box.numel).view(box.shape)

    def full_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the whole canonical parameters, each box broadcast by the first rank with it."""
        # This rank's values, by canonical name.
        held = self._layout.shards()
        own: dict[str, list[tuple[Box, torch.Tensor]]] = {}
        for name, box, values in self.named_shards():
            own.setdefault(name, []).append((box, values))

        for name, param in self._layout.params.items():
            full = torch.zeros(param.shape, dtype=param.dtype, device=self.context.device)
            if self.context.layout.world == 1:
                for box, values in own[name]:
                    full[box.slices()] = values
                yield name, full
                continue

            # A box that several ranks have comes from the first of them.
            for box, rank in _owners(held[name]).items():
                values = full[box.slices()].contiguous()
                if rank == self.context.rank:
                    values = next(part for own_box, part in own[name] if own_box == box)
                    values = values.contiguous()
                dist.broadcast(values, src=rank)
                full[box.slices()] = values
            yield name, full

    # --- files ---

    def _state(self) -> Iterator[StatePart]:
        """Yield this rank's masters and moments, or the weights of a frozen role."""
        shapes = {name: param.shape for name, param in self._layout.params.items()}
        if self.optimizer is None:
            for name, box, values in self.named_shards():
                yield StatePart(f"model.{name}", shapes[name], box, values)
            return

        masters: dict[torch.nn.Parameter, Master] = {}
        for optimizer in self._optimizers():
            masters.update(_masters(optimizer))
        for parameter, pieces in self._pieces:
            if parameter not in masters:  # other dp ranks have all of it
                continue
            start, master, moments = masters[parameter]
            entries = {"model": master}
            for moment in MOMENTS:
                entries[f"optimizer.{moment}"] = moments[moment]

            # The rank's range of the flat parameter, as boxes of the canonical ones.
            places = [piece for piece in pieces if piece[2].numel]
            for entry, values in entries.items():
                for name, shape, box, offset in flat_parts(places, start, start + values.numel()):
                    part = values.view(-1).narrow(0, offset, box.numel)
                    yield StatePart(f"{entry}.{name}", shape, box, part)

    def save(self, folder: Path) -> Writing:
        """Write masters and moments, or a frozen role's weights. A collective call."""
        return save_state(self._state(), self.version, folder, self.context.rank)

    def load(self, folder: Path) -> None:
        """Restore the files of `save`, and the model's weights from the same entries.

        Raises CheckpointError when it cannot be read.
        """
        self.version = load_state(self._state(), folder, self.context.role)
        self.residence.changed()
        if self.optimizer is None:
            return

        # AdamW corrects the bias of its moments by the number of steps.
        for optimizer in self._optimizers():
            for _, (_, _, moments) in _masters(optimizer):
                moments["step"].fill_(float(self.version))

        # The masters are sharded over dp, the weights are not: read these too.
        weights = (
            StatePart(f"model.{name}", self._layout.params[name].shape, box, values)
            for name, box, values in self.named_shards()
        )
        load_state(weights, folder, self.context.role, complete=False)

    def export_hf(self, folder: Path, dtype: torch.dtype | None = None) -> None:
        """Write config.json and model.safetensors with canonical names, on rank 0."""
        from transformers import (
            AutoModelForCausalLM,
            AutoModelForSequenceClassification,
            GenerationConfig,
        )

        from hybridflow.kit.huggingface.export import export_role

        policy = self.model_spec.kind == "policy"
        auto: Any = AutoModelForCausalLM if policy else AutoModelForSequenceClassification
        # The class whose name config.json gets; no such model is built.
        hf = auto._model_mapping[type(self._hf_config)]
        generation = GenerationConfig.from_model_config(self._hf_config) if policy else None
        export_role(
            self.full_parameters(),
            hf,
            self._hf_config,
            generation,
            folder,
            dtype or self._dtype,
            self.context,
        )

    # --- memory ---

    def offload(self, parts: Sequence[str] = PARTS) -> None:
        """Move parts to the host; gradients, which are zeros between updates, only free memory."""
        if self.context.device.type != "cpu":
            self.residence.offload(parts)

    def onload(self, parts: Sequence[str] = PARTS) -> None:
        """Move parts back to the device."""
        if self.context.device.type != "cpu":
            self.residence.onload(parts)

    def _weight_tensors(self) -> Iterator[torch.Tensor]:
        """Yield the weights and the modules' buffers; Megatron's flat buffers hold the weights."""
        for chunk in self.chunks:
            yield from chunk.parameters()
            yield from chunk.buffers()

    def _optimizer_tensors(self) -> Iterator[torch.Tensor]:
        """Yield masters and moments."""
        if self.optimizer is None:
            return
        for optimizer in self._optimizers():
            for _, (_, master, moments) in _masters(optimizer):
                # float32 weights are their own masters, and leave with the weights.
                if self._dtype != torch.float32:
                    yield master
                yield from moments.values()

    def _gradient_buffers(self) -> Iterator[torch.Tensor]:
        """Yield Megatron's flat buffers of gradients, which are zeros between updates."""
        if self.optimizer is None:
            return
        for model in self._models:
            for buffer in (*model.buffers, *model.expert_parallel_buffers):
                yield buffer.grad_data


def _zero_loss(hidden: torch.Tensor, outputs: Mapping[str, torch.Tensor]) -> Any:
    """Return 0 as a function of all outputs, so that a dummy runs the same backward pass."""
    zero = hidden.new_zeros((), dtype=torch.float32)
    return sum((output.sum() * 0.0 for output in outputs.values()), zero)


def _packed(
    flat: torch.Tensor,
    lengths: list[int],
    total: int,
) -> tuple[torch.Tensor, Any]:
    """Return (ids [1, total], PackedSeqParams) for rows of these lengths, one after the other.

    Tokens that are added to reach `total` form a row of their own.
    """
    from megatron.core.packed_seq_params import PackedSeqParams

    from hybridflow.kit.huggingface.attention import PackedRows

    if lacking := total - len(flat):
        flat = F.pad(flat, (0, lacking))
        lengths = [*lengths, lacking]
    rows = PackedRows(lengths, flat.device)
    packed = PackedSeqParams(max_seqlen_q=rows.longest, max_seqlen_kv=rows.longest)
    # The fields that modules.py reads.
    _, positions = counted(torch.tensor(lengths))
    packed.rows = rows
    packed.positions = positions.to(flat.device)
    return flat[None], packed


def _alike(inputs: Sequence[Input]) -> list[Input]:
    """Return the inputs with tokens added so that all have equally many."""
    total = max(ids.shape[1] for ids, _, _ in inputs)
    alike = []
    for ids, starts, packed in inputs:
        longer, repacked = _packed(ids[0], packed.rows.lengths, total)
        alike.append((longer, starts, repacked))
    return alike


def _owners(held: Mapping[int, tuple[Box, ...]]) -> dict[Box, int]:
    """Return box -> the first rank that has it, in the same order on every rank."""
    owners: dict[Box, int] = {}
    for rank in sorted(held):
        for box in held[rank]:
            if box.numel:
                owners.setdefault(box, rank)
    return owners


def _masters(optimizer: Any) -> Iterator[tuple[torch.nn.Parameter, Master]]:
    """Yield (Megatron's parameter, Master) for a distributed optimizer's part on this rank."""
    # bf16 weights have masters of their own; fp32 weights are their masters.
    bf16_groups = (optimizer.model_float16_groups, optimizer.shard_fp32_from_float16_groups)
    fp32_groups = (optimizer.model_fp32_groups, optimizer.shard_fp32_groups)
    for models, shards in (bf16_groups, fp32_groups):
        for parameters, masters in zip(models, shards, strict=True):
            for parameter, master in zip(parameters, masters, strict=True):
                moments = optimizer.optimizer.state[master]
                if not moments:  # torch makes them in the first step
                    moments["step"] = torch.zeros((), dtype=torch.float32)
                    moments |= {name: torch.zeros_like(master.detach()) for name in MOMENTS}
                ranges = optimizer._get_model_param_range_map(parameter)
                yield parameter, (ranges["param"].start, master.detach(), moments)


def _prepare_random(seed: int) -> None:
    """Set up two globals of Megatron that its layers expect.

    It forks a generator of this name around embeddings and recomputed layers; nothing is drawn
    from it.
    """
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    # Scratch space for gathered activations; all roles of the process share it.
    if parallel_state._GLOBAL_MEMORY_BUFFER is None:
        parallel_state._set_global_memory_buffer()
    tracker = get_cuda_rng_tracker()
    if "model-parallel-rng" not in tracker.get_states():
        with torch.random.fork_rng(devices=[]):
            tracker.add("model-parallel-rng", seed)
