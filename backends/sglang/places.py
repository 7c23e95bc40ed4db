"""What runs in SGLang's schedulers: weights go from this rank's bucket to their places.

SGLang calls `load` as a custom weight loader (its server argument `custom_weight_loader`), in each
scheduler, with that scheduler's own payload. The payload is one of the jobs below; what it returns,
or how it failed, is left in a file.

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

from hybridflow.core.errors import HybridFlowError
from hybridflow.core.values.weights import Box, Param
from hybridflow.kit.hosting.bucket import BucketReader, Load
from hybridflow.kit.tracing.placed import PlacedWeights

LOADER = f"{__name__}.load"
"""The name by which SGLang finds `load`."""


@attrs.frozen
class Taken:
    """What one scheduler takes of the weights."""

    boxes: Mapping[str, tuple[Box, ...]]
    opaque: Mapping[str, str]
    """Name -> the reason why no box describes what SGLang's loader does with it."""


@attrs.frozen
class Ask:
    """Ask SGLang's loader where weights go, and prove the answer; the answer is a Taken."""

    params: Mapping[str, Param]
    ties: Mapping[str, str]

    def run(self, model: Any) -> Taken:
        """Trace and prove; the weights are NaN afterwards. Raises ModelError."""
        tensors = dict(model.named_buffers(remove_duplicate=False))
        tensors |= dict(model.named_parameters(remove_duplicate=False))
        # The proof stands for all updates, so it is made once.
        who = f"{type(model).__name__} of SGLang"
        placed = PlacedWeights(model.load_weights, tensors, self.params, self.ties, who)
        placed.prove()
        _placed[id(model)] = placed
        boxes = {name: placed.boxes(name) for name in self.params}
        return Taken(boxes, placed.map.opaque)


@attrs.frozen
class Fill:
    """Write the constants of SGLang's loader, such as padding."""

    def run(self, model: Any) -> None:
        """Fill them."""
        _placed[id(model)].fill()


@attrs.frozen
class Take:
    """Copy what a bucket holds to its places."""

    bucket: Any
    """The bucket's handle."""
    load: Load

    def run(self, model: Any) -> None:
        """Copy, and wait until the copies are done: the bucket is filled again then."""
        # Memory is mapped once.
        key = pickle.dumps(self.bucket)
        if key not in _readers:
            device = next(model.parameters()).device
            _readers[key] = BucketReader(self.bucket, device)
        for piece, values in _readers[key].take(self.load):
            _placed[id(model)].receive(piece.name, piece.box, values)
        if torch.cuda.is_initialized():
            torch.cuda.current_stream().synchronize()


@attrs.frozen
class Derive:
    """Let SGLang derive what it keeps beside the weights, such as absorbed projections."""

    def run(self, model: Any) -> None:
        """Call what its loader calls at its end."""
        from sglang.srt.model_loader.loader import post_load_weights

        post_load_weights(model)


Job = Ask | Fill | Take | Derive
_placed: dict[int, PlacedWeights] = {}
"""By the model's id()."""
_readers: dict[bytes, BucketReader] = {}
"""By the pickled handle."""


def load(model: Any, named_tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Do a job, and leave its answer. An error here would end the scheduler, so none is raised."""
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
        """Let scheduler i do jobs[i], where there is one; return the answers.

        With `flush_cache` SGLang then drops the keys and values that it keeps across requests.
        Raises the first scheduler's HybridFlowError, and one where the cache was not dropped.
        """
        from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput
        from sglang.srt.utils import MultiprocessingSerializer

        # Each scheduler takes its own payload: the job's bytes, under the name of the answer's file.
        payloads = []
        for rank, job in enumerate(jobs):
            packed = torch.frombuffer(bytearray(pickle.dumps(job or _Nothing())), dtype=torch.uint8)
            named = [(str(self.folder / f"answer-{rank}"), packed)]
            payloads.append(MultiprocessingSerializer.serialize(named, output_str=True))
        asked = UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=payloads, load_format=LOADER, flush_cache=flush_cache
        )
        # Answers are there when SGLang says that all schedulers are done.
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
    """For a scheduler that another one's job does not concern."""

    def run(self, model: Any) -> None:
        """Do nothing."""
