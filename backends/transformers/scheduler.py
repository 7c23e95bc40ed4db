"""Schedules requests: waiting ones enter the decoder's rows, and finished ones leave.

A row is a sequence in the decoder's batch. Its output is in a home (outputs.py), which does not
move when rows do:

    waiting         rows (decoder)            homes (outputs)
    5, 6, 7  --->   0  request 3  home 3      0  spare: for further tokens of dead rows
                    1  request 0  dead        1  free
                    2  request 4  home 2      2  tokens of request 4
                                              3  tokens of request 3

Rows of finished requests (dead rows) are decoded until the next compaction, so that not every
finished sequence moves the others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator
from itertools import islice
from typing import Any

import numpy as np
import torch

from hybridflow.backends.transformers.config import MAX_BURST, TransformersEngineConfig
from hybridflow.backends.transformers.outputs import SPARE, Outputs
from hybridflow.backends.transformers.parallel import WHOLE, Split
from hybridflow.backends.transformers.sampler import TokenSampler
from hybridflow.core.contracts.footprint import EngineLimits
from hybridflow.core.contracts.rollout import Completion, Request
from hybridflow.core.errors import HybridFlowError


def _row_type(stops: int) -> np.dtype:
    """Return the dtype of a row: its request, home, length so far, and sampling parameters.

    Its field `need` is the number of columns of the cache that it may take. `stops` is the largest
    number of stop tokens; unused entries are -1.
    """
    integers = ("request", "home", "need", "length", "limit", "seed", "top_k")
    floats = ("temperature", "top_p", "min_p")
    fields: list[Any] = [
        *((name, np.int64) for name in integers),
        *((name, np.float32) for name in floats),
        ("alive", bool),
        ("stops", np.int64, (stops,)),
    ]
    return np.dtype(fields, align=True)


class Scheduler:
    """The requests of one decoder. Each one's completion comes out of `turn` or `abort` once.

    A request enters as soon as there is room for it beside the running ones. The ranks of a model
    cut by tensor parallelism (`split`) take the same steps, so nothing here may depend on time, nor
    on a rank's own memory.
    """

    decoder: Any
    """A FastDecoder or GenericDecoder."""
    limits: EngineLimits
    """Largest number of rows, memory of the cache, and tokens of a row beyond its end."""
    waiting: deque[Request]
    """Requests that have no row yet, in the order of their arrival."""
    running: dict[int, Request]
    """Requests of the live rows, by id."""

    rows: np.ndarray
    """The decoder's rows, of `_row_type`, [R]."""
    tokens: torch.Tensor
    """Each row's latest token, which the decoder has not processed yet, int64 [R]."""
    sampler: Any
    """The sampler of the present rows; None after the rows have changed."""
    version: int
    """Version of the weights in this turn."""
    budget: float
    """Limit of the bytes of keys and values; updated whenever there is no live row."""

    outputs: Outputs
    """The tokens of the live rows."""

    def __init__(
        self,
        decoder,
        config: TransformersEngineConfig,
        device: torch.device,
        split: Split = WHOLE,
    ):
        self.decoder = decoder
        self.config = config
        self.device = device
        self.split = split
        self.limits = config.limits(device.type)

        self.waiting = deque()
        self.running = {}
        self.rows = np.zeros(0, _row_type(0))
        self.tokens = torch.zeros(0, dtype=torch.int64, device=device)
        self.sampler = None
        self.outputs = Outputs()

    def add(self, request: Request) -> None:
        """Queue a request."""
        self.waiting.append(request)

    def turn(self, version: int) -> list[Completion]:
        """Prefill some waiting requests, or else decode some tokens for every row.

        `version` is that of the weights. Returns the completions of finished requests.
        """
        self.version = version
        count, capacity = self._fitting()
        if self._is_worthwhile(count):
            return self._admit(count, capacity)
        return self._decode() if self.running else []

    def abort(self, ids: Collection[int]) -> list[Completion]:
        """End these requests; return their completions, running ones first."""
        chosen = [bool(row["alive"]) and int(row["request"]) in ids for row in self.rows]
        rows = _pick(self.rows, np.array(chosen, bool))
        completions = [self._close(row, "abort") for _, row in rows]

        unstarted = [request for request in self.waiting if request.id in ids]
        self.waiting = deque(request for request in self.waiting if request.id not in ids)
        completions += [Completion(request.id, *request.prefix(), "abort") for request in unstarted]
        return completions

    def partial(self, number: int) -> np.ndarray:
        """Return the tokens of a request so far, int64 [T]; none while it waits."""
        places = np.flatnonzero(self.rows["alive"] & (self.rows["request"] == number))
        if len(places) == 0:
            return np.zeros(0, np.int64)
        row = self.rows[places[0]]
        return self.outputs.tokens[int(row["home"]), : int(row["length"])].copy()

    # --- requests in ---

    def _fitting(self) -> tuple[int, int]:
        """Return the number of waiting requests that fit, and the columns that a row needs then.

        Rows are equally long in memory, so each one has room for the longest.
        """
        live = len(self.running)
        free = self.limits.max_sequences - live
        if not self.waiting or free == 0 or (live and not self.decoder.joins):
            return 0, 0

        needs = [self._need(request) for request in islice(self.waiting, free)]
        longest = self.rows["need"].max(initial=0)
        capacities = np.maximum.accumulate([longest, *needs])[1:]
        rows = np.arange(live + 1, live + 1 + len(needs))
        count = int((rows * self.decoder.row_bytes(capacities) <= self._room()).sum())
        # A request by itself always runs.
        if not live:
            count = max(count, 1)
        return count, int(capacities[count - 1]) if count else 0

    def _need(self, request: Request) -> int:
        """Return the number of columns of the cache that a request may take."""
        return len(request.prompt_ids) + request.sampling.max_tokens + self.limits.spare_tokens

    def _room(self) -> float:
        """Return the bytes of keys and values that can be allocated now.

        If there are live rows, a larger cache is allocated while the present one exists.
        """
        if not self.running:
            self.budget = self._budget()
            return self.budget
        reserved = self.decoder.reserved_bytes
        return max(reserved, self.budget - reserved)

    def _budget(self) -> float:
        """Return the limit of the cache in bytes."""
        if self.limits.cache_gb is not None:
            return self.limits.cache_gb * 1e9

        # These are the free bytes, those that torch keeps unused, and the present cache. All ranks
        # need the same number, so the rank with the least memory decides.
        module = torch.get_device_module(self.device)
        unused = module.memory_reserved(self.device) - module.memory_allocated(self.device)
        free, _ = module.mem_get_info(self.device)
        available = free + unused + self.decoder.reserved_bytes
        return self.split.least(0.7 * available, self.device)

    def _is_worthwhile(self, count: int) -> bool:
        """Return whether to prefill `count` waiting requests now."""
        if count == 0 or not self.running:
            return count > 0
        # A prefill delays the live rows, so it waits for 1/8 of all, or for the last requests.
        return count == len(self.waiting) or count * 8 >= len(self.running) + count

    def _admit(self, count: int, capacity: int) -> list[Completion]:
        """Prefill up to `count` waiting requests into new rows, and sample their first tokens."""
        self._compact()
        old = len(self.rows)
        self._reserve(old + count, capacity)
        contexts, groups = self._next_groups(count)
        repeats = [len(group) for group in groups]
        logits = self.decoder.admit(contexts, repeats)

        # The decoder has repeated each context for its group, in this order.
        new = self._make_rows([request for group in groups for request in group])
        self.rows = np.concatenate([self.rows, new])
        self.sampler = None

        # This sampler is used once; `_decode` makes one for all rows.
        sampler = self._sampler(new)
        tokens, logprobs = self._sample(sampler, new["length"], logits)
        self.tokens = torch.cat([self.tokens, tokens])
        return self._record(old, tokens[None], logprobs[None])

    def _reserve(self, rows: int, capacity: int) -> None:
        """Allocate cache and outputs for `rows` rows, for the first waiting requests."""
        decoder = self.decoder
        live = len(self.rows)
        if not live or decoder.rows < rows or decoder.capacity < capacity:
            # Some spare rows: requests that arrive one by one do not move the live rows each time.
            wanted = min(self.limits.max_sequences, max(live + len(self.waiting), 2 * live))
            fitting = int(self._room() // decoder.row_bytes(capacity))
            decoder.reserve(max(rows, min(wanted, fitting)), capacity)

        sampling = [request.sampling for request in islice(self.waiting, rows - live)]
        width = max(params.max_tokens for params in sampling) + MAX_BURST
        self.outputs.reserve(decoder.rows, width)
        stops = max(len(params.stop_token_ids) for params in sampling)
        if stops > self.rows["stops"].shape[1]:
            self._widen_stops(stops)

    def _widen_stops(self, stops: int) -> None:
        """Change the dtype of `rows` so that each has `stops` entries for stop tokens."""
        old = self.rows
        self.rows = np.zeros(len(old), _row_type(stops))
        for name in old.dtype.names or ():
            if name != "stops":
                self.rows[name] = old[name]
        self.rows["stops"] = -1
        self.rows["stops"][:, : old["stops"].shape[1]] = old["stops"]

    def _sampler(self, rows: np.ndarray) -> TokenSampler:
        """Return a sampler for these rows."""
        requests = [self.running.get(number) for number in rows["request"].tolist()]
        biases = [request.sampling.logit_bias if request else () for request in requests]
        return TokenSampler(rows, self.device, biases)

    @torch.inference_mode()
    def _sample(
        self,
        sampler: TokenSampler,
        lengths: np.ndarray,
        logits: torch.Tensor,
    ):
        """Sample one token for each row; return tokens and log-probabilities [R]."""
        uniforms = sampler.uniforms(lengths, 1)
        uniform = None if uniforms is None else uniforms[0]
        tokens, logprobs = sampler(logits, uniform)
        return self.split.agreed(tokens), self.split.agreed(logprobs)

    def _next_groups(self, count: int) -> tuple[list[np.ndarray], list[list[Request]]]:
        """Take up to `count` waiting requests; return their contexts, and each one's requests.

        Neighbours with equal contexts form one group. A prefill is padded to its longest context,
        and `prefill_tokens` limits its size with padding. The longest context comes first, so that
        rows of similar lengths are neighbours.
        """
        contexts: list[np.ndarray] = []
        groups: list[list[Request]] = []
        longest = 0
        while self.waiting and count > 0:
            context = self.waiting[0].context()
            if not contexts or not np.array_equal(context, contexts[-1]):
                longest = max(longest, len(context))
                padded = longest * (len(contexts) + 1)
                # A context that is too long by itself is prefilled alone.
                if contexts and padded > self.config.prefill_tokens:
                    break
                contexts.append(context)
                groups.append([])
            groups[-1].append(self.waiting.popleft())
            count -= 1
        order = sorted(range(len(contexts)), key=lambda i: -len(contexts[i]))
        return [contexts[i] for i in order], [groups[i] for i in order]

    def _make_rows(self, requests: list[Request]) -> np.ndarray:
        """Return new rows for requests, which are running from now on."""
        self.running.update((request.id, request) for request in requests)
        rows = np.zeros(len(requests), self.rows.dtype)
        # Which requests they are, and where their output goes
        rows["request"] = [request.id for request in requests]
        homes = [self.outputs.take(request) for request in requests]
        rows["home"], rows["length"] = np.array(homes).T
        rows["need"] = [self._need(request) for request in requests]
        rows["alive"] = True

        # How they are sampled. Seeds may be any int; the lower 64 bits count.
        seeds = [request.seed & (2**64 - 1) for request in requests]
        rows["seed"] = np.array(seeds, np.uint64).astype(np.int64)
        sampling = [request.sampling for request in requests]
        for name in ("top_k", "temperature", "top_p", "min_p"):
            rows[name] = [getattr(params, name) for params in sampling]

        # Where they end
        rows["limit"] = [params.max_tokens for params in sampling]
        rows["stops"] = -1
        for stops, params in zip(rows["stops"], sampling, strict=True):
            if params.stop_token_ids and not params.ignore_stop:
                stops[: len(params.stop_token_ids)] = params.stop_token_ids
        return rows

    # --- tokens ---

    def _decode(self) -> list[Completion]:
        """Decode some tokens for every row, without waiting for the device in between."""
        steps = self._burst()

        # Dead rows are removed when they are 1/16 of all, or when their lanes would overflow.
        dead = len(self.rows) - len(self.running)
        full = self.decoder.longest + steps > self.decoder.capacity
        if dead * 16 >= len(self.rows) or (dead and full):
            self._compact()

        if self.sampler is None:
            self.sampler = self._sampler(self.rows)
        tokens, logprobs = self._run_steps(steps)
        self.tokens = tokens[-1]
        return self._record(0, tokens, logprobs)

    @torch.inference_mode()
    def _run_steps(self, steps: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Decode `steps` tokens for every row; return tokens and log-probabilities [steps, R]."""
        uniforms = self.sampler.uniforms(self.rows["length"], steps)
        tokens = []
        logprobs = []
        last = self.tokens
        for step in range(steps):
            uniform = None if uniforms is None else uniforms[step]
            # The logits have no name, so that they are freed before the next ones are made.
            last, logprob = self.sampler(self.decoder.step(last), uniform)
            last = self.split.agreed(last)
            tokens.append(last)
            logprobs.append(logprob)
        return torch.stack(tokens), self.split.agreed(torch.stack(logprobs))

    def _burst(self) -> int:
        """Return the number of tokens until the next check for finished rows.

        Tokens of a row that stops inside a burst are dropped until the burst ends.
        """
        live = self.rows[self.rows["alive"]]
        remaining = live["limit"] - live["length"]

        # No burst goes beyond the end of the last row.
        if self.config.sync_every:
            return min(self.config.sync_every, MAX_BURST, int(remaining.max()))
        if self.device.type != "cpu":
            return min(16, int(remaining.max()))

        # Where no row has stop tokens, the first possible end is known.
        if (live["stops"] < 0).all():
            return min(MAX_BURST, int(remaining.min()))
        return 1

    def _compact(self) -> None:
        """Remove dead rows: the live rows become 0 .. n-1, in the order of `decoder.order`."""
        if len(self.running) == len(self.rows):
            return
        index = self.decoder.order(self.rows["alive"])
        self.decoder.keep(index)
        self.rows = self.rows[index]
        indices = torch.from_numpy(index).to(self.device)
        self.tokens = self.tokens[indices]
        self.sampler = None

    # --- completions out ---

    def _record(
        self,
        first: int,
        tokens: torch.Tensor,
        logprobs: torch.Tensor,
    ) -> list[Completion]:
        """Store the tokens [K, R] of rows from `first` on; return completions of rows that ended.

        A row ends with its first stop token or at its length limit; tokens after that are ignored.
        Raises HybridFlowError for log-probabilities that are not finite.
        """
        # Here the host waits for the device.
        sampled = tokens.cpu().numpy()
        scores = logprobs.cpu().numpy()
        rows = self.rows[first:]
        steps = len(sampled)
        if not np.isfinite(scores).all():
            self._not_finite(rows, scores)

        # All tokens are stored; the lengths decide later which of them count.
        self.outputs.store(rows["home"], rows["length"], sampled, scores, self.version)

        # until: the tokens up to and with the first stop token, or steps + 1 where there is none.
        stops = (sampled[:, :, None] == rows["stops"]).any(-1)
        first_stop = stops.argmax(0)
        until = np.where(stops.any(0), first_stop + 1, steps + 1)
        remaining = rows["limit"] - rows["length"]
        taken = np.minimum(np.minimum(until, steps), remaining)
        rows["length"] += taken

        stopped = until == taken
        full = rows["length"] == rows["limit"]
        ended = rows["alive"] & (stopped | full)
        completions = []
        for i, row in _pick(rows, ended):
            reason = "stop" if stopped[i] else "length"
            completions.append(self._close(row, reason))
        return completions

    def _close(self, row: np.void, reason: str) -> Completion:
        """Return a row's completion; the row stays in the decoder until the next compaction."""
        number, home, length = int(row["request"]), int(row["home"]), int(row["length"])
        del self.running[number]

        # A dead row writes to the spare home, and its length stays 0.
        row["alive"] = False
        row["home"] = SPARE
        row["need"] = 0
        row["length"] = 0
        row["limit"] = 0
        row["stops"] = -1
        return self.outputs.give(home, length, number, reason)

    def _not_finite(self, rows: np.ndarray, scores: np.ndarray) -> None:
        """Raise HybridFlowError for the first row with a NaN or infinite log-probability."""
        finite = np.isfinite(scores).all(0)
        row = rows[int(np.flatnonzero(~finite)[0])]

        # A NaN left in the cache would reach later sequences through masked columns.
        self.decoder.free()
        raise HybridFlowError(
            f"request {int(row['request'])}: the model gave log-probabilities that are not finite "
            f"at response token {int(row['length'])}, with weights of version "
            f"{self.version}; look for NaN in the weights"
        )


def _pick(
    rows: np.ndarray,
    chosen: np.ndarray,
) -> Iterator[tuple[int, np.void]]:
    """Yield (index, row) where `chosen` is true; writing to a row writes to `rows`."""
    for i in np.flatnonzero(chosen):
        yield int(i), rows[i]
