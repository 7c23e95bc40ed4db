"""The order in which rows are drawn, which two numbers resume."""

from __future__ import annotations

from typing import Any

import numpy as np

from hybridflow.core.errors import DataError


class Sampler:
    """An endless stream of row indices: a permutation of all rows in each epoch, drawn from (seed, epoch) alone, so
    that two numbers resume it bit for bit."""

    def __init__(self, n_rows: int, seed: int = 0, shuffle: bool = True):
        if n_rows < 1:
            raise DataError(f"there is nothing to draw from: the data has {n_rows} rows")
        self.n_rows, self.seed, self.shuffle = n_rows, seed, shuffle
        self.epoch = self.position = 0
        self._order = self._permutation()

    def take(self, n: int) -> np.ndarray:
        """int64 [n]: the next rows, across as many epochs as needed."""
        parts, missing = [], n
        while missing > 0:
            part = self._order[self.position : self.position + missing]
            parts.append(part)
            missing -= len(part)
            self.position += len(part)
            if self.position == self.n_rows:
                self.epoch, self.position = self.epoch + 1, 0
                self._order = self._permutation()
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    def state_dict(self) -> dict[str, Any]:
        """Where the stream is (epoch, position), and what it is a stream of."""
        return {"epoch": self.epoch, "position": self.position, **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken. Raises DataError when that was another stream."""
        if changed := [name for name, value in self._identity().items() if state[name] != value]:
            got = ", ".join(
                f"{name} was {state[name]!r} and is {getattr(self, name)!r}" for name in changed
            )
            raise DataError(
                f"the checkpoint was at row {state['position']} of epoch {state['epoch']} of other data: {got}; "
                "restore the data's settings and files, or start a new run"
            )
        self.epoch, self.position = state["epoch"], state["position"]
        self._order = self._permutation()

    def _identity(self) -> dict[str, Any]:
        return {"n_rows": self.n_rows, "seed": self.seed, "shuffle": self.shuffle}

    def _permutation(self) -> np.ndarray:
        if not self.shuffle:
            return np.arange(self.n_rows, dtype=np.int64)
        return np.random.Generator(np.random.Philox(key=[self.seed, self.epoch])).permutation(
            self.n_rows
        )
