"""The embedded rollout engine, which is the default one.

It generates in the worker's own process, with its own copy of the weights:

    enter(request) -> waiting requests -> Run (scheduler.py): rows of a batch
                                           |- decoder: tokens -> logits (decoder.py, generic.py)
                                           |- Sampler: logits -> tokens (sampler.py)
    advance()      <- completions <-------'
    receive(name, box, values) -> WeightStore (weights.py) -> the decoder's weights
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from hybridflow.backends.transformers.config import CPU_CACHE_GB, TransformersEngineConfig
from hybridflow.backends.transformers.decoder import FastDecoder
from hybridflow.backends.transformers.generic import GenericDecoder
from hybridflow.backends.transformers.llama import LlamaWeights, unfit
from hybridflow.backends.transformers.parallel import Split
from hybridflow.backends.transformers.scheduler import Run
from hybridflow.backends.transformers.weights import WeightStore
from hybridflow.core.contracts.rollout import Completion, Request
from hybridflow.core.errors import HybridFlowError, ModelError
from hybridflow.core.values.weights import Box, WeightLayout
from hybridflow.kit.continuous import ContinuousEngine
from hybridflow.kit.hosting.hostable import Hostable
from hybridflow.kit.huggingface.models import policy_config, saved_parameters

FEWEST_SLOTS = 8
"""Smallest number of rows that a run reserves: later requests may join a few first ones."""


class TransformersEngine(ContinuousEngine, Hostable):
    """Llama-like models run on our decoder, other causal models on Hugging Face's code.

    Both share scheduler and sampler. Under tensor parallelism, which only our decoder has, the
    ranks of a replica must make the same calls with the same requests: each rank reads its stream
    to the end, and aborts at the same place of it. All of them yield the same completions.
    """

    Config = TransformersEngineConfig
    inflight = True
    lends = True

    device: torch.device
    """The device of weights, cache and sampling."""
    decoder: Any
    """A FastDecoder or GenericDecoder; None before `start`."""
    split: Split
    """This rank's part of the model."""
    store: WeightStore
    """The decoder's weights, by canonical name."""
    _run: Run | None
    """The requests under way; None without any."""
    _waiting: list[Request]
    """Requests that entered and are in no run yet."""

    def __init__(self, model, config, context):
        super().__init__(model, config, context)
        self.device = torch.device(context.device)
        self.decoder = None
        self._run = None
        self._waiting = []

    def start(self) -> None:
        """Build the decoder, with empty storage for its weights.

        Raises ModelError for a model that is no policy, or that does not fit `fast = true` or the
        generation layout. Collective under tensor parallelism, for it makes the process groups.
        """
        hf_config = policy_config(self.model)
        reason = unfit(hf_config)
        if self.config.fast and reason is not None:
            raise ModelError(
                f"the fast decoder cannot run this model: {reason}; "
                "set fast = false, or leave it out"
            )
        if self.config.fast is False:
            reason = "fast = false"

        # `reason` now says why the fast decoder is not used; None means that it is.
        dtype = getattr(torch, self.config.dtype)
        self.split = Split.of(self.context, hf_config, reason)
        if reason is None:
            shapes, ties = saved_parameters(hf_config)
            weights = LlamaWeights(hf_config, shapes, dtype, self.device, self.split)
            places = weights.places
            self.decoder = FastDecoder(hf_config, weights, dtype, self.device)
        else:
            self.decoder = GenericDecoder(hf_config, dtype, self.device)
            places = self.decoder.places
            ties = self.decoder.ties
        self.store = WeightStore(places, ties, self.split)

        text_config = hf_config.get_text_config()
        self.max_positions = getattr(text_config, "max_position_embeddings", None)
        self.vocab = text_config.vocab_size

    # --- weights ---

    def layout(self) -> WeightLayout:
        """Return the boxes that every rank of the actor holds."""
        return self.store.layout()

    def view(self, name: str, box: Box) -> torch.Tensor | None:
        """Return the storage of a box that this rank holds, to write to.

        None for parameters in `layout().opaque`. The view need not be contiguous. Whoever writes to
        it reports that by `receive(name, box, view)`, which then copies nothing.
        """
        self._check_awake("looking at its weights")
        return self.store.view(name, box)

    def read(self, name: str, box: Box) -> torch.Tensor:
        """Return the values of a box that this rank holds, in canonical order.

        The result is a view where there is one, else a copy.
        """
        self._check_awake("reading its weights")
        return self.store.read(name, box)

    def _check_awake(self, before: str) -> None:
        """Raise HybridFlowError while the engine sleeps."""
        if self.asleep:
            raise HybridFlowError(f"the rollout engine sleeps; wake it before {before}")

    def lend(self, name: str) -> None:
        """Note that the trainer keeps its weights in this storage, so that `sleep` leaves it."""
        self.store.lend(name)

    def begin_update(self, version: int) -> None:
        """Begin to take weights of a new version."""
        super().begin_update(version)
        self.store.begin()

    def receive(
        self,
        name: str,
        box: Box,
        tensor: torch.Tensor,
    ) -> None:
        """Copy the values of a box in; raises HybridFlowError for a box that is not held here."""
        self.check_updating(name)
        self.store.receive(name, box, tensor)

    def written(self, name: str) -> int | None:
        """Return the version of the last update where that has brought the parameter."""
        return self._next_version if self.store.arrived.whole(name) else None

    def end_update(self) -> None:
        """End an update; raises HybridFlowError where it was incomplete."""
        self.check_updating("end_update")
        self.store.end()
        super().end_update()

    def release(self) -> None:
        """Free the KV cache, and on a GPU the weights too: the trainer needs their memory."""
        self.decoder.free()
        if self.device.type != "cpu":
            self.store.drop()

    def resume(self, weights: bool, cache: bool) -> None:
        """Allocate dropped weights again; the cache is made by each generation."""
        if weights:
            self.store.restore()

    # --- generation ---

    def enter(self, request: Request) -> None:
        """Queue a request for the next call of `advance`."""
        self._waiting.append(request)

    def advance(self) -> list[Completion]:
        """Decode some tokens for every running sequence; return the completions of finished ones.

        Requests that come while others run join them if they fit into what was reserved.
        """
        # Requests enter a new run, or join the present one where all of them fit.
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
            # A run that failed midway cannot go on, so its requests are forgotten.
            self.running.clear()
            self._run = None
            self._waiting = []
            raise

    def _begin(self) -> Run:
        """Start a run of all waiting requests, with a cache that the longest of them fits into."""
        requests = self._waiting
        self._waiting = []

        # Every row has room for the longest request, and for what it may make beyond its end.
        lengths = [len(request.prompt_ids) + request.sampling.max_tokens for request in requests]
        capacity = max(lengths) + self.config.limits(self.device.type).spare_tokens
        slots = min(self._slots(capacity), max(len(requests), FEWEST_SLOTS))
        self.decoder.reserve(slots, capacity)
        return Run(
            self.decoder,
            requests,
            slots,
            self.config,
            self.device,
            self.split,
        )

    def leave(self, ids: Sequence[int]) -> Iterable[Completion]:
        """Abort requests; those that were still waiting are returned, the others by `advance`."""
        waiting = [request for request in self._waiting if request.id in ids]
        self._waiting = [request for request in self._waiting if request.id not in ids]
        if self._run is not None:
            self._run.abort(ids)
        return [Completion(request.id, *request.prefix(), "abort") for request in waiting]

    def _slots(self, capacity: int) -> int:
        """Return how many sequences of `capacity` tokens are decoded at once."""
        limit = self.config.kv_memory_gb * 1e9
        # All ranks need the same number, so the rank with the least memory decides.
        if limit == 0:
            if self.device.type == "cpu":
                limit = CPU_CACHE_GB * 1e9
            else:
                limit = self.split.least(0.7 * self._free_on_device(), self.device)
        fitting = max(1, int(limit // self.decoder.row_bytes(capacity)))
        return min(self.config.max_sequences or 256, fitting)

    def _free_on_device(self) -> int:
        """Return the bytes of the GPU that a KV cache may take.

        These are the free ones, those that torch keeps unused, and the cache of the last call.
        """
        reserved = torch.cuda.memory_reserved(self.device)
        allocated = torch.cuda.memory_allocated(self.device)
        unused = reserved - allocated

        cache = self.decoder.cache
        cache_bytes = cache.nbytes if isinstance(cache, torch.Tensor) else 0
        free, _ = torch.cuda.mem_get_info(self.device)
        return free + unused + cache_bytes
