"""The embedded rollout engine, which is the default one.

It generates in the worker's own process, with its own copy of the weights:

    enter(request) -> Scheduler (scheduler.py): waiting requests, rows of a batch
                       |- decoder: tokens -> logits (decoder.py, generic.py)
                       |- Sampler: logits -> tokens (sampler.py)
    advance()      <- completions
    receive(name, box, values) -> WeightStore (weights.py) -> the decoder's weights
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from hybridflow.backends.transformers.config import TransformersEngineConfig
from hybridflow.backends.transformers.decoder import FastDecoder
from hybridflow.backends.transformers.fit import why_generic, why_not
from hybridflow.backends.transformers.generic import GenericDecoder
from hybridflow.backends.transformers.llama import LlamaWeights
from hybridflow.backends.transformers.parallel import Split
from hybridflow.backends.transformers.scheduler import Scheduler
from hybridflow.backends.transformers.weights import WeightStore
from hybridflow.core.contracts.rollout import Completion, Request
from hybridflow.core.errors import HybridFlowError, ModelError
from hybridflow.core.processes.page import moved
from hybridflow.core.values.weights import Box, WeightLayout
from hybridflow.kit.continuous import ContinuousEngine
from hybridflow.kit.hosting.hostable import Hostable
from hybridflow.kit.huggingface.models import policy_config, saved_parameters


class TransformersEngine(ContinuousEngine, Hostable):
    """Llama-like models run on our decoder, other causal models on Hugging Face's code.

    Both share scheduler and sampler. Under tensor parallelism, which only our decoder has, the
    ranks of a replica must make the same calls with the same requests: each rank reads its stream
    to the end, and aborts at the same point of it. All of them yield the same completions.
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
    scheduler: Scheduler
    """The waiting and running requests."""

    def __init__(self, model, config, context):
        super().__init__(model, config, context)
        self.device = torch.device(context.device)
        self.decoder = None

    def start(self) -> None:
        """Build the decoder, with empty storage for its weights.

        Raises ModelError for a model that is no policy, or that does not fit `fast = true` or the
        generation layout. Collective under tensor parallelism, for it makes the process groups.
        """
        hf_config = policy_config(self.model)
        generation = getattr(self.context, "generation", None)
        if (problem := why_not(hf_config, self.config.fast, generation)) is not None:
            raise ModelError(problem)
        reason = why_generic(hf_config, self.config.fast)
        dtype = getattr(torch, self.config.dtype)
        self.split = Split.of(self.context, hf_config)
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
        self._forget()

        text_config = hf_config.get_text_config()
        self.max_positions = getattr(text_config, "max_position_embeddings", None)
        self.vocab = text_config.vocab_size

    # --- weights ---

    def layout(self) -> WeightLayout:
        """Return the boxes that every rank of the actor holds."""
        return self.store.layout()

    def view(self, name: str, box: Box) -> torch.Tensor | None:
        """Return the storage of a box that this rank holds, to write to.

        None for parameters in `layout().opaque`. The view need not be contiguous. After writing to
        it, call `receive(name, box, view)`, which then copies nothing.
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
        """Begin an update to a new version of the weights."""
        super().begin_update(version)
        self.store.begin()

    def receive(
        self,
        name: str,
        box: Box,
        tensor: torch.Tensor,
    ) -> None:
        """Copy the values of a box; raises HybridFlowError unless this rank holds it."""
        self.check_updating(name)
        self.store.receive(name, box, tensor)

    def written(self, name: str) -> int | None:
        """Return the version of the last update if it included the parameter, else None."""
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
        """Queue a request until `advance` has room for it beside the running ones."""
        self.scheduler.add(request)

    def advance(self) -> list[Completion]:
        """Decode some tokens for every running sequence; return the completions of finished ones.

        Waiting requests enter first, where there is room.
        """
        assert self.version is not None
        try:
            done = self.scheduler.turn(self.version)
            moved()
            self._check_none_lost(done)
            return done
        except BaseException:
            # Rows cannot continue after an error in a step, so all requests are dropped.
            self.running.clear()
            self._forget()
            raise

    def _check_none_lost(self, done: Sequence[Completion]) -> None:
        """Raise HybridFlowError for a running request that the scheduler does not have."""
        held = len(self.scheduler.running) + len(self.scheduler.waiting)
        if len(self.running) - len(done) == held:
            return
        kept = {*self.scheduler.running, *(request.id for request in self.scheduler.waiting)}
        lost = sorted(self.running.keys() - kept - {completion.id for completion in done})
        if lost:
            raise HybridFlowError(
                f"the embedded engine has lost requests {', '.join(map(str, lost[:5]))} "
                f"({len(lost)} of {len(self.running)}), and would run for ever; report this"
            )

    def partial(self, number: int) -> np.ndarray:
        """Return the tokens that a running request has made so far."""
        return self.scheduler.partial(number)

    def leave(self, ids: Sequence[int]) -> Iterable[Completion]:
        """Abort requests; return their completions."""
        return self.scheduler.abort(set(ids))

    def _forget(self) -> None:
        """Drop all requests."""
        self.decoder.free()
        self.scheduler = Scheduler(self.decoder, self.config, self.device, self.split)
