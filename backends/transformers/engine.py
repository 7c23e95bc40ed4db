"""The embedded default rollout engine: generates in the worker's own process, with its own copy of the weights."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from hybridflow.backends.transformers.config import TransformersEngineConfig
from hybridflow.backends.transformers.decoder import FastDecoder
from hybridflow.backends.transformers.generic import GenericDecoder
from hybridflow.backends.transformers.llama import LlamaWeights, unfit
from hybridflow.backends.transformers.parallel import Split
from hybridflow.backends.transformers.scheduler import Run, burst_margin
from hybridflow.backends.transformers.weights import WeightStore
from hybridflow.core.contracts.rollout import Completion, Request
from hybridflow.core.errors import HybridFlowError, ModelError
from hybridflow.core.values.weights import Box, WeightLayout
from hybridflow.kit.continuous import ContinuousEngine
from hybridflow.kit.hosting.hostable import Hostable
from hybridflow.kit.huggingface.models import policy_config, saved_parameters

FEWEST_SLOTS = 8
"""Rows reserved at least, for requests that come while the first ones run."""


class TransformersEngine(ContinuousEngine, Hostable):
    """Llama-like models run on our decoder, other causal models on Hugging Face's code; both sample alike.

    Under tensor parallelism (our decoder alone) the ranks of a replica make the same calls with the same requests: each
    reads its stream to the end, and aborts at the same place of it. All of them yield the same completions.
    """

    Config = TransformersEngineConfig

    def __init__(self, model, config, context):
        super().__init__(model, config, context)
        self.device: torch.device = torch.device(context.device)
        self.decoder: Any = None
        self._run: Run | None = None
        self._waiting: list[Request] = []

    def start(self) -> None:
        """Raises ModelError for a model that is no policy, or does not fit `fast = true` or the generation layout.

        With tensor parallelism a collective call: it makes the process groups.
        """
        hf_config = policy_config(self.model)
        reason = unfit(hf_config)
        if self.config.fast and reason is not None:
            raise ModelError(
                f"the fast decoder cannot run this model: {reason}; set fast = false, or leave it out"
            )
        dtype = getattr(torch, self.config.dtype)
        if self.config.fast is False:
            reason = "fast = false"
        self.split = Split.of(self.context, hf_config, reason)
        if reason is None:
            shapes, ties = saved_parameters(hf_config)
            weights = LlamaWeights(hf_config, shapes, dtype, self.device, self.split)
            self.decoder = FastDecoder(hf_config, weights, dtype, self.device)
            self.store = WeightStore(weights.places, ties, self.split)
        else:
            self.decoder = GenericDecoder(hf_config, dtype, self.device)
            self.store = WeightStore(self.decoder.places, self.decoder.ties, self.split)
        text = hf_config.get_text_config()
        self.max_positions, self.vocab = (
            getattr(text, "max_position_embeddings", None),
            text.vocab_size,
        )

    # ---- weights ------------------------------------------------------------------------------------------------

    def layout(self) -> WeightLayout:
        """Over all ranks of the actor."""
        return self.store.layout()

    def view(self, name: str, box: Box) -> torch.Tensor | None:
        """The storage of a box that this rank holds, to write to; None for parameters that are `layout().opaque`.

        Not contiguous in general. Whoever writes to it says so by `receive(name, box, view)`, which then copies nothing.
        """
        self._check_awake("looking at its weights")
        return self.store.view(name, box)

    def read(self, name: str, box: Box) -> torch.Tensor:
        """The values of a box that this rank holds, in canonical order: a view where there is one, else a copy."""
        self._check_awake("reading its weights")
        return self.store.read(name, box)

    def _check_awake(self, before: str) -> None:
        if self.asleep:
            raise HybridFlowError(f"the rollout engine sleeps; wake it before {before}")

    inflight = True
    lends = True

    def lend(self, name: str) -> None:
        self.store.lend(name)

    def begin_update(self, version: int) -> None:
        super().begin_update(version)
        self.store.begin()

    def receive(self, name: str, box: Box, tensor: torch.Tensor) -> None:
        self.check_updating(name)
        self.store.receive(name, box, tensor)

    def end_update(self) -> None:
        self.check_updating("end_update")
        self.store.end()
        super().end_update()

    def sleep(self) -> None:
        """Gives up the KV cache, and on a GPU the weights too (an update must follow `wake`)."""
        self.check_idle()
        self.decoder.free()
        if self.device.type != "cpu" and not self.asleep:
            self.store.drop()
            self.version = None
        self.asleep = True

    def wake(self) -> None:
        if self.asleep:
            self.store.restore()
        self.asleep = False

    # ---- generation ---------------------------------------------------------------------------------------------

    def enter(self, request: Request) -> None:
        self._waiting.append(request)

    def advance(self) -> list[Completion]:
        """Some tokens for every running sequence. What comes while others run joins them if it fits into their cache."""
        if self._run is None or self._run.over:
            self._run = self._begin() if self._waiting else None
        elif self._waiting and all(map(self._run.takes, self._waiting)):
            self._run.extend(self._waiting)
            self._waiting = []
        if self._run is None:
            return []
        assert self.version is not None
        try:
            return self._run.turn(self.version)
        except BaseException:
            self.running.clear()
            self._run, self._waiting = None, []
            raise

    def _begin(self) -> Run:
        requests, self._waiting = self._waiting, []
        longest = max(len(r.prompt_ids) + r.sampling.max_tokens for r in requests)
        capacity = longest + burst_margin(self.device, self.config)
        slots = min(self._slots(capacity), max(len(requests), FEWEST_SLOTS))
        self.decoder.reserve(slots, capacity)
        return Run(self.decoder, requests, slots, self.config, self.device, self.split)

    def leave(self, ids: Sequence[int]) -> Iterable[Completion]:
        waiting = [r for r in self._waiting if r.id in ids]
        self._waiting = [r for r in self._waiting if r.id not in ids]
        if self._run is not None:
            self._run.abort(ids)
        return [Completion(r.id, *r.prefix(), "abort") for r in waiting]

    def _slots(self, capacity: int) -> int:
        """How many sequences of `capacity` tokens are decoded at once."""
        limit = self.config.kv_memory_gb * 1e9
        if limit == 0:
            limit = (
                4e9
                if self.device.type == "cpu"
                else self.split.least(0.7 * self._free_on_device(), self.device)
            )
        fitting = max(1, int(limit // self.decoder.row_bytes(capacity)))
        return min(self.config.max_sequences or 256, fitting)

    def _free_on_device(self) -> int:
        """Bytes on the GPU for a cache: free ones, those torch keeps unused, and the cache of the last call."""
        cached = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        held = self.decoder.cache.nbytes if isinstance(self.decoder.cache, torch.Tensor) else 0
        return torch.cuda.mem_get_info(self.device)[0] + cached + held
