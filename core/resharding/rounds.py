"""Rounds: a plan cut into sets of messages that are small enough for the buffers of every rank.

A round is packed, sent and unpacked as one. Two rounds are in flight at a time, so that one is
unpacked while the next is transferred. Each has buffers for sending and for receiving, so a round
may take a quarter of bucket_bytes each way.

    one rank        time ------------------------------------------------------------>
      round 0       pack  ~~~~~~~~~~  unpack
      round 1             pack  ~~~~~~~~~~~~~~~~~~~~  unpack                  ~~~ travels
      round 2                                   pack  ~~~~~~~~~~~~  unpack

    a round         messages: one per pair of ranks that have something for each other
    a message       the pieces of its boxes, parameter after parameter, wide dtypes first:
                    [ w1 box | w1 box | w2 box | ... ]      uint8 [bytes]
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import attrs
import numpy as np

from hybridflow.core.resharding.plan import ReshardError, ReshardPlan
from hybridflow.core.values.weights import Box


@attrs.frozen
class Slice:
    """The transfers of one parameter, or the part of them that one round moves.

    Each box is cut into `parts` flat ranges, of which this is number `part`.
    """

    name: str
    """The target's name of the parameter."""
    part: int = 0
    parts: int = 1

    def of(self, box: Box) -> tuple[Box, ...]:
        """Return the boxes that make up this slice of `box`."""
        if self.parts == 1:
            return (box,)
        start = box.numel * self.part // self.parts
        stop = box.numel * (self.part + 1) // self.parts
        return tuple(box.flat_range(start, stop))


IN_FLIGHT = 2
"""Rounds in flight at a time: one is sent while the one before is unpacked and the next packed."""
Round = tuple[Slice, ...]
Message = tuple[tuple[str, Box], ...]
"""The pieces that one rank sends to another in a round: (target name, box), in this order."""


@attrs.frozen(eq=False)
class RankRound:
    """One rank's messages of one round."""

    sends: dict[int, Message]
    """Receiver -> message."""
    receives: dict[int, Message]
    """Sender -> message."""


def plan_rounds(plan: ReshardPlan) -> list[Round]:
    """Return the rounds of a plan, the same on every rank.

    Parameters come in order, as many in a round as fit every rank's buffers; a parameter that is
    too large for one round has several to itself. Raises ReshardError for a bucket that is too
    small to cut a parameter for.
    """
    limit = plan.bucket_bytes // (2 * IN_FLIGHT)
    loads = _loads(plan)
    rounds: list[Round] = []
    slices: list[Slice] = []  # of the round that is being filled
    zero = np.zeros(2 * _size(plan), np.int64)
    filled = zero

    for name in plan.origin:
        if name not in loads:
            continue
        load, pieces = loads[name]
        largest = int(load.max())

        # A full round ends before a parameter that has rounds to itself, or does not fit any more.
        if slices and (largest > limit or int((filled + load).max()) > limit):
            rounds.append(tuple(slices))
            slices = []
            filled = zero
        if largest <= limit:
            slices.append(Slice(name))
            filled = filled + load
            continue

        # Cutting a piece may round it up by one element, for which each part must leave room.
        spill = pieces * plan.wire[name].itemsize
        if spill >= limit:
            raise ReshardError(
                f"bucket_bytes {plan.bucket_bytes} is too small: {name} comes in {pieces} pieces; "
                f"give at least {2 * IN_FLIGHT * (spill + 64)}"
            )
        parts = -(-largest // (limit - spill))
        rounds += [(Slice(name, part, parts),) for part in range(parts)]
    return [*rounds, tuple(slices)] if slices else rounds


def _size(plan: ReshardPlan) -> int:
    """Return the length of an array indexed by rank."""
    return plan.ranks[-1] + 1 if plan.ranks else 0


def _loads(plan: ReshardPlan) -> dict[str, tuple[np.ndarray, int]]:
    """Return name -> (bytes, pieces).

    Bytes are int64 [2 ranks]: first those that each rank receives, then those that it sends. Pieces
    are the most boxes that any rank receives or sends.
    """
    size = _size(plan)

    # Many flows have the same tuple of names, and their loads add up once for all these names.
    alike: dict[tuple[str, ...], np.ndarray] = {}
    for flow in plan.flows:
        if flow.names not in alike:
            alike[flow.names] = np.zeros((2, 2 * size), np.int64)

        # Every receiver gets the box once; every sender sends it to `share` of them.
        load, pieces = alike[flow.names]
        receivers = flow.receivers
        senders = np.array(flow.senders) + size
        share = len(receivers) // len(senders)
        load[receivers] += flow.nbytes
        pieces[receivers] += 1
        load[senders] += flow.nbytes * share
        pieces[senders] += share

    # A parameter may have flows of several such tuples.
    totals: dict[str, np.ndarray] = {}
    for names, figures in alike.items():
        for name in names:
            totals[name] = totals[name] + figures if name in totals else figures
    loads = {}
    for name, (load, pieces) in totals.items():
        loads[name] = (load, int(pieces.max()))
    return loads


def rank_rounds(plan: ReshardPlan, rounds: Sequence[Round], rank: int) -> list[RankRound]:
    """Return the messages that `rank` sends and receives in each round.

    Within a message wider dtypes come first, so that all values are aligned.
    """
    # Name -> (is sent, other rank, box), for the transfers that the rank takes part in.
    sends, receives = plan.of_rank(rank)
    by_name: dict[str, list[tuple[bool, int, Box]]] = defaultdict(list)
    for transfer in sends:
        by_name[transfer.name].append((True, transfer.receiver, transfer.box))
    for transfer in receives:
        by_name[transfer.name].append((False, transfer.sender, transfer.box))

    rank_views = []
    for slices in rounds:
        outgoing: dict[int, list] = defaultdict(list)
        incoming: dict[int, list] = defaultdict(list)
        for cut in sorted(slices, key=lambda cut: -plan.wire[cut.name].itemsize):
            for sending, peer, box in by_name.get(cut.name, ()):
                side = outgoing if sending else incoming
                side[peer] += [(cut.name, piece) for piece in cut.of(box) if piece.numel]
        rank_views.append(RankRound(_messages(outgoing), _messages(incoming)))
    return rank_views


def _messages(by_peer: dict[int, list]) -> dict[int, Message]:
    """Return the messages by peer in order of rank, without empty ones."""
    return {peer: tuple(pieces) for peer, pieces in sorted(by_peer.items()) if pieces}
