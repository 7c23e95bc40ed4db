"""One engine of a pool of engines, and the rows that it was given."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import attrs
import numpy as np

from hybridflow.core.contracts.rollout import SamplingParams
from hybridflow.core.groups.group import Future, WorkerGroup
from hybridflow.core.values.batch import Batch


@attrs.frozen(eq=False)
class Given:
    """Rows of one step, as an engine was given them."""

    rows: Batch
    samples: np.ndarray
    """The numbers of their samples, int64 [rows]."""
    sampling: SamplingParams
    seed: int

    def only(self, places: np.ndarray) -> Given:
        """Return the rows at these places."""
        return attrs.evolve(self, rows=self.rows.take(places), samples=self.samples[places])


@attrs.define(eq=False)
class Replica:
    """An engine on some ranks of its group, and the rows that it was given and not completed."""

    group: WorkerGroup
    ranks: Sequence[int]
    alive: bool = True
    """Whether its processes run and have weights."""
    given: list[Given] = attrs.field(factory=list)
    unread: list[Future] = attrs.field(factory=list)
    """The calls that have given it rows, as far as nobody has read their results."""

    def give(self, given: Given) -> None:
        """Have the engine generate rows beside others, as soon as it is alive."""
        if self.alive:
            how = (given.rows, given.sampling, given.seed)
            self.unread.append(self.group.call_on(self.ranks, "open", *how))
        self.given.append(given)

    def keep(self, awaited: Collection[int]) -> None:
        """Forget rows none of whose samples is still awaited."""
        self.given = [one for one in self.given if np.isin(one.samples, list(awaited)).any()]

    def take_back(self, awaited: Collection[int]) -> list[Given]:
        """Take back the rows that are still awaited."""
        places = [np.flatnonzero(np.isin(one.samples, list(awaited))) for one in self.given]
        given, self.given = self.given, []
        return [one.only(at) for one, at in zip(given, places, strict=True) if len(at)]

    def renew(self) -> Future:
        """Start processes in the place of those that have ended; return the engine's build."""
        self.unread = []
        self.group.pool.replace(self.ranks)
        made = [self.group.renew(self.ranks), self.group.call_on(self.ranks, "build")]
        return Future(lambda: [one.result() for one in made])
