"""Flows: the same box of several parameters on its way from senders to receivers.

A flow stands for many transfers, which are listed only when they are asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import attrs
import numpy as np

from hybridflow.core.values.weights import Box


@attrs.frozen
class Transfer:
    """One box of one parameter, from one rank to another."""

    name: str
    """The target's name of the parameter."""
    box: Box
    sender: int
    receiver: int


@attrs.frozen(eq=False)
class Flow:
    """One box of the parameters `names`, from its senders to its receivers (sorted).

    Each sender serves an equal run of receivers. With 2 senders and 4 receivers:

        senders      0        1
                    / \\      / \\
        receivers  4   5    6   7
    """

    # The box
    names: tuple[str, ...]
    box: Box
    itemsize: int
    """Bytes per element on the wire."""

    # Senders and receivers
    senders: tuple[int, ...]
    wanters: np.ndarray
    """Ranks whose target has the box, sorted."""
    holders: frozenset[int]
    """The wanters whose source has it already; the other wanters are the receivers."""

    @property
    def nbytes(self) -> int:
        """Bytes of the box in one parameter, for one receiver."""
        return self.box.numel * self.itemsize

    @property
    def receivers(self) -> np.ndarray:
        """Ranks that the box is sent to, sorted."""
        if not self.holders:
            return self.wanters
        return self.wanters[~np.isin(self.wanters, list(self.holders), assume_unique=True)]

    @property
    def count(self) -> int:
        """Number of receivers."""
        return len(self.wanters) - len(self.holders)

    def pairs(self) -> Iterator[tuple[int, int]]:
        """Yield (sender, receiver), one pair per receiver."""
        share = self.count // len(self.senders)
        for index, receiver in enumerate(self.receivers.tolist()):
            yield self.senders[index // share], receiver

    def sender_of(self, rank: int) -> int | None:
        """Return the rank that sends to `rank`, or None if `rank` receives nothing."""
        if rank in self.holders:
            return None

        # Wanters are sorted: at the insertion index of a rank there is the rank, or it is missing.
        index = int(np.searchsorted(self.wanters, rank))
        if index == len(self.wanters) or self.wanters[index] != rank:
            return None

        if len(self.senders) == 1:
            return self.senders[0]
        index -= sum(1 for holder in self.holders if holder < rank)  # index among the receivers
        return self.senders[index // (self.count // len(self.senders))]

    def receivers_of(self, rank: int) -> list[int]:
        """Return the ranks that `rank` sends to."""
        if rank not in self.senders:
            return []
        share = self.count // len(self.senders)
        start = self.senders.index(rank) * share
        return self.receivers[start : start + share].tolist()


class Transfers(Sequence[Transfer]):
    """All transfers of a plan, created lazily: for thousands of ranks there are millions."""

    def __init__(self, flows: Sequence[Flow]):
        self._flows = flows
        sizes = [len(flow.names) * flow.count for flow in flows]
        self._ends = np.cumsum(sizes, dtype=np.int64)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __iter__(self) -> Iterator[Transfer]:
        for flow in self._flows:
            pairs = list(flow.pairs())
            for name in flow.names:
                for sender, receiver in pairs:
                    yield Transfer(name, flow.box, sender, receiver)

    def __getitem__(self, at):
        if isinstance(at, slice):
            return list(self)[at]
        if at < 0:
            at += len(self)
        if not 0 <= at < len(self):
            raise IndexError(at)

        # The flow that position `at` lies in, then the parameter and the pair within that flow.
        which = int(np.searchsorted(self._ends, at, side="right"))
        flow = self._flows[which]
        start = self._ends[which - 1] if which else 0
        name, pair = divmod(int(at - start), flow.count)
        sender, receiver = list(flow.pairs())[pair]
        return Transfer(flow.names[name], flow.box, sender, receiver)
