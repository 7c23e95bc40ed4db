"""Requests under way: waiting requests enter the decoder's rows, and finished ones leave.

A row is a sequence in the decoder's batch. Its output lies in a home, a row of the output arrays
that stays where it is while rows move:

    queue           rows (decoder)                    homes (outputs)
    5, 6, 7  --->   0  request 3  home 2   - - - ->   0  free
                    1  request 0  dead     - -.       1  tokens of request 4
                    2  request 4  home 1       \      2  tokens of request 3
                                                `->   3  spare: takes what dead rows go on to make

Dead rows are decoded on until they are compacted away. Work thus follows the live rows, without
moving anything after each token.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from hybridflow.backends.transformers.config import MAX_BURST
from hybridflow.backends.transformers.parallel import WHOLE, Split
from hybridflow.backends.transformers.sampler import Sampler
from hybridflow.core.contracts.rollout import Completion, Request
from hybridflow.core.errors import HybridFlowError


def _row_type(stops: int) -> np.dtype:
    """Return the type of a row: its request, home, length so far, and sampling parameters.

    `stops` is the largest number of stop tokens; unused places hold -1.
    """
    integers = ("request", "home", "length", "limit", "seed", "top_k")
    floats = ("temperature", "top_p", "min_p")
    fields: list[Any] = [
        *((name, np.int64) for name in integers),
        *((name, np.float32) for name in floats),
        ("alive", bool),
        ("stops", np.int64, (stops,)),
    ]
    return np.dtype(fields, align=True)


class Run:
    """Requests that run together. Each one's completion comes out of `turn` exactly once.

    The ranks of a model cut by tensor parallelism (`split`) go through the same steps, so nothing
    here may depend on time or on a rank's memory.
    """

    decoder: Any
    """A FastDecoder or GenericDecoder with reserved rows."""
    slots: int
    """Largest number of rows."""
    requests: list[Request]
    """All requests of the run, in the order in which they came."""
    queue: deque[int]
    """Indices of waiting requests."""
    open: set[int]
    """Ids of requests without a completion."""
    _to_abort: set[int]
    """Ids of requests that the next turn ends."""

    rows: np.ndarray
    """The decoder's rows, of `_row_type`, [R]."""
    tokens: torch.Tensor
    """Each row's latest token, which the decoder has not seen yet, int64 [R]."""
    sampler: Any
    """The sampler of the present rows; None after they changed."""
    version: int
    """Version of the weights in this turn."""

    homes: list[int]
    """Free homes."""
    out_tokens: np.ndarray
    """Response tokens of each home, int64 [slots + 1, longest response]."""
    out_logprobs: np.ndarray
    """Their log-probabilities, float32 of the same shape."""
    out_versions: np.ndarray
    """Versions of the weights that made them, int64 of the same shape."""

    def __init__(
        self,
        decoder,
        requests: Sequence[Request],
        slots: int,
        config,
        device: torch.device,
        split: Split = WHOLE,
    ):
        """Take a decoder with `slots` rows reserved, each with room for any of the requests."""
        self.decoder = decoder
        self.slots = slots
        self.config = config
        self.device = device
        self.split = split

        self.requests = list(requests)
        self.queue = deque(range(len(requests)))
        self.open = {request.id for request in requests}
        self._to_abort = set()

        # Later requests join only if they fit into these sizes too (see `takes`).
        sampling = [request.sampling for request in requests]
        stops = max((len(params.stop_token_ids) for params in sampling), default=0)
        width = max((params.max_tokens for params in sampling), default=0) + MAX_BURST

        self.rows = np.zeros(0, _row_type(stops))
        self.tokens = torch.zeros(0, dtype=torch.int64, device=device)
        self.sampler = None

        # The last row of outputs is the spare home, which is never free.
        self.homes = list(range(slots))
        size = (slots + 1, width)
        self.out_tokens = np.zeros(size, np.int64)
        self.out_logprobs = np.zeros(size, np.float32)
        self.out_versions = np.zeros(size, np.int64)

    def abort(self, ids: Iterable[int] | None) -> None:
        """Let the next turn end these requests; None stands for all."""
        if ids is None:
            self._to_abort |= self.open
        else:
            self._to_abort |= self.open.intersection(ids)

    @property
    def over(self) -> bool:
        """Whether no request waits or runs."""
        return not self.queue and not self.rows["alive"].any()

    def takes(self, request: Request) -> bool:
        """Return whether a further request fits into what was reserved for the first ones."""
        sampling = request.sampling
        margin = self.config.limits(self.device.type).spare_tokens
        return (
            len(request.prompt_ids) + sampling.max_tokens + margin <= self.decoder.capacity
            and sampling.max_tokens + MAX_BURST <= self.out_tokens.shape[1]
            and len(sampling.stop_token_ids) <= self.rows["stops"].shape[1]
        )

    def extend(self, requests: Sequence[Request]) -> None:
        """Add further requests, all of which `takes` must accept."""
        first = len(self.requests)
        self.queue.extend(range(first, first + len(requests)))
        self.requests.extend(requests)
        self.open.update(request.id for request in requests)

    def turn(self, version: int) -> list[Completion]:
        """Abort requests, or else prefill some, or else decode some tokens for every row.

        `version` is that of the weights. Returns the completions of what ended.
        """
        if self._to_abort:
            return self._aborted()
        if self.over:
            return []
        self.version = version
        return self._admit() if self._can_admit() else self._decode()

    # --- requests in ---

    def _can_admit(self) -> bool:
        """Return whether to prefill now: with an idle decoder, or enough free slots for a batch."""
        alive = int(self.rows["alive"].sum())
        if not self.queue or alive == 0:
            return bool(self.queue)

        # A prefill holds up the live rows, so it waits for 1/8 of the slots, or for the last ones.
        free = self.slots - alive
        enough = min(max(1, self.slots // 8), len(self.queue))
        return self.decoder.joins and free >= enough

    def _admit(self) -> list[Completion]:
        """Prefill waiting requests into new rows, and sample their first tokens."""
        self._compact()
        old = len(self.rows)
        contexts, groups = self._next_groups(self.slots - old)
        repeats = [len(group) for group in groups]
        logits = self.decoder.admit(contexts, repeats)

        # The decoder has repeated each context for its group, in this order.
        parts: list[Any] = [np.zeros(0, self.rows.dtype)]
        for group in groups:
            parts.append([self._row(index) for index in group])
        new = np.concatenate(parts)
        self.rows = np.concatenate([self.rows, new])
        self.sampler = None

        # Their sampler serves once; `_decode` makes one for all rows.
        sampler = self._sampler(new)
        tokens, logprobs = self._sample(sampler, new["length"], logits)
        self.tokens = torch.cat([self.tokens, tokens])
        return self._record(old, tokens[None], logprobs[None])

    def _sampler(self, rows: np.ndarray) -> Sampler:
        """Return a sampler for these rows."""
        requests = [self.requests[index] for index in rows["request"]]
        biases = [request.sampling.logit_bias for request in requests]
        return Sampler(rows, self.device, biases)

    @torch.inference_mode()
    def _sample(
        self,
        sampler: Sampler,
        lengths: np.ndarray,
        logits: torch.Tensor,
    ):
        """Sample one token for each row; return tokens and log-probabilities [R]."""
        uniforms = sampler.uniforms(lengths, 1)
        uniform = None if uniforms is None else uniforms[0]
        tokens, logprobs = sampler(logits, uniform)
        return self.split.agreed(tokens), self.split.agreed(logprobs)

    def _next_groups(self, free: int) -> tuple[list[np.ndarray], list[list[int]]]:
        """Take up to `free` waiting requests; return their contexts, and each one's requests.

        Neighbours with equal contexts form one group. A prefill is padded to its longest context,
        and `prefill_tokens` limits its size with padding.
        """
        contexts: list[np.ndarray] = []
        groups: list[list[int]] = []
        longest = 0
        while self.queue and free > 0:
            context = self.requests[self.queue[0]].context()
            previous = contexts[-1] if contexts else None
            same = context is previous
            if same or (previous is not None and np.array_equal(context, previous)):
                groups[-1].append(self.queue.popleft())
            else:
                longest = max(longest, len(context))
                padded = longest * (len(contexts) + 1)
                # A context that is too long by itself is prefilled alone.
                if contexts and padded > self.config.prefill_tokens:
                    break
                contexts.append(context)
                groups.append([self.queue.popleft()])
            free -= 1
        return contexts, groups

    def _row(self, index: int) -> np.ndarray:
        """Make the row of a request, and write its prefix into a free home."""
        request = self.requests[index]
        sampling = request.sampling
        home = self.homes.pop()
        row: Any = np.zeros((), self.rows.dtype)
        # Which request it is, and where its output goes
        row["request"] = index
        row["home"] = home
        row["alive"] = True

        # How it is sampled, and where it ends
        row["limit"] = sampling.max_tokens
        row["top_k"] = sampling.top_k
        row["temperature"] = sampling.temperature
        row["top_p"] = sampling.top_p
        row["min_p"] = sampling.min_p
        # Seeds may be any int; the lower 64 bits count.
        low_bits = request.seed & (2**64 - 1)
        row["seed"] = np.uint64(low_bits).astype(np.int64)
        row["stops"] = -1
        if not sampling.ignore_stop:
            count = len(sampling.stop_token_ids)
            row["stops"][:count] = sampling.stop_token_ids

        # What was made earlier
        ids, logprobs, versions = request.prefix()
        length = len(ids)
        row["length"] = length
        self.out_tokens[home, :length] = ids
        self.out_logprobs[home, :length] = logprobs
        self.out_versions[home, :length] = versions
        return row

    # --- tokens ---

    def _decode(self) -> list[Completion]:
        """Decode some tokens for every row, without waiting for the device in between."""
        steps = self._burst()

        # Dead rows go when they are 1/16 of all, or when their lanes would overflow.
        alive = int(self.rows["alive"].sum())
        dead = len(self.rows) - alive
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
        """Return the number of tokens until the next look at what has finished.

        A row that stops inside a burst makes tokens in vain until the burst ends.
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
        """Make the live rows rows 0 .. n-1: rows from the end fill the holes."""
        alive = self.rows["alive"]
        count = int(alive.sum())
        if count == len(self.rows):
            return

        # index: the old row of each new one.
        index = np.arange(count)
        holes = np.flatnonzero(~alive[:count])
        index[holes] = count + np.flatnonzero(alive[count:])

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
        """Store what rows `first` .. sampled, [K, R]; return the completions of rows that ended.

        A row ends with its first stop token or at its length limit; tokens behind that do not
        count. Raises HybridFlowError for log-probabilities that are not finite.
        """
        # Here the host waits for the device.
        sampled = tokens.cpu().numpy()
        scores = logprobs.cpu().numpy()
        rows = self.rows[first:]
        steps = len(sampled)
        if not np.isfinite(scores).all():
            self._not_finite(rows, scores)

        # Everything is stored, and the lengths say later what of it counts.
        columns = rows["length"][:, None] + np.arange(steps)
        homes = rows["home"][:, None]
        self.out_tokens[homes, columns] = sampled.T
        self.out_logprobs[homes, columns] = scores.T
        self.out_versions[homes, columns] = self.version

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
        """Take a row's output; the row stays in the decoder, dead, until the next compaction."""
        request = self.requests[row["request"]]
        home = int(row["home"])
        length = int(row["length"])
        self.open.discard(request.id)
        self.homes.append(home)

        # A dead row writes to the spare home, and its length stays 0.
        row["alive"] = False
        row["home"] = self.slots
        row["length"] = 0
        row["limit"] = 0
        row["stops"] = -1

        outputs = (self.out_tokens, self.out_logprobs, self.out_versions)
        ids, logprobs, versions = (output[home, :length].copy() for output in outputs)
        return Completion(request.id, ids, logprobs, versions, reason)

    def _unstarted(self, index: int, reason: str) -> Completion:
        """Return the completion of a request that never ran: its prefix."""
        request = self.requests[index]
        self.open.discard(request.id)
        return Completion(request.id, *request.prefix(), reason)

    def _aborted(self) -> list[Completion]:
        """End the requests that are to be aborted; running ones come first."""
        ids = self._to_abort & self.open
        self._to_abort = set()

        def chosen(index: int) -> bool:
            return self.requests[index].id in ids

        # Dead rows are closed already.
        running = [bool(row["alive"]) and chosen(row["request"]) for row in self.rows]
        rows = _pick(self.rows, np.array(running, bool))
        completions = [self._close(row, "abort") for _, row in rows]

        waiting = [index for index in self.queue if chosen(index)]
        self.queue = deque(index for index in self.queue if not chosen(index))
        return completions + [self._unstarted(index, "abort") for index in waiting]

    def _not_finite(self, rows: np.ndarray, scores: np.ndarray) -> None:
        """Raise HybridFlowError for the first row with a NaN or infinite log-probability."""
        finite = np.isfinite(scores).all(0)
        row = rows[int(np.flatnonzero(~finite)[0])]
        request = self.requests[row["request"]]

        # A NaN left in the cache would reach later sequences through masked columns.
        self.decoder.free()
        raise HybridFlowError(
            f"request {request.id}: the model gave log-probabilities that are not finite at "
            f"response token {int(row['length'])}, with weights of version "
            f"{self.version}; look for NaN in the weights"
        )


def _pick(
    rows: np.ndarray,
    chosen: np.ndarray,
) -> Iterator[tuple[int, np.void]]:
    """Yield (index, row) where `chosen` holds; writing to a row writes to `rows`."""
    for i in np.flatnonzero(chosen):
        yield int(i), rows[i]
