"""The code that runs in SGLang's schedulers: it copies weights from a rank's bucket into the model.

SGLang calls `load` as a custom weight loader (its server argument `custom_weight_loader`), in each
scheduler, with that scheduler's own payload. The payload is one of the jobs below; its result or
error is written to a file.

    engine's process                          scheduler of a tp rank
    Schedulers.tell(jobs) --payload per rank-> load(model, payload)
                          <-file per rank----- the job's answer
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch

from hybridflow.core.contracts.rollout import Proof, Wanted
from hybridflow.core.errors import HybridFlowError, ModelError
from hybridflow.core.values.weights import Box, Param
from hybridflow.kit.hosting.bucket import BucketReader, Load
from hybridflow.kit.tracing.placed import PlacedWeights

LOADER = f"{__name__}.load"
"""The name by which SGLang finds `load`."""


@attrs.frozen
class Taken:
    """The boxes of each parameter that one scheduler reads."""

    boxes: Mapping[str, tuple[Box, ...]]
    opaque: Mapping[str, str]
    """Name -> the reason why no box describes what SGLang's loader does with it."""


@attrs.frozen
class Ask:
    """The job to trace SGLang's loader and verify the trace; its result is a Taken."""

    params: Mapping[str, Param]
    ties: Mapping[str, str]
    windows: int = 0
    """Number of the model's layers with sliding windows."""

    def run(self, model: Any) -> Taken:
        """Trace and verify; the weights are NaN afterwards. Raises ModelError."""
        self._check_attention(model)
        # The trace is verified once, for all updates.
        who = f"{type(model).__name__} of SGLang"
        placed = PlacedWeights(
            model.load_weights, _tensors_of(model), self.params, self.ties, who, _device_of(model)
        )
        placed.untie()
        placed.prove()
        _placed[id(model)] = placed
        boxes = {name: placed.boxes(name) for name in self.params}
        return Taken(boxes, placed.map.opaque)

    def _check_attention(self, model: Any) -> None:
        """Raise ModelError where SGLang's attention differs from the model's (0.5.23).

        Its mistral and phi3 have no sliding window; its attention on a CPU does not cap scores.
        """
        who = f"{type(model).__name__} of SGLang"
        if type(model).__name__ in WRONG:
            raise ModelError(f"{who} {WRONG[type(model).__name__]}; take another engine")
        layers = [layer for layer in model.modules() if type(layer).__name__ == "RadixAttention"]
        windows = sum((layer.sliding_window_size or -1) > 0 for layer in layers)
        if windows != self.windows:
            raise ModelError(
                f"{who} has sliding windows in {windows} of its {len(layers)} layers, and the "
                f"model has them in {self.windows}: it would attend to other tokens; take another "
                "engine, or sequences that fit into a window (rollout.max_length)"
            )
        on_cpu = _device_of(model).type == "cpu"
        if on_cpu and any(layer.logit_cap for layer in layers):
            raise ModelError(
                f"{who} on a CPU leaves out the cap of attention scores; take another engine"
            )


@attrs.frozen
class Begin:
    """The job to begin an update, after SGLang's own preparation for it."""

    version: int

    def run(self, model: Any) -> None:
        """Look up the model's tensors again, as SGLang may have replaced them.

        Raises HybridFlowError where the new ones have other shapes.
        """
        placed = _placed[id(model)]
        placed.rebind(_tensors_of(model))
        placed.begin(self.version)
        placed.fill()


@attrs.frozen
class Take:
    """The job to copy the contents of a bucket into the model."""

    bucket: Any
    """The bucket's handle."""
    load: Load

    def run(self, model: Any) -> None:
        """Copy, and wait until the copies are done, as the bucket is filled again afterwards."""
        # Memory is mapped once.
        key = pickle.dumps(self.bucket)
        if key not in _readers:
            _readers[key] = BucketReader(self.bucket, _device_of(model))
        for piece, values in _readers[key].take(self.load):
            _placed[id(model)].receive(piece.name, piece.box, values)
        if torch.cuda.is_initialized():
            torch.cuda.current_stream().synchronize()


@attrs.frozen
class End:
    """The job to end an update, after which SGLang recomputes absorbed projections and the like."""

    def run(self, model: Any) -> None:
        """Call the functions that SGLang's loader calls at its end.

        Raises HybridFlowError where weights are missing.
        """
        from sglang.srt.model_loader.loader import post_load_weights

        _placed[id(model)].end()
        post_load_weights(model)


@attrs.frozen
class Prove:
    """The job to compute checksums of weights and their version; its result is a Proof."""

    wanted: Wanted

    def run(self, model: Any) -> Proof:
        """Return the proof of the model's present tensors."""
        placed = _placed[id(model)]
        placed.rebind(_tensors_of(model))
        placed.expect(self.wanted)
        return placed.proof()


WRONG = {"PhiForCausalLM": "leaves out the bias of its head"}
"""Class of SGLang 0.5.23 that computes other values than the model -> its error."""
Job = Ask | Begin | Take | End | Prove
_placed: dict[int, PlacedWeights] = {}
"""id() of the model -> its weights."""
_readers: dict[bytes, BucketReader] = {}
"""Pickled handle of a bucket -> its reader."""


def _tensors_of(model: Any) -> dict[str, torch.Tensor]:
    """Return the model's parameters and buffers by name, as they are now."""
    tensors = dict(model.named_buffers(remove_duplicate=False))
    return tensors | dict(model.named_parameters(remove_duplicate=False))


def _device_of(model: Any) -> torch.device:
    return next(model.parameters()).device


def load(model: Any, named_tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Run a job, and write its answer to a file. No error is raised: it would end the scheduler."""
    [(path, packed)] = named_tensors
    try:
        answer = (True, pickle.loads(packed.cpu().numpy().tobytes()).run(model))
    except HybridFlowError as error:
        answer = (False, error)
    except Exception as error:
        answer = (False, HybridFlowError(f"SGLang's scheduler: {type(error).__name__}: {error}"))

    # A file with this name is whole.
    unfinished = Path(f"{path}.unfinished")
    unfinished.write_bytes(pickle.dumps(answer))
    os.replace(unfinished, path)


class Schedulers:
    """Gives jobs to the schedulers of an engine, and reads their answers."""

    def __init__(self, engine: Any, tp: int, folder: str):
        """`folder` takes the answers."""
        self.engine = engine
        self.tp = tp
        self.folder = Path(folder)

    def tell(self, jobs: Sequence[Job | None], flush_cache: bool = False) -> list[Any]:
        """Let scheduler i run jobs[i], if there is one; return the answers.

        With `flush_cache` SGLang then drops the keys and values that it keeps across requests.
        Raises the first scheduler's HybridFlowError, and one where the cache was not dropped.
        """
        from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput
        from sglang.srt.utils import MultiprocessingSerializer

        # Each scheduler takes its own payload: the job's bytes, by the name of the answer's file.
        payloads = []
        for rank, job in enumerate(jobs):
            packed = torch.frombuffer(bytearray(pickle.dumps(job or _Nothing())), dtype=torch.uint8)
            named = [(str(self.folder / f"answer-{rank}"), packed)]
            payloads.append(MultiprocessingSerializer.serialize(named, output_str=True))
        asked = UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=payloads, load_format=LOADER, flush_cache=flush_cache
        )
        # The answers are complete when SGLang reports that all schedulers are done.
        update = self.engine.tokenizer_manager.update_weights_from_tensor(asked, None)
        succeeded, reason = self.engine.loop.run_until_complete(update)[:2]
        if not succeeded:
            raise HybridFlowError(f"SGLang's update_weights_from_tensor failed: {reason}")
        return [self._answer(rank) for rank in range(self.tp)]

    def _answer(self, rank: int) -> Any:
        """Read and remove a scheduler's answer."""
        path = self.folder / f"answer-{rank}"
        succeeded, value = pickle.loads(path.read_bytes())
        path.unlink()
        if not succeeded:
            raise value
        return value


@attrs.frozen
class _Nothing:
    """The job to do nothing, for schedulers that are not concerned by another one's job."""

    def run(self, model: Any) -> None:
        """Do nothing."""
