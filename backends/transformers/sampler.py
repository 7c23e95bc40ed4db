"""Sampling of one token per row, by the inverse of the row's distribution function.

    u = uniform(seed, position) in [0, 1)
    token = the first one with P(tokens up to it) > u

No generator state is kept, so a row's tokens depend neither on the other rows, nor on its slot, nor
on when it was admitted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from hybridflow.kit.sampling import addable, cumulate, invert, share, uniforms


class TokenSampler:
    """The sampling parameters of a batch's rows, on the device.

    Parameters that no row uses are None, and their step is skipped. R are the rows, F those with
    top_k or top_p, V the vocabulary.
    """

    seeds: torch.Tensor
    """Seeds, int64 [R]."""
    all_greedy: bool
    """Whether every row takes the argmax."""
    any_greedy: bool
    """Whether some row takes the argmax."""
    greedy: torch.Tensor | None
    """Which rows take the argmax, bool [R]."""
    temperature: torch.Tensor | None
    """Temperatures, float32 [R, 1], with 1 for greedy rows."""

    filtered: torch.Tensor | None
    """Rows with top_k or top_p, int64 [F]. They are sorted; other rows need no sort."""
    width: int | None
    """How many tokens of filtered rows need sorting; None for all."""
    top_k: torch.Tensor
    """top_k of the filtered rows, int64 [F, 1]."""
    top_p: torch.Tensor
    """top_p of the filtered rows, float32 [F, 1]."""
    filtered_min_p: torch.Tensor | None
    """min_p of the filtered rows, float32 [F, 1]."""
    min_p: torch.Tensor | None
    """min_p of all rows, float32 [R, 1]; None if only filtered rows have any."""

    biased: Any
    """Rows with biases, int64 [B]."""
    places: tuple[torch.Tensor, torch.Tensor]
    """The row (index into `biased`) and the token of each of their N biases, int64 [N] each."""
    biases: torch.Tensor
    """The biases / temperature, float32 [N]."""

    _ahead: torch.Tensor
    """Uniform numbers made in advance, float32 [steps, R]."""
    _used: int
    """How many steps of them are used up."""

    def __init__(
        self,
        rows: np.ndarray,
        device: torch.device,
        biases: Sequence[tuple[tuple[int, float], ...]] = (),
    ):
        """Copy the parameters of `rows`, a structured array [R], to the device.

        Its fields are seed, temperature, top_p, top_k and min_p. `biases` has each row's
        SamplingParams.logit_bias; it may be left out where no row has any.
        """

        def put(values: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(values.copy()).to(device, non_blocking=True)

        self.seeds = put(rows["seed"])
        self._ahead = torch.zeros(0)
        self._used = 0

        # Temperature 0 takes the argmax.
        greedy = rows["temperature"] == 0
        self.all_greedy = bool(greedy.all())
        self.any_greedy = bool(greedy.any())
        self.greedy = put(greedy) if self.any_greedy else None
        # The log-probabilities of greedy rows are those at temperature 1.
        temperature = np.where(greedy, 1, rows["temperature"]).astype(np.float32)
        self.temperature = None
        if (temperature != 1).any():
            self.temperature = put(temperature)[:, None]

        filtered = ~greedy & ((rows["top_k"] > 0) | (rows["top_p"] < 1))
        min_p = np.where(greedy, 0, rows["min_p"]).astype(np.float32)
        self.filtered = None
        if filtered.any():
            self.filtered = put(np.flatnonzero(filtered))
            top_k = rows["top_k"][filtered]
            # Where every row has a top_k, the largest one says how many tokens need sorting.
            self.width = None
            if (top_k > 0).all():
                self.width = int(top_k.max())
            no_limit = np.iinfo(np.int64).max
            top_k = np.where(top_k > 0, top_k, no_limit)
            self.top_k = put(top_k)[:, None]
            self.top_p = put(rows["top_p"][filtered])[:, None]

        # min_p of filtered rows works after the sort.
        self.min_p = None
        self.filtered_min_p = None
        if min_p[~filtered].any():
            self.min_p = put(min_p)[:, None]
        if min_p[filtered].any():
            self.filtered_min_p = put(min_p[filtered])[:, None]

        # Biases are flat, since rows have different numbers of them.
        self.biased = None
        if any(biases):
            biased, places, values = _flat(biases, temperature)
            self.biased = put(biased)
            self.places = (put(places[0]), put(places[1]))
            self.biases = put(values)

    def uniforms(self, lengths: np.ndarray, steps: int) -> torch.Tensor | None:
        """Return float32 [steps, R] for the response tokens from `lengths` [R] on.

        None where all rows are greedy. Numbers are computed for several steps at once, so the next
        call must continue where this one ends.
        """
        if self.all_greedy:
            return None

        if self._used + steps > len(self._ahead):
            ahead = np.arange(max(steps, 8))[:, None]
            positions = torch.from_numpy(lengths + ahead)
            self._ahead = uniforms(self.seeds, positions.to(self.seeds.device))
            self._used = 0
        self._used += steps
        return self._ahead[self._used - steps : self._used]

    def __call__(
        self,
        logits: torch.Tensor,
        uniform: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Sample from `logits` float32 [R, V]; return tokens int64 and log-probabilities float32.

        `uniform` is float32 [R], or None if all rows are greedy. A row with temperature 0 takes the
        argmax. The log-probability is that of softmax(logits / temperature), before biases and
        filters.
        """
        if self.temperature is not None:
            logits = logits / self.temperature
        logprobs = logits.log_softmax(-1)
        scores = logprobs if self.biased is None else self._with_biases(logprobs)

        if self.all_greedy:
            tokens = scores.argmax(-1, keepdim=True)
        else:
            tokens = self._draw(scores, uniform)
        chosen = logprobs.gather(1, tokens)
        return tokens[:, 0], chosen[:, 0]

    def _draw(
        self,
        scores: torch.Tensor,
        uniform: torch.Tensor,
    ) -> torch.Tensor:
        """Draw tokens [R, 1] from exp(scores), each row by its own parameters."""
        probs = scores.exp()
        if self.min_p is not None:
            # min_p alone needs no sort.
            floor = self.min_p * probs.amax(-1, keepdim=True)
            probs.masked_fill_(probs < floor, 0.0)
        tokens = invert(cumulate(probs), uniform[:, None])

        # Filtered and greedy rows were sampled too; their tokens are replaced.
        if self.filtered is not None:
            tokens[self.filtered] = self._filtered(
                scores[self.filtered],
                uniform[self.filtered, None],
            )
        if self.greedy is not None:
            argmax = scores.argmax(-1, keepdim=True)
            tokens = torch.where(self.greedy[:, None], argmax, tokens)
        return tokens

    def _with_biases(self, logp: torch.Tensor) -> torch.Tensor:
        """Return log-probabilities [R, V] with biases / temperature added, normalised again.

        Rows without biases keep their bits, so that their tokens do not depend on other rows.
        """
        # Indexing by a tensor copies, so that `logp` itself does not change.
        rows = logp[self.biased]
        rows[self.places] += self.biases
        return logp.index_copy(0, self.biased, rows.log_softmax(-1))

    def _filtered(
        self,
        logp: torch.Tensor,
        uniform: torch.Tensor,
    ) -> torch.Tensor:
        """Draw tokens [F, 1] of the filtered rows, by min_p, top_k and top_p in this order.

        top_p keeps the smallest set with probability top_p of what min_p and top_k leave, as
        Hugging Face and vLLM do.
        """
        # Sort by probability, the largest first.
        if self.width is not None:
            width = min(self.width, logp.shape[-1])
            values, order = logp.topk(width, dim=-1)
        else:
            values, order = logp.sort(dim=-1, descending=True, stable=True)

        # The filters of top_k and min_p; the largest probability is the first one.
        rank = torch.arange(values.shape[-1], device=logp.device)
        probs = values.exp().masked_fill_(rank >= self.top_k, 0.0)
        if self.filtered_min_p is not None:
            floor = self.filtered_min_p * probs[:, :1]
            probs.masked_fill_(probs < floor, 0.0)

        # Draw from the tokens up to `last`: invert their part of the cumulative sum.
        parts = addable(probs)
        cumulative = parts.cumsum(-1)
        last = self._nucleus_size(parts, cumulative, rank) - 1
        chosen = invert(cumulative, uniform, cumulative.gather(1, last))
        return order.gather(1, torch.minimum(chosen, last))

    def _nucleus_size(
        self,
        probs: torch.Tensor,
        cumulative: torch.Tensor,
        rank: torch.Tensor,
    ) -> torch.Tensor:
        """Return how many of the sorted tokens each row keeps, int64 [F, 1], at least 1.

        Token i is kept if those before it have less than top_p of the total:
        c_i - p_i < top_p * c_last, and if i < top_k.
        """
        limit = share(self.top_p, cumulative[:, -1:])
        nucleus = (cumulative - probs < limit) & (rank < self.top_k)
        return nucleus.sum(-1, keepdim=True).clamp_(min=1)


def _flat(
    biases: Sequence[tuple[tuple[int, float], ...]],
    temperature: np.ndarray,
) -> tuple[np.ndarray, ...]:
    """Return the biases of a batch as flat arrays; `temperature` is [R].

    These are the B rows with biases, int64 [B]; the row (among these) and token of each of their N
    biases, int64 [2, N]; and the biases / temperature, float32 [N].
    """
    rows = np.array([row for row, pairs in enumerate(biases) if pairs])
    # Rows mostly share their biases, so each distinct one is converted once.
    tables = {pairs: np.array(pairs) for pairs in set(biases)}
    row_tables = [tables[biases[row]] for row in rows]
    lengths = [len(table) for table in row_tables]

    tokens, values = np.concatenate(row_tables).T
    owners = np.repeat(np.arange(len(rows)), lengths)
    places = np.stack([owners, tokens.astype(np.int64)])
    scaled = values / np.repeat(temperature[rows], lengths)
    return rows, places, scaled.astype(np.float32)
