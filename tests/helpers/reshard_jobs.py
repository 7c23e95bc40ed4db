"""What the ranks of a gloo group run in the tests of the exchange."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from pathlib import Path

import torch
import torch.distributed as dist

from helpers.syncs import transport_config
from hybridflow.backends.fsdp import gather as fsdp_gather
from hybridflow.cli.gather import gather_plan
from hybridflow.core.contracts.transport import Link
from hybridflow.core.plugins import registry
from hybridflow.core.resharding.exchange import Exchange, ShardReader
from hybridflow.core.resharding.plan import plan_reshard
from hybridflow.core.values.weights import Box, WeightLayout


def value(name: str, shape, dtype) -> torch.Tensor:
    """The parameter, the same on every rank: no two elements of it alike, where the dtype has room."""
    numel = int(torch.Size(shape).numel())
    base = sum(name.encode()) % 97
    return (torch.arange(numel, dtype=torch.float64) * 0.37 + base).to(dtype).view(shape)


def storage(layout: WeightLayout, rank: int, fill: bool) -> list:
    """(name, box, tensor) of what a rank holds."""
    made = []
    for name, boxes in layout.held.get(rank, {}).items():
        param = layout.params[name]
        whole = value(name, param.shape, param.dtype) if fill else None
        for box in boxes:
            tensor = torch.full(box.shape, float("nan"), dtype=param.dtype)
            if whole is not None:
                tensor.copy_(whole[box.slices()])
            made.append((name, box, tensor))
    return made


RECEIVED_AT = 128  # of tcpi_bytes_received in Linux' struct tcp_info (include/uapi/linux/tcp.h)


def received() -> int:
    """Bytes that the kernel received for this process' open TCP connections so far: gloo's, and nobody else's."""
    total = 0
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile, no socket, not TCP
            if os.readlink(link).startswith("socket:"):
                with socket.socket(fileno=os.dup(int(link.name))) as connection:
                    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                total += struct.unpack_from("Q", info, RECEIVED_AT)[0]
    return total


def move(
    rank: int,
    world: int,
    source: WeightLayout,
    target: WeightLayout,
    transport: str,
    bucket: int,
    folder: str,
):
    """Source to target; (moved, the plan's figures of this rank, wrong or missing parameters, bytes its sockets received)."""
    plan = plan_reshard(source, target, bucket)
    return run(plan, rank, world, transport, folder)


def gather(
    rank: int,
    world: int,
    source: WeightLayout,
    target: WeightLayout,
    groups,
    bucket: int,
    folder: str,
):
    return run(gather_plan(source, target, groups, bucket), rank, world, "collective", folder)


def move_where_rank_0_cannot_read(
    rank: int, world: int, source: WeightLayout, target: WeightLayout, bucket: int
):
    """(what this rank's exchange raised, rounds, those in which it wrote)."""
    plan = plan_reshard(source, target, bucket)
    exchange = Exchange(plan, rank, torch.device("cpu"))
    read, wrote = ShardReader(storage(source, rank, True)).read, set()
    of_round = {
        piece: at
        for at, one in enumerate(exchange.rounds)
        for m in one.receives.values()
        for piece in m
    }

    def fails(name: str, box: Box) -> torch.Tensor:
        if rank == 0 and len(reads) == 3:
            raise OSError(f"{name} cannot be read")
        reads.append(name)
        return read(name, box)

    reads: list[str] = []
    said = ""
    try:
        mover = registry().get("transport", "collective")(link(rank, world))
        exchange.run(mover, fails, lambda name, box, values: wrote.add(of_round[name, box]))
    except OSError as error:
        said = str(error)
    dist.barrier()
    return said, len(exchange.rounds), len(wrote)


def link(rank: int, world: int) -> Link:
    nodes = dict.fromkeys(range(world), "here")
    return Link(rank, list(range(world)), torch.device("cpu"), dist.group.WORLD, nodes=nodes)


def run(plan, rank: int, world: int, transport: str, folder: str):
    have, want = storage(plan.source, rank, True), storage(plan.target, rank, False)
    read, into = ShardReader(have), ShardReader(want)
    exchange = Exchange(plan, rank, torch.device("cpu"))
    mover = registry().get("transport", transport)(
        link(rank, world), transport_config(transport, folder)
    )
    dist.barrier()
    before = received()
    moved = exchange.run(
        mover, read.read, lambda name, box, values: into.read(name, box).copy_(values)
    )
    dist.barrier()
    traffic = received() - before
    for name, box in plan.local(rank):
        into.read(name, box).copy_(read.read(plan.origin[name], box))
    wrong = []
    for name, box, tensor in want:
        origin = plan.origin[name]
        expected = value(origin, plan.source.params[origin].shape, plan.source.params[origin].dtype)
        if not torch.equal(tensor, expected[box.slices()].to(plan.wire[name]).to(tensor.dtype)):
            wrong.append(name)
    return moved, (plan.bytes_received[rank], plan.bytes_sent[rank]), wrong, traffic


Boxes = dict[int, Box]


def gathered(
    rank: int,
    world: int,
    parameters: dict[str, tuple[torch.Tensor, Boxes]],
    bucket_bytes: int,
) -> list[tuple[str, torch.Tensor]]:
    """In the order in which they come; each rank begins with its boxes alone."""
    pieces = [
        fsdp_gather.ShardedParameter(
            name, tuple(whole.shape), whole[boxes[rank].slices()].clone(), boxes
        )
        for name, (whole, boxes) in parameters.items()
    ]
    usual = fsdp_gather.BUCKET_BYTES
    fsdp_gather.BUCKET_BYTES = bucket_bytes
    try:
        found = fsdp_gather.whole_parameters(
            pieces, range(world), dist.group.WORLD, torch.device("cpu")
        )
        return [(name, whole.clone()) for name, whole in found]
    finally:
        fsdp_gather.BUCKET_BYTES = usual
