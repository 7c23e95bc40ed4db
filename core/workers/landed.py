"""Responses that have left their engine: complete, and out of reach of its end.

Engines in a pool of their own that never stop (core/running/serving.py) generate the rows of
several steps at once. Each row is taken here as soon as it is complete, and handed out with its
step:

    engines    advance -> rows that are complete
    data       land  ...  land  ...  collect: all rows of a step, in its order

They are kept until that step has ended, for checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hybridflow.core.errors import HybridFlowError
from hybridflow.core.values.batch import Batch
from hybridflow.core.workers.carried import Opened
from hybridflow.core.workers.generation import collected, opened_of, rows_of
from hybridflow.core.workers.published import Published


class Landed:
    """The landed rows of a role, by the numbers of their samples."""

    def __init__(self) -> None:
        self.published = Published()
        self._rows: dict[int, Opened] = {}
        self._collected: dict[int, list[int]] = {}
        """Step that has not ended -> the samples that it has collected."""

    def land(self, rows: Batch) -> list[int]:
        """Take rows that are complete; return the numbers of their samples."""
        opened = opened_of(rows)
        self._rows |= {row.made.id: row for row in opened}
        return [row.made.id for row in opened]

    def collect(self, samples: Sequence[int], step: int) -> Batch:
        """Return the responses of these samples, in this order: the columns COLLECTED.

        step: the one that trains on them. Raises HybridFlowError for one that has not landed.
        """
        if missing := [sample for sample in samples if sample not in self._rows]:
            raise HybridFlowError(
                f"samples {', '.join(map(str, missing[:5]))} are collected and have not landed; "
                "this is an error in hybridflow"
            )
        self._collected.setdefault(step, []).extend(samples)
        made = [self._rows[sample].made for sample in samples]
        return collected(made, step, self.published)

    def publish(self, versions: Mapping[int, int]) -> None:
        """Note step -> version of the weights after it, and forget the rows of these steps."""
        self.published.add(versions)
        for step in [step for step in self._collected if step <= max(versions)]:
            for sample in self._collected.pop(step):
                del self._rows[sample]

    def rows(self) -> Batch:
        """Return the rows of steps that have not ended, as engines give theirs to a checkpoint."""
        return rows_of(list(self._rows.values()))
