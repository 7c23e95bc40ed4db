"""Sampling of one token per row: a uniform number from (seed, position), and the inverse of the row's distribution.

No generator state is kept, so a row's tokens do not depend on the other rows, on its slot, or on when it was admitted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from hybridflow.kit.sampling import invert, uniforms


class Sampler:
    """The sampling parameters of the rows of a batch, on the device, with the cheapest path that serves them all."""

    def __init__(
        self,
        rows: np.ndarray,
        device: torch.device,
        biases: Sequence[tuple[tuple[int, float], ...]] = (),
    ):
        """`rows`: structured array [R] with fields seed, temperature, top_p, top_k, min_p. `biases`: each row's
        SamplingParams.logit_bias; may be left out where no row has any."""

        def put(values: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(values.copy()).to(device, non_blocking=True)

        greedy, temperature = rows["temperature"] == 0, rows["temperature"]
        filtered = ~greedy & ((rows["top_k"] > 0) | (rows["top_p"] < 1))
        min_p = np.where(greedy, 0, rows["min_p"]).astype(np.float32)
        self.seeds = put(rows["seed"])
        self._ahead, self._used = torch.zeros(0), 0
        self.all_greedy, self.any_greedy = bool(greedy.all()), bool(greedy.any())
        self.greedy = put(greedy) if self.any_greedy else None
        scaled = np.where(greedy, 1, temperature).astype(np.float32)
        self.temperature = None if (scaled == 1).all() else put(scaled)[:, None]
        self.filtered = put(np.flatnonzero(filtered)) if filtered.any() else None
        if self.filtered is not None:
            top_k = rows["top_k"][filtered]
            self.width = int(top_k.max()) if (top_k > 0).all() else None
            self.top_k = put(np.where(top_k > 0, top_k, np.iinfo(np.int64).max))[:, None]
            self.top_p = put(rows["top_p"][filtered])[:, None]
            self.filtered_min_p = put(min_p[filtered])[:, None] if min_p[filtered].any() else None
        self.min_p = put(min_p)[:, None] if min_p[~filtered].any() else None
        self.biased: Any = None
        if any(biases):
            rows_with, places, values = _flat(biases, scaled)
            self.biased, self.places, self.biases = (
                put(rows_with),
                (put(places[0]), put(places[1])),
                put(values),
            )

    def uniforms(self, lengths: np.ndarray, steps: int) -> torch.Tensor | None:
        """float32 [steps, R] for the response tokens from `lengths` [R] on; None where no row draws.

        Numbers are made for a few tokens at once: the next call must go on where this one ends.
        """
        if self.all_greedy:
            return None
        if self._used + steps > len(self._ahead):
            start = torch.from_numpy(lengths + np.arange(max(steps, 8))[:, None])
            self._ahead, self._used = uniforms(self.seeds, start.to(self.seeds.device)), 0
        self._used += steps
        return self._ahead[self._used - steps : self._used]

    def __call__(self, logits: torch.Tensor, uniform: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """`logits` float32 [R, V], `uniform` [R] (None if all are greedy) -> tokens int64, logprobs float32 [R].

        A row with temperature 0 takes the argmax. The log-probability is that of softmax(logits / temperature), before
        biases and filters.
        """
        if self.temperature is not None:
            logits = logits / self.temperature
        logp = logits.log_softmax(-1)
        drawn = logp if self.biased is None else self._with_biases(logp)
        if self.all_greedy:
            tokens = drawn.argmax(-1, keepdim=True)
        else:
            probs = drawn.exp()
            if (
                self.min_p is not None
            ):  # in the order of the vocabulary: min_p alone needs no sorting
                probs.masked_fill_(probs < self.min_p * probs.amax(-1, keepdim=True), 0.0)
            tokens = invert(probs.cumsum_(-1), uniform[:, None])
            if self.filtered is not None:
                tokens[self.filtered] = self._filtered(
                    drawn[self.filtered], uniform[self.filtered, None]
                )
            if self.greedy is not None:
                tokens = torch.where(self.greedy[:, None], drawn.argmax(-1, keepdim=True), tokens)
        return tokens[:, 0], logp.gather(1, tokens)[:, 0]

    def _with_biases(self, logp: torch.Tensor) -> torch.Tensor:
        """[R, V]: biases / temperature added. Other rows keep their bits, so that they draw what they draw alone."""
        rows = logp[self.biased]
        rows[self.places] += self.biases
        return logp.index_copy(0, self.biased, rows.log_softmax(-1))

    def _filtered(self, logp: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
        """Tokens [F, 1] from the top k of those that min_p leaves, and of these the smallest set with probability top_p
        (renormalised, as HF and vLLM)."""
        if self.width is not None:
            values, order = logp.topk(min(self.width, logp.shape[-1]), dim=-1)
        else:
            values, order = logp.sort(dim=-1, descending=True, stable=True)
        rank = torch.arange(values.shape[-1], device=logp.device)
        probs = values.exp().masked_fill_(rank >= self.top_k, 0.0)
        if self.filtered_min_p is not None:
            probs.masked_fill_(probs < self.filtered_min_p * probs[:, :1], 0.0)
        below = probs.cumsum(-1)
        total = below[:, -1:]
        kept = (
            ((below - probs < self.top_p * total) & (rank < self.top_k))
            .sum(-1, keepdim=True)
            .clamp_(min=1)
        )
        chosen = invert(below, uniform, below.gather(1, kept - 1))
        return order.gather(1, torch.minimum(chosen, kept - 1))


def _flat(
    biases: Sequence[tuple[tuple[int, float], ...]], temperature: np.ndarray
) -> tuple[np.ndarray, ...]:
    """Rows with biases int64 [B]; of all their biases the place int64 [2, N] (which of these rows, token); and the biases
    / temperature float32 [N]. `temperature`: [R]."""
    rows = np.array([at for at, pairs in enumerate(biases) if pairs])
    tables = {pairs: np.array(pairs) for pairs in set(biases)}  # one for all, as a rule
    each = [tables[biases[at]] for at in rows]
    lengths = [len(table) for table in each]
    tokens, values = np.concatenate(each).T
    places = np.stack([np.repeat(np.arange(len(rows)), lengths), tokens.astype(np.int64)])
    return rows, places, (values / np.repeat(temperature[rows], lengths)).astype(np.float32)
