"""The contract of observers: what looks at a run, step by step, and what it is shown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs

SampleRow = dict[str, Any]
"""A recorded row: column -> its value.

Always there are `step`, `data` (the set it is of), `tokens` (of the response), `prompt` and
`response` (text without special tokens, as rewards get it), `prompt_ids` and `response_ids` (int32
arrays), and `prompt_tokens` and `response_tokens`, the text of each token, special ones included.
Token columns are arrays of one value per response token, row columns numbers, and objects text;
those that are no text are JSON.
"""


@attrs.frozen
class Span:
    """A stretch of time of one process: a call, a part of one, or a wait of the controller."""

    process: str
    """Where: "POOL/RANK", or "controller"."""
    role: str
    """The role that was called."""
    name: str
    """The method that was called; of a part, METHOD/PART."""
    start: float
    """Seconds since the epoch, by the clock of the process's node."""
    seconds: float
    waited: float = 0.0
    """Seconds before the start in which the process had nothing to do."""
    waited_for: str = ""
    """What ended that wait: "ROLE/METHOD@PROCESS", or "controller", which had not sent the call."""


class Observer:
    """Looks at a run, on the controller. A method that raises is told, and stops nothing.

    Every method does nothing unless it is overridden.
    """

    def begin(self, run: Any) -> None:
        """Begin: the models are built, and training goes on after `run.step`, of a new run 0.

        It is called again where a run restarts by itself.
        """

    def step(self, metrics: Mapping[str, float]) -> Mapping[str, float]:
        """Take the metrics of a step, and return further ones."""
        return {}

    def samples(self, step: int, rows: Sequence[SampleRow]) -> None:
        """Take rows that were trained on in a step, or generated in the validation after it."""

    def spans(self, step: int, spans: Sequence[Span]) -> None:
        """Take what the processes did in a step, or in the validation after it."""

    def checkpoint(self, step: int) -> None:
        """Keep what was taken so far: a checkpoint of `step` is about to be written."""

    def ended(self) -> Iterable[str]:
        """Return lines for the console: the run has come to its end."""
        return ()

    def close(self) -> None:
        """Finish: the run has ended, or has failed."""
