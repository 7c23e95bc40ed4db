"""The kit for weight transports: three gloo ranks in processes of their own move layouts into each other."""

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
from hybridflow.core.resharding.exchange import Exchange, Shards
from hybridflow.core.resharding.plan import plan_reshard
from hybridflow.core.values.weights import Box, Param, WeightLayout

WORLD = 3
SHAPES = {"matrix": (96, 40), "vector": (77,), "scalar": (), "cube": (6, 5, 4)}


def _layout(dtype: torch.dtype, cut: str) -> WeightLayout:
    """rows: dim 0 over the ranks; first: all on rank 0; last: all on the last two ranks; whole: everywhere."""
    held: dict[int, dict[str, tuple[Box, ...]]] = {r: {} for r in range(WORLD)}
    for name, shape in SHAPES.items():
        full = Box.full(shape)
        for rank in range(WORLD):
            if cut == "rows" and shape:
                size = -(-shape[0] // WORLD)
                at = [min(size * i, shape[0]) for i in (rank, rank + 1)]
                held[rank][name] = (Box.part(shape, 0, *at),)
            elif (
                cut == "whole"
                or (cut == "last" and rank)
                or (rank == 0 and cut in ("first", "rows"))
            ):
                held[rank][name] = (full,)
    return WeightLayout({n: Param(s, dtype) for n, s in SHAPES.items()}, held)


CASES = {
    "gather": ("rows", "whole", torch.float32, 1 << 20),
    "scatter from one rank": ("first", "rows", torch.bfloat16, 1 << 20),
    "many small buckets": ("rows", "whole", torch.float32, 1024),
    "ranks that only receive, or only send": ("first", "last", torch.float32, 4096),
    "nothing to move": ("whole", "rows", torch.float32, 4096),
}


def _value(name: str, dtype: torch.dtype, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(len(name) + 100 * step)
    return torch.randn(SHAPES[name], generator=generator).to(dtype)


def _move(link: Link, transport: Transport, case: str, step: int) -> list[str]:
    """Parameters that arrived wrong."""
    have, want, dtype, bucket = CASES[case]
    plan = plan_reshard(_layout(dtype, have), _layout(dtype, want), bucket)
    source = Shards(
        (n, b, _value(n, dtype, step)[b.slices()].clone())
        for n, boxes in plan.source.held[link.rank].items() for b in boxes
    )  # fmt: skip
    target = [
        (n, b, torch.full(b.shape, float("nan"), dtype=dtype))
        for n, bs in plan.target.held[link.rank].items() for b in bs
    ]  # fmt: skip
    into = Shards(target)
    for name, box in plan.local(link.rank):
        into.read(name, box).copy_(source.read(name, box))
    Exchange(plan, link.rank, link.device).run(
        transport, source.read, lambda name, box, values: into.read(name, box).copy_(values)
    )
    return [n for n, b, t in target if not torch.equal(t, _value(n, dtype, step)[b.slices()])]


def _rank(rank: int, name: str, folder: str, folder_setting: str | None, answers: Any) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=WORLD
        )
        (Path(folder) / "messages").mkdir(exist_ok=True)
        link = Link(
            rank, list(range(WORLD)), torch.device("cpu"), dist.group.WORLD, nodes=dict.fromkeys(range(WORLD), "here")
        )  # fmt: skip
        found_class: type[Transport] = (
            import_object(name) if ":" in name else registry().get("transport", name)
        )
        config = None
        if found_class.Config is not None:
            config = found_class.Config(
                **({folder_setting: f"{folder}/messages"} if folder_setting else {})
            )
        found["problem"], found["mailbox"] = (
            found_class.problem(link, config),
            issubclass(found_class, Mailbox),
        )
        transport = found_class(link, config)
        for case in CASES:
            found[case] = [
                _move(link, transport, case, step) for step in range(3)
            ]  # one transport, used again and again
        dist.barrier()
        found["left"] = sorted(p.name for p in (Path(folder) / "messages").iterdir())
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        found["error"] = traceback.format_exc()
    answers.put((rank, found))


def _abandoned() -> set[str]:
    """Messages in shared memory that no process holds (those of a run beside this one are locked)."""
    found = set()
    for path in Path("/dev/shm").glob("hybridflow-weights-*"):
        with contextlib.suppress(OSError), path.open("rb") as file:  # held, or gone meanwhile
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            found.add(path.name)
    return found


class TransportConformance:
    """For transports within a process group: subclass it, give the fixture `transport` (a name, or "module:Class")."""

    timeout_s = 120.0
    folder_setting: str | None = None
    """The setting of its Config, if any, that names a folder which all ranks see; nothing may be left there."""

    @pytest.fixture
    def transport(self) -> str:
        raise NotImplementedError("give a fixture `transport`")

    @pytest.fixture
    def moved(self, transport, tmp_path) -> list[dict[str, Any]]:
        context = mp.get_context("spawn")
        answers = context.Queue()
        given = (transport, str(tmp_path), self.folder_setting, answers)
        ranks = [context.Process(target=_rank, args=(rank, *given)) for rank in range(WORLD)]
        before = _abandoned()  # by a run that was killed
        for process in ranks:
            process.start()
        try:
            found = dict(answers.get(timeout=self.timeout_s) for _ in ranks)
        finally:
            for process in ranks:
                process.join(5)
                process.kill()
        errors = [
            f"rank {rank}: {answer['error']}"
            for rank, answer in sorted(found.items())
            if "error" in answer
        ]
        assert not errors, "\n".join(errors)
        found[0]["left"] += sorted(_abandoned() - before)
        return [found[rank] for rank in range(WORLD)]

    def test_every_layout_arrives_bit_for_bit_again_and_again_and_nothing_is_left_behind(
        self, moved
    ):
        for rank, answer in enumerate(moved):
            assert answer["problem"] is None, (
                f"it says that it cannot serve one node: {answer['problem']}"
            )
            for case in CASES:
                for step, wrong in enumerate(answer[case]):
                    assert wrong == [], (
                        f"{case}, sync {step}, rank {rank}: {', '.join(wrong)} arrived wrong"
                    )
            assert answer["left"] == [], (
                f"messages are left in the folder or in /dev/shm: {answer['left']}"
            )
