"""Boxes on their way: the same box of several parameters from senders to receivers, listed as transfers when asked for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import attrs
import numpy as np

from hybridflow.core.values.weights import Box


@attrs.frozen
class Transfer:
    """One box of one parameter, from one rank to another."""

    name: str
    box: Box
    sender: int
    receiver: int


@attrs.frozen(eq=False)
class Flow:
    """One box of the parameters `names`, from its senders to `receivers` (sorted): an equal run of receivers for each."""

    names: tuple[str, ...]
    box: Box
    itemsize: int
    senders: tuple[int, ...]
    wanters: np.ndarray
    """Ranks whose target has the box."""
    holders: frozenset[int]
    """Those of them that have it already."""

    @property
    def nbytes(self) -> int:
        """Of one parameter, for one receiver."""
        return self.box.numel * self.itemsize

    @property
    def receivers(self) -> np.ndarray:
        if not self.holders:
            return self.wanters
        return self.wanters[~np.isin(self.wanters, list(self.holders), assume_unique=True)]

    @property
    def count(self) -> int:
        return len(self.wanters) - len(self.holders)

    def pairs(self) -> Iterator[tuple[int, int]]:
        """(sender, receiver)."""
        share = self.count // len(self.senders)
        for at, receiver in enumerate(self.receivers.tolist()):
            yield self.senders[at // share], receiver

    def sender_of(self, rank: int) -> int | None:
        """Who sends to `rank`, or None when it is no receiver."""
        if rank in self.holders:
            return None
        at = int(np.searchsorted(self.wanters, rank))
        if at == len(self.wanters) or self.wanters[at] != rank:
            return None
        if len(self.senders) == 1:
            return self.senders[0]
        at -= sum(1 for holder in self.holders if holder < rank)
        return self.senders[at // (self.count // len(self.senders))]

    def receivers_of(self, rank: int) -> list[int]:
        if rank not in self.senders:
            return []
        share, at = self.count // len(self.senders), self.senders.index(rank)
        return self.receivers[at * share : (at + 1) * share].tolist()


class Transfers(Sequence[Transfer]):
    """All transfers of a plan, made as they are read; a plan of thousands of ranks has millions."""

    def __init__(self, flows: Sequence[Flow]):
        self._flows = flows
        self._ends = np.cumsum([len(f.names) * f.count for f in flows], dtype=np.int64)

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
        which = int(np.searchsorted(self._ends, at, side="right"))
        flow = self._flows[which]
        name, pair = divmod(int(at - (self._ends[which - 1] if which else 0)), flow.count)
        sender, receiver = list(flow.pairs())[pair]
        return Transfer(flow.names[name], flow.box, sender, receiver)
