"""Storage of the tokens of running requests until these are finished.

Each request has a home: a row of the arrays that does not move when the decoder's rows do.
"""

from __future__ import annotations

import numpy as np

from hybridflow.core.contracts.rollout import Completion, Request

SPARE = 0
"""The home of rows whose request is finished: their further tokens are written there."""


class Outputs:
    """Response tokens of H homes, each with room for W tokens."""

    tokens: np.ndarray
    """Token ids, int64 [H, W]."""
    logprobs: np.ndarray
    """Their log-probabilities, float32 [H, W]."""
    versions: np.ndarray
    """Versions of the weights that made them, int64 [H, W]."""
    free: list[int]
    """Homes without a request, except the spare one."""

    def __init__(self):
        self._make((1, 0))
        self.free = []

    def _make(self, size: tuple[int, int]) -> None:
        """Make empty arrays; the system allocates their pages on first use."""
        self.tokens = np.zeros(size, np.int64)
        self.logprobs = np.zeros(size, np.float32)
        self.versions = np.zeros(size, np.int64)

    def reserve(self, count: int, width: int) -> None:
        """Allocate at least `count` homes for `width` tokens; homes in use keep their contents."""
        homes, present = self.tokens.shape
        if count < homes and width <= present:
            return

        # No home is in use, so that the arrays can have just the needed size.
        if len(self.free) == homes - 1:
            self._make((count + 1, width))
            self.free = list(range(1, count + 1))
            return

        before = self.tokens, self.logprobs, self.versions
        self._make((max(count + 1, homes), max(width, present)))
        self.free += range(homes, len(self.tokens))
        for old, new in zip(before, (self.tokens, self.logprobs, self.versions), strict=True):
            new[:homes, :present] = old

    def take(self, request: Request) -> tuple[int, int]:
        """Give a request a free home, with its prefix in it; return home and prefix length."""
        home = self.free.pop()
        ids, logprobs, versions = request.prefix()
        length = len(ids)
        self.tokens[home, :length] = ids
        self.logprobs[home, :length] = logprobs
        self.versions[home, :length] = versions
        return home, length

    def store(
        self,
        homes: np.ndarray,
        lengths: np.ndarray,
        tokens: np.ndarray,
        logprobs: np.ndarray,
        version: int,
    ) -> None:
        """Write tokens and logprobs [K, R] after the first `lengths` [R] tokens of `homes` [R]."""
        columns = lengths[:, None] + np.arange(len(tokens))
        rows = homes[:, None]
        self.tokens[rows, columns] = tokens.T
        self.logprobs[rows, columns] = logprobs.T
        self.versions[rows, columns] = version

    def give(self, home: int, length: int, number: int, reason: str) -> Completion:
        """Return the first `length` tokens as the completion of request `number`; free the home."""
        self.free.append(home)
        outputs = (self.tokens, self.logprobs, self.versions)
        ids, logprobs, versions = (output[home, :length].copy() for output in outputs)
        return Completion(number, ids, logprobs, versions, reason)
