"""TransportConformance: three gloo ranks, each a process, move weights from layout to layout.

test process                          ranks 0, 1, 2 (`_rank`)
moved  --  spawn  ---------------->   per case of CASES, three times with new weights:
                                        Exchange of the case's two layouts over the transport,
                                        then compare every parameter bit for bit
checks <--  queue: (rank, answers) --  case -> the parameters that arrived wrong
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from hybridflow.core.contracts.transport import Link, Mailbox, Transport
from hybridflow.core.names import import_object
from hybridflow.core.plugins import registry
from hybridflow.core.resharding.exchange import Exchange, ShardReader
from hybridflow.core.resharding.plan import plan_reshard
from hybridflow.core.values.weights import Box, Param, WeightLayout

WORLD = 3
"""Ranks."""
SYNCS = 3
"""How often each case is moved by one transport, with other weights each time."""
SHAPES = {
    "matrix": (96, 40),
    "vector": (77,),
    "scalar": (),
    "cube": (6, 5, 4),
}
"""Parameter -> its shape. 77 rows do not divide by the ranks."""


def _layout(dtype: torch.dtype, cut: str) -> WeightLayout:
    """Return who holds which boxes.

    rows: dim 0 is split over the ranks, and rank 0 holds the scalar; first: rank 0 holds all;
    last: each rank but the first holds all; whole: every rank holds all.
    """
    ranks = range(WORLD)
    held: dict[int, dict[str, tuple[Box, ...]]] = {rank: {} for rank in ranks}
    for name, shape in SHAPES.items():
        for rank in ranks:
            if cut == "rows" and shape:
                size = -(-shape[0] // WORLD)  # rounded up; the last rank may hold fewer rows
                start = min(size * rank, shape[0])
                stop = min(size * (rank + 1), shape[0])
                held[rank][name] = (Box.part(shape, 0, start, stop),)
            elif _holds_whole(cut, rank):
                held[rank][name] = (Box.full(shape),)
    params = {name: Param(shape, dtype) for name, shape in SHAPES.items()}
    return WeightLayout(params, held)


def _holds_whole(cut: str, rank: int) -> bool:
    """Return whether a rank holds whole parameters; under "rows" that is only the scalar."""
    if cut == "whole":
        return True
    if cut == "last":
        return rank > 0
    return rank == 0


CASES = {
    "gather": ("rows", "whole", torch.float32, 1 << 20),
    "scatter from one rank": ("first", "rows", torch.bfloat16, 1 << 20),
    "many small buckets": ("rows", "whole", torch.float32, 1024),
    "ranks that only receive, or only send": ("first", "last", torch.float32, 4096),
    "nothing to move": ("whole", "rows", torch.float32, 4096),
}
"""Case -> (source layout, target layout, dtype, bytes of a bucket)."""


def _value(name: str, dtype: torch.dtype, step: int) -> torch.Tensor:
    """Return the whole parameter in a step, equal on every rank."""
    generator = torch.Generator().manual_seed(len(name) + 100 * step)
    return torch.randn(SHAPES[name], generator=generator).to(dtype)


def _part(name: str, box: Box, dtype: torch.dtype, step: int) -> torch.Tensor:
    """Return a box of the parameter in a step."""
    return _value(name, dtype, step)[box.slices()]


def _move(link: Link, transport: Transport, case: str, step: int) -> list[str]:
    """Move this rank's part of a case; return the parameters that arrived wrong."""
    have, want, dtype, bucket = CASES[case]
    plan = plan_reshard(_layout(dtype, have), _layout(dtype, want), bucket)

    # The boxes that this rank has.
    held = []
    for name, boxes in plan.source.held[link.rank].items():
        for box in boxes:
            values = _part(name, box, dtype, step).clone()
            held.append((name, box, values))
    source = ShardReader(held)

    # The boxes that it must receive start as nan, so that a missing one shows.
    wanted = []
    for name, boxes in plan.target.held[link.rank].items():
        for box in boxes:
            values = torch.full(box.shape, float("nan"), dtype=dtype)
            wanted.append((name, box, values))
    target = ShardReader(wanted)

    # Boxes that stay on the rank are copied, the others are exchanged.
    for name, box in plan.local(link.rank):
        target.read(name, box).copy_(source.read(name, box))

    def write(name: str, box: Box, values: torch.Tensor) -> None:
        target.read(name, box).copy_(values)

    Exchange(plan, link.rank, link.device).run(transport, source.read, write)
    return [
        name
        for name, box, values in wanted
        if not torch.equal(values, _part(name, box, dtype, step))
    ]


def _rank(
    rank: int,
    name: str,
    folder: str,
    folder_setting: str | None,
    answers: Any,
) -> None:
    """Run every case on one rank, and put (rank, answer) into the queue.

    An answer has case -> wrong parameters per step, `problem`, `mailbox`, and `left`: the files in
    the messages' folder after the last case. After a failure it has `error`.
    """
    # Three ranks share the machine with other tests.
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    answer: dict[str, Any] = {}
    try:
        # The ranks meet by a file, which needs no port.
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=WORLD
        )
        messages = Path(folder) / "messages"
        messages.mkdir(exist_ok=True)
        ranks = list(range(WORLD))
        nodes = dict.fromkeys(ranks, "here")
        link = Link(rank, ranks, torch.device("cpu"), dist.group.WORLD, nodes=nodes)

        # Build the transport as a run does.
        transport_class = _transport_class(name)
        config = None
        if transport_class.Config is not None:
            settings = {folder_setting: f"{folder}/messages"} if folder_setting else {}
            config = transport_class.Config(**settings)
        answer["problem"] = transport_class.problem(link, config)
        answer["mailbox"] = issubclass(transport_class, Mailbox)
        transport = transport_class(link, config)

        # One transport moves everything, again and again.
        for case in CASES:
            answer[case] = [_move(link, transport, case, step) for step in range(SYNCS)]

        # No rank checks before all have finished, and none ends before all have checked.
        dist.barrier()
        answer["left"] = sorted(path.name for path in messages.iterdir())
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        answer["error"] = traceback.format_exc()
    answers.put((rank, answer))


def _transport_class(name: str) -> type[Transport]:
    """Return the transport of this name, or at this "module:Class"."""
    return import_object(name) if ":" in name else registry().get("transport", name)


def _abandoned() -> set[str]:
    """Return the messages in shared memory that no process holds.

    Messages of another run at the same time are locked.
    """
    names = set()
    for path in Path("/dev/shm").glob("hybridflow-weights-*"):
        # An error says that the message is held, or gone meanwhile.
        with contextlib.suppress(OSError), path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            names.add(path.name)
    return names


class TransportConformance:
    """Subclass it and give a fixture `transport`: a plugin's name, or "module:Class".

    It is for transports within a process group.
    """

    timeout_s = 120.0
    """Seconds that the test waits for the next rank's answer."""
    folder_setting: str | None = None
    """The setting of its Config, if any, that names a folder which all ranks see. Nothing may be
    left there."""

    @pytest.fixture
    def transport(self) -> str:
        """The author's transport."""
        raise NotImplementedError("give a fixture `transport`")

    @pytest.fixture
    def moved(self, transport, tmp_path) -> list[dict[str, Any]]:
        """The answers of the ranks, which run every case; an error of a rank fails the test."""
        context = mp.get_context("spawn")
        answers = context.Queue()
        arguments = (transport, str(tmp_path), self.folder_setting, answers)
        processes = [
            context.Process(target=_rank, args=(rank, *arguments)) for rank in range(WORLD)
        ]

        # Messages that a killed run left behind are not this transport's.
        before = _abandoned()
        for process in processes:
            process.start()
        try:
            by_rank = dict(answers.get(timeout=self.timeout_s) for _ in processes)
        finally:
            # A rank that hangs must not outlive the test.
            for process in processes:
                process.join(5)
                process.kill()

        # A rank that failed has its traceback in the answer.
        errors = [
            f"rank {rank}: {answer['error']}"
            for rank, answer in sorted(by_rank.items())
            if "error" in answer
        ]
        assert not errors, "\n".join(errors)
        by_rank[0]["left"] += sorted(_abandoned() - before)
        return [by_rank[rank] for rank in range(WORLD)]

    def test_every_layout_arrives_bit_for_bit_again_and_again_and_nothing_is_left_behind(
        self, moved
    ):
        """Every rank got every parameter of every case, and no message is left behind."""
        for rank, answer in enumerate(moved):
            assert answer["problem"] is None, (
                f"it says that it cannot serve one node: {answer['problem']}"
            )
            # Later steps show a buffer that is used again too early.
            for case in CASES:
                for step, wrong in enumerate(answer[case]):
                    names = ", ".join(wrong)
                    assert wrong == [], f"{case}, sync {step}, rank {rank}: {names} arrived wrong"
            assert answer["left"] == [], (
                f"messages are left in the folder or in /dev/shm: {answer['left']}"
            )
