"""A plan in buckets: rounds so small that all buffers of a rank together stay within bucket_bytes.

Two rounds are under way at a time, each with what is sent and what is received: a round has a quarter of it each way.
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
    """The transfers of one parameter, each box cut into `parts` flat ranges of which this is number `part`."""

    name: str
    part: int = 0
    parts: int = 1

    def of(self, box: Box) -> tuple[Box, ...]:
        if self.parts == 1:
            return (box,)
        ends = [box.numel * at // self.parts for at in (self.part, self.part + 1)]
        return tuple(box.flat_range(*ends))


IN_FLIGHT = 2
"""Rounds under way at a time: one travels while the one before is unpacked, and the next is packed."""
Round = tuple[Slice, ...]
Message = tuple[tuple[str, Box], ...]
"""What travels from one rank to another in a round, in this order."""


@attrs.frozen(eq=False)
class RankRound:
    """One round as a rank sees it: a message for each rank it sends to, and from each it receives from."""

    sends: dict[int, Message]
    receives: dict[int, Message]


def plan_rounds(plan: ReshardPlan) -> list[Round]:
    """Parameters in order, as many in a round as no rank's share overflows; one that is too large in several rounds.

    The same on every rank. Raises ReshardError for a bucket that is too small to cut a parameter for.
    """
    limit = plan.bucket_bytes // (2 * IN_FLIGHT)
    loads = _loads(plan)
    rounds: list[Round] = []
    now: list[Slice] = []
    zero = np.zeros(2 * ((plan.ranks[-1] + 1) if plan.ranks else 0), np.int64)
    filled = zero
    for name in plan.origin:
        if name not in loads:
            continue
        load, pieces = loads[name]
        most = int(load.max())
        if most > limit:
            spill = pieces * plan.wire[name].itemsize  # each piece may round up by an element
            if spill >= limit:
                raise ReshardError(
                    f"bucket_bytes {plan.bucket_bytes} is too small: {name} comes in {pieces} pieces; give at least "
                    f"{2 * IN_FLIGHT * (spill + 64)}"
                )
            parts = -(-most // (limit - spill))
            if now:
                rounds.append(tuple(now))
                now, filled = [], zero
            rounds += [(Slice(name, part, parts),) for part in range(parts)]
            continue
        if now and int((filled + load).max()) > limit:
            rounds.append(tuple(now))
            now, filled = [], zero
        now.append(Slice(name))
        filled = filled + load
    return [*rounds, tuple(now)] if now else rounds


def _loads(plan: ReshardPlan) -> dict[str, tuple[np.ndarray, int]]:
    """Name -> (bytes in by rank, then bytes out by rank; the most pieces that one rank sends or receives)."""
    size = plan.ranks[-1] + 1 if plan.ranks else 0
    alike: dict[tuple[str, ...], list[np.ndarray]] = {}
    for flow in plan.flows:
        load, pieces = alike.setdefault(
            flow.names, [np.zeros(2 * size, np.int64), np.zeros(2 * size, np.int64)]
        )
        receivers = flow.receivers
        senders = np.array(flow.senders) + size
        share = len(receivers) // len(senders)
        load[receivers] += flow.nbytes
        pieces[receivers] += 1
        load[senders] += flow.nbytes * share
        pieces[senders] += share
    found: dict[str, list[np.ndarray]] = {}
    for names, (load, pieces) in alike.items():
        for name in names:
            if name in found:
                found[name] = [found[name][0] + load, found[name][1] + pieces]
            else:
                found[name] = [load, pieces]
    return {name: (load, int(pieces.max())) for name, (load, pieces) in found.items()}


def rank_rounds(plan: ReshardPlan, rounds: Sequence[Round], rank: int) -> list[RankRound]:
    """What `rank` sends and receives in each round. Within a message wider dtypes come first, so that all lie aligned."""
    sends, receives = plan.of_rank(rank)
    of_name: dict[str, list[tuple[bool, int, Box]]] = defaultdict(list)
    for t in sends:
        of_name[t.name].append((True, t.receiver, t.box))
    for t in receives:
        of_name[t.name].append((False, t.sender, t.box))
    made = []
    for one in rounds:
        both: tuple[dict[int, list], dict[int, list]] = (defaultdict(list), defaultdict(list))
        for cut in sorted(one, key=lambda s: -plan.wire[s.name].itemsize):
            for sending, peer, box in of_name.get(cut.name, ()):
                both[not sending][peer] += [
                    (cut.name, piece) for piece in cut.of(box) if piece.numel
                ]
        out, into = (
            {peer: tuple(pieces) for peer, pieces in sorted(side.items()) if pieces}
            for side in both
        )
        made.append(RankRound(out, into))
    return made
