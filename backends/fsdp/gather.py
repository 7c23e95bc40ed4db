"""Gathers whole parameters from the ranks' shards, by few collectives.

Parameters are gathered in buckets. Each bucket is one all-gather of flat rows, one row per rank, in
which a rank's shards of the bucket's parameters are concatenated:

    rank 0   | shard of a | shard of b | padding |
    rank 1   | shard of a | shard of b           |
                   |            |
                whole a      whole b
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import attrs
import torch
import torch.distributed as dist

from hybridflow.core.values.weights import Box

BUCKET_BYTES = 64 << 20
"""The most bytes of whole parameters in one collective, unless a single parameter is larger."""

# torch 2.13 renamed it.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@attrs.frozen(eq=False)
class ShardedParameter:
    """One parameter on a rank: its own shard, and every rank's box."""

    name: str
    """The canonical name."""
    shape: tuple[int, ...]
    """Shape of the whole parameter."""
    local: torch.Tensor
    """This rank's shard."""
    boxes: Mapping[int, Box]
    """Rank -> the box that it holds, which may be empty."""


def whole_parameters(
    pieces: Iterable[ShardedParameter],
    ranks: Sequence[int],
    group: dist.ProcessGroup | None,
    device: torch.device,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, whole tensor) in the order of `pieces`, on every rank of `group`. Collective.

    `ranks` are the group's ranks in order; together they hold all elements. A tensor is valid
    until the next one is yielded.
    """
    for bucket in _buckets(pieces):
        # Every parameter continues in each row where the one before ended.
        rows = _exchange(bucket, ranks, group, device)
        offsets = dict.fromkeys(ranks, 0)
        for piece in bucket:
            whole = torch.empty(piece.shape, dtype=piece.local.dtype, device=device)

            # Several ranks may hold the same box; it is copied once.
            seen = set()
            for rank, row in zip(ranks, rows, strict=True):
                box = piece.boxes[rank]
                offset = offsets[rank]
                offsets[rank] += box.numel
                if box.numel and box not in seen:
                    values = row[offset : offset + box.numel]
                    whole[box.slices()] = values.view(box.shape)
                    seen.add(box)

            yield piece.name, whole


def _exchange(
    bucket: Sequence[ShardedParameter],
    ranks: Sequence[int],
    group: dist.ProcessGroup | None,
    device: torch.device,
) -> list[torch.Tensor]:
    """Return for every rank a flat row with its shards of the bucket, concatenated."""
    # Rows have equal lengths: that of the rank which holds most, padded with zeros.
    lengths = dict.fromkeys(ranks, 0)
    for piece in bucket:
        for rank in ranks:
            lengths[rank] += piece.boxes[rank].numel
    length = max(lengths.values())

    # Fill this rank's row.
    sent = torch.zeros(length, dtype=bucket[0].local.dtype, device=device)
    offset = 0
    for piece in bucket:
        size = piece.local.numel()
        sent[offset : offset + size].copy_(piece.local.reshape(-1))
        offset += size

    received = torch.empty(len(ranks) * length, dtype=sent.dtype, device=device)
    all_gather(received, sent, group=group)
    return list(received.view(len(ranks), length).unbind())


def _buckets(pieces: Iterable[ShardedParameter]) -> Iterator[list[ShardedParameter]]:
    """Cut the sequence into runs of one dtype with at most BUCKET_BYTES.

    A larger parameter is a run of its own.
    """
    bucket: list[ShardedParameter] = []
    nbytes = 0
    for piece in pieces:
        size = Box.full(piece.shape).numel * piece.local.dtype.itemsize
        if bucket:
            full = nbytes + size > BUCKET_BYTES
            if full or piece.local.dtype != bucket[0].local.dtype:
                yield bucket
                bucket = []
                nbytes = 0
        bucket.append(piece)
        nbytes += size

    if bucket:
        yield bucket
