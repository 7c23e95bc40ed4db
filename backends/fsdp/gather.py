"""Whole parameters from the ranks' pieces: few collectives, whatever the placement."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import attrs
import torch
import torch.distributed as dist

from hybridflow.core.values.weights import Box

BUCKET_BYTES = 64 << 20
all_gather = (
    getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
)  # renamed in torch 2.13


@attrs.frozen(eq=False)
class Piece:
    """A parameter as a rank sees it: its own part, and every rank's box."""

    name: str
    shape: tuple[int, ...]
    local: torch.Tensor
    boxes: Mapping[int, Box]


def whole_parameters(
    pieces: Iterable[Piece],
    ranks: Sequence[int],
    group: dist.ProcessGroup | None,
    device: torch.device,
) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) in order, on every rank of `group`, which are `ranks` in order and hold all elements together.

    A tensor is good until the next one is asked for.
    """
    for bucket in _buckets(pieces):
        received = _exchange(bucket, ranks, group, device)
        offsets = dict.fromkeys(ranks, 0)
        for piece in bucket:
            whole = torch.empty(piece.shape, dtype=piece.local.dtype, device=device)
            seen = set()
            for rank, row in zip(ranks, received, strict=True):
                box, at = piece.boxes[rank], offsets[rank]
                offsets[rank] += box.numel
                if box.numel and box not in seen:
                    whole[box.slices()] = row[at : at + box.numel].view(box.shape)
                    seen.add(box)
            yield piece.name, whole


def _exchange(
    bucket: Sequence[Piece], ranks: Sequence[int], group, device: torch.device
) -> list[torch.Tensor]:
    """Every rank's pieces of the bucket, one behind the other, flat."""
    length = max(sum(piece.boxes[rank].numel for piece in bucket) for rank in ranks)
    sent = torch.zeros(length, dtype=bucket[0].local.dtype, device=device)
    at = 0
    for piece in bucket:
        size = piece.local.numel()
        sent[at : at + size].copy_(piece.local.reshape(-1))
        at += size
    received = torch.empty(len(ranks) * length, dtype=sent.dtype, device=device)
    all_gather(received, sent, group=group)
    return list(received.view(len(ranks), length).unbind())


def _buckets(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Runs of one dtype of up to BUCKET_BYTES (whole), or one larger parameter."""
    bucket: list[Piece] = []
    held = 0
    for piece in pieces:
        size = Box.full(piece.shape).numel * piece.local.dtype.itemsize
        if bucket and (held + size > BUCKET_BYTES or piece.local.dtype != bucket[0].local.dtype):
            yield bucket
            bucket, held = [], 0
        bucket.append(piece)
        held += size
    if bucket:
        yield bucket
