"""Requests under way: waiting requests enter the decoder's rows, finished ones leave, and work follows the live rows."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from hybridflow.backends.transformers.parallel import WHOLE, Split
from hybridflow.backends.transformers.sampler import Sampler
from hybridflow.core.contracts.rollout import Completion, Request
from hybridflow.core.errors import HybridFlowError

"""What a completion says of prefix tokens that came without their log-probabilities or versions."""
MAX_BURST = 64


def burst_margin(device: torch.device, config) -> int:
    """Tokens that a row may make beyond its end before somebody looks."""
    return MAX_BURST if device.type != "cpu" or config.sync_every else 0


def _row_type(stops: int) -> np.dtype:
    """One live row: which request, where its output lies (`home`), its length so far, and how it is sampled."""
    whole = [(name, np.int64) for name in ("request", "home", "length", "limit", "seed", "top_k")]
    real = [(name, np.float32) for name in ("temperature", "top_p", "min_p")]
    return np.dtype([*whole, *real, ("alive", bool), ("stops", np.int64, (stops,))], align=True)


class Run:
    """Requests that run together. Each one's completion comes out of `turn` exactly once.

    The ranks of a `split` model go through the same steps: nothing here may depend on time or on a rank's memory.
    """

    def __init__(
        self,
        decoder,
        requests: Sequence[Request],
        slots: int,
        config,
        device: torch.device,
        split: Split = WHOLE,
    ):
        self.decoder, self.slots, self.config, self.device = decoder, slots, config, device
        self.requests = list(requests)
        self.split = split
        self.queue = deque(range(len(requests)))
        self.open = {r.id for r in requests}
        self._to_abort: set[int] = set()
        stops = max((len(r.sampling.stop_token_ids) for r in requests), default=0)
        self.rows = np.zeros(0, _row_type(stops))
        self.tokens = torch.zeros(0, dtype=torch.int64, device=device)
        self.sampler: Any = None  # None after the rows changed
        self.homes = list(range(slots))
        width = max((r.sampling.max_tokens for r in requests), default=0) + MAX_BURST
        self.out_tokens = np.zeros(
            (slots + 1, width), np.int64
        )  # the last home takes what finished rows go on to make
        self.out_logprobs = np.zeros((slots + 1, width), np.float32)
        self.out_versions = np.zeros((slots + 1, width), np.int64)

    def abort(self, ids: Iterable[int] | None) -> None:
        self._to_abort |= self.open if ids is None else self.open.intersection(ids)

    @property
    def over(self) -> bool:
        return not self.queue and not self.rows["alive"].any()

    def takes(self, request: Request) -> bool:
        """Whether a further request fits into what was reserved for the first ones."""
        s, margin = request.sampling, burst_margin(self.device, self.config)
        return (
            len(request.prompt_ids) + s.max_tokens + margin <= self.decoder.capacity
            and s.max_tokens + MAX_BURST <= self.out_tokens.shape[1]
            and len(s.stop_token_ids) <= self.rows["stops"].shape[1]
        )

    def extend(self, requests: Sequence[Request]) -> None:
        """Further requests, all of which it `takes`."""
        self.queue.extend(range(len(self.requests), len(self.requests) + len(requests)))
        self.requests.extend(requests)
        self.open.update(r.id for r in requests)

    def turn(self, version: int) -> list[Completion]:
        """Aborts, or else a prefill, or some tokens for every row; `version` is that of the weights."""
        if self._to_abort:
            return self._aborted()
        if self.over:
            return []
        self.version = version
        return self._admit() if self._can_admit() else self._decode()

    # ---- requests in --------------------------------------------------------------------------------------------

    def _can_admit(self) -> bool:
        alive = int(self.rows["alive"].sum())
        if not self.queue or alive == 0:
            return bool(self.queue)
        free = self.slots - alive
        return self.decoder.joins and free >= min(max(1, self.slots // 8), len(self.queue))

    def _admit(self) -> list[Completion]:
        self._compact()
        old = len(self.rows)
        contexts, groups = self._next_groups(self.slots - old)
        logits = self.decoder.admit(contexts, [len(group) for group in groups])
        new = np.concatenate(
            [np.zeros(0, self.rows.dtype), *([self._row(i) for i in group] for group in groups)]
        )
        self.rows = np.concatenate([self.rows, new])
        self.sampler = None
        tokens, logprobs = self._sample(self._sampler(new), new["length"], logits)
        self.tokens = torch.cat([self.tokens, tokens])
        return self._record(old, tokens[None], logprobs[None])

    def _sampler(self, rows: np.ndarray) -> Sampler:
        return Sampler(
            rows, self.device, [self.requests[i].sampling.logit_bias for i in rows["request"]]
        )

    @torch.inference_mode()
    def _sample(self, sampler: Sampler, lengths: np.ndarray, logits: torch.Tensor):
        drawn = sampler.uniforms(lengths, 1)
        tokens, logprobs = sampler(logits, None if drawn is None else drawn[0])
        return self.split.agreed(tokens), self.split.agreed(logprobs)

    def _next_groups(self, free: int) -> tuple[list[np.ndarray], list[list[int]]]:
        """Take waiting requests, neighbours with equal contexts together, up to the token limit of a prefill."""
        contexts: list[np.ndarray] = []
        groups: list[list[int]] = []
        widest = 0
        while self.queue and free > 0:
            context = self.requests[self.queue[0]].context()
            if contexts and (context is contexts[-1] or np.array_equal(context, contexts[-1])):
                groups[-1].append(self.queue.popleft())
            else:
                widest = max(widest, len(context))
                if contexts and widest * (len(contexts) + 1) > self.config.prefill_tokens:
                    break
                contexts.append(context)
                groups.append([self.queue.popleft()])
            free -= 1
        return contexts, groups

    def _row(self, index: int) -> np.ndarray:
        request, sampling, home = (
            self.requests[index],
            self.requests[index].sampling,
            self.homes.pop(),
        )
        row: Any = np.zeros((), self.rows.dtype)
        row["request"], row["home"], row["alive"] = index, home, True
        row["limit"], row["top_k"] = sampling.max_tokens, sampling.top_k
        row["temperature"], row["top_p"], row["min_p"] = (
            sampling.temperature,
            sampling.top_p,
            sampling.min_p,
        )
        row["seed"] = np.uint64(request.seed & (2**64 - 1)).astype(np.int64)
        row["stops"] = -1
        if not sampling.ignore_stop:
            row["stops"][: len(sampling.stop_token_ids)] = sampling.stop_token_ids
        ids, logprobs, versions = request.prefix()
        row["length"] = k = len(ids)
        self.out_tokens[home, :k], self.out_logprobs[home, :k], self.out_versions[home, :k] = (
            ids,
            logprobs,
            versions,
        )
        return row

    # ---- tokens -------------------------------------------------------------------------------------------------

    def _decode(self) -> list[Completion]:
        """Some tokens for every row, without waiting for the device in between."""
        steps = self._burst()
        dead = len(self.rows) - int(self.rows["alive"].sum())
        if dead * 16 >= len(self.rows) or (
            dead and self.decoder.longest + steps > self.decoder.capacity
        ):
            self._compact()
        if self.sampler is None:
            self.sampler = self._sampler(self.rows)
        tokens, logprobs = self._run_steps(steps)
        self.tokens = tokens[-1]
        return self._record(0, tokens, logprobs)

    @torch.inference_mode()
    def _run_steps(self, steps: int) -> tuple[torch.Tensor, torch.Tensor]:
        uniform = self.sampler.uniforms(self.rows["length"], steps)
        tokens, logprobs, last = [], [], self.tokens
        for step in range(steps):
            last, logprob = self.sampler(
                self.decoder.step(last), None if uniform is None else uniform[step]
            )
            last = self.split.agreed(last)
            tokens.append(last)
            logprobs.append(logprob)
        return torch.stack(tokens), self.split.agreed(torch.stack(logprobs))

    def _burst(self) -> int:
        """Tokens until the next look: a row that stops inside a burst makes tokens for nothing until its end."""
        live = self.rows[self.rows["alive"]]
        remaining = live["limit"] - live["length"]
        if self.config.sync_every:
            return min(self.config.sync_every, MAX_BURST, int(remaining.max()))
        if self.device.type != "cpu":
            return min(16, int(remaining.max()))
        return min(MAX_BURST, int(remaining.min())) if (live["stops"] < 0).all() else 1

    def _compact(self) -> None:
        """Live rows become rows 0 .. n-1: rows from the end fill the holes."""
        alive = self.rows["alive"]
        count = int(alive.sum())
        if count == len(self.rows):
            return
        index = np.arange(count)
        holes = np.flatnonzero(~alive[:count])
        index[holes] = count + np.flatnonzero(alive[count:])
        self.decoder.keep(index)
        self.rows = self.rows[index]
        self.tokens = self.tokens[torch.from_numpy(index).to(self.device)]
        self.sampler = None

    # ---- completions out ----------------------------------------------------------------------------------------

    def _record(self, first: int, tokens: torch.Tensor, logprobs: torch.Tensor) -> list[Completion]:
        """Keep what rows `first`.. made, [K, R], up to each row's end; the completions of those that ended."""
        made, scores = tokens.cpu().numpy(), logprobs.cpu().numpy()
        rows, steps = self.rows[first:], len(made)
        if not np.isfinite(scores).all():
            self._not_finite(rows, scores)
        columns = rows["length"][:, None] + np.arange(steps)
        home = rows["home"][:, None]
        self.out_tokens[home, columns], self.out_logprobs[home, columns] = made.T, scores.T
        self.out_versions[home, columns] = self.version
        stopped = (made[:, :, None] == rows["stops"]).any(-1)
        until = np.where(stopped.any(0), stopped.argmax(0) + 1, steps + 1)
        taken = np.minimum(np.minimum(until, steps), rows["limit"] - rows["length"])
        rows["length"] += taken
        ended = rows["alive"] & ((until == taken) | (rows["length"] == rows["limit"]))
        return [
            self._close(row, "stop" if until[i] == taken[i] else "length")
            for i, row in _pick(rows, ended)
        ]

    def _close(self, row: np.void, reason: str) -> Completion:
        """Take a row's output; the row stays in the decoder, dead, until the next compaction."""
        request, home, length = self.requests[row["request"]], int(row["home"]), int(row["length"])
        self.open.discard(request.id)
        self.homes.append(home)
        row["alive"], row["home"], row["length"], row["limit"], row["stops"] = (
            False,
            self.slots,
            0,
            0,
            -1,
        )
        ids, logprobs, versions = (
            o[home, :length].copy() for o in (self.out_tokens, self.out_logprobs, self.out_versions)
        )
        return Completion(request.id, ids, logprobs, versions, reason)

    def _unstarted(self, index: int, reason: str) -> Completion:
        request = self.requests[index]
        self.open.discard(request.id)
        return Completion(request.id, *request.prefix(), reason)

    def _aborted(self) -> list[Completion]:
        ids, self._to_abort = self._to_abort & self.open, set()
        waiting = [i for i in self.queue if self.requests[i].id in ids]
        self.queue = deque(i for i in self.queue if self.requests[i].id not in ids)
        running = np.array(
            [bool(r["alive"]) and self.requests[r["request"]].id in ids for r in self.rows], bool
        )
        done = [self._close(row, "abort") for _, row in _pick(self.rows, running)]
        return done + [self._unstarted(i, "abort") for i in waiting]

    def _not_finite(self, rows: np.ndarray, scores: np.ndarray) -> None:
        column = int(np.flatnonzero(~np.isfinite(scores).all(0))[0])
        self.decoder.free()  # a NaN left in the cache would reach later sequences through masked columns
        request = self.requests[rows[column]["request"]]
        raise HybridFlowError(
            f"request {request.id}: the model gave log-probabilities that are not finite at response token "
            f"{int(rows[column]['length'])}, with weights of version {self.version}; look for NaN in the weights"
        )


def _pick(rows: np.ndarray, chosen: np.ndarray) -> Iterator[tuple[int, np.void]]:
    return ((int(i), rows[i]) for i in np.flatnonzero(chosen))
