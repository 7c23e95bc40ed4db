"""The order in which rows are drawn, which two numbers resume."""

from __future__ import annotations

from typing import Any

import numpy as np

from hybridflow.core.errors import DataError


class Sampler:
    """An endless stream of row indices, with a permutation of all rows in each epoch.

    The permutation depends on (seed, epoch) alone. So the two numbers (epoch, position) resume the
    stream exactly where it was.
    """

    def __init__(self, n_rows: int, seed: int = 0, shuffle: bool = True):
        if n_rows < 1:
            raise DataError(f"there is nothing to draw from: the data has {n_rows} rows")

        self.n_rows = n_rows
        self.seed = seed
        self.shuffle = shuffle
        self.epoch = self.position = 0
        self._order = self._permutation()

    def take(self, n: int) -> np.ndarray:
        """Return the next `n` rows, int64 [n], across as many epochs as needed."""
        parts = []
        missing = n
        while missing > 0:
            part = self._order[self.position : self.position + missing]
            parts.append(part)
            missing -= len(part)
            self.position += len(part)

            # The epoch is used up: the next one has an order of its own.
            if self.position == self.n_rows:
                self.epoch += 1
                self.position = 0
                self._order = self._permutation()
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the stream, and the settings that identify the stream."""
        return {"epoch": self.epoch, "position": self.position, **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at the position of `state`. Raises DataError if it is of another stream."""
        # Positions mean the same rows only with equal row counts, seeds and orders.
        identity = self._identity()
        if changed := [name for name, value in identity.items() if state[name] != value]:
            changes = ", ".join(
                f"{name} was {state[name]!r} and is {identity[name]!r}" for name in changed
            )
            raise DataError(
                f"the checkpoint was at row {state['position']} of epoch {state['epoch']} of other "
                f"data: {changes}; restore the data's settings and files, or start a new run"
            )

        self.epoch = state["epoch"]
        self.position = state["position"]
        self._order = self._permutation()

    def _identity(self) -> dict[str, Any]:
        return {"n_rows": self.n_rows, "seed": self.seed, "shuffle": self.shuffle}

    def _permutation(self) -> np.ndarray:
        if not self.shuffle:
            return np.arange(self.n_rows, dtype=np.int64)

        # A counter-based generator: its numbers follow from the key, whatever was drawn before.
        bits = np.random.Philox(key=[self.seed, self.epoch])
        return np.random.Generator(bits).permutation(self.n_rows)
