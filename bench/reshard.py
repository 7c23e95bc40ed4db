"""Three ways from training weights to generation weights, on 8 gloo processes of this machine, a 300 MB model, in turns:

    everything   every rank gathers the whole model from shards over all ranks, then slices (DeepSpeed-Chat's engine)
    replica      every rank gathers the whole model from its training replica's shards, then slices (HybridFlow-V's)
    planned      every rank receives what it lacks (zero-redundancy groups), its own shard inside the new one

The same transport and bucket for all three. Bytes are sizes of buffers, peak memory is the growth of the process's resident
set over the weights that stood before; freed memory goes back to the system at once. One JSON line per figure;
exits 1 when a bar is missed.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["MALLOC_MMAP_THRESHOLD_"] = str(
    1 << 17
)  # of the ranks: freed tensors go back, so that the resident set is what is in use
sys.path.insert(0, str(Path(__file__).parent))
from common import emit

WORLD, REPEATS, BUCKET = 8, 5, 32 << 20
CASES = {"1-8-1 to 1-4": (4, 1 / 3), "1-8-1 to 1-2": (2, 0.55)}
"""Generation tp, and the most that the planned engine may take of gather-everything's time."""
ENGINES = ("everything", "replica", "planned")


def plans(tp: int) -> dict:
    import torch

    from hybridflow.cli.gather import gather_plan
    from hybridflow.core.resharding.plan import plan_reshard
    from hybridflow.core.values.parallel import ParallelLayout, generation_layout
    from hybridflow.kit.huggingface.shapes import llama_shape
    from hybridflow.kit.layouts import engine_layout, megatron_layout, zero3_layout

    shape = llama_shape(1024, 4, 16, 16, 64, 2816, 12288)
    params, train = shape.params(torch.float32), ParallelLayout(tp=WORLD)
    held = megatron_layout(shape, train, params)
    targets = {
        g: engine_layout(shape, generation_layout(train, 1, tp, g), params)
        for g in ("zero-redundancy", "consecutive")
    }
    return {
        "everything": gather_plan(
            zero3_layout(params, WORLD), targets["consecutive"], [list(range(WORLD))], BUCKET
        ),
        "replica": gather_plan(held, targets["consecutive"], [list(range(WORLD))], BUCKET),
        "planned": plan_reshard(held, targets["zero-redundancy"], BUCKET),
    }


def resident(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


class Side:
    """One rank of one engine: its storages, and a transition."""

    def __init__(self, name: str, plan, rank: int, link):
        import torch

        from hybridflow.core.plugins import registry
        from hybridflow.core.resharding.exchange import Exchange

        self.name, self.plan, self.rank = name, plan, rank
        self.exchange = Exchange(plan, rank, torch.device("cpu"))
        self.transport = registry().get("transport", "collective")(link)
        self.local = list(plan.local(rank))

    def allocate(self) -> None:
        """The training shard; for the planned engine as a part of the generation shard, which then needs no copy of it."""
        import torch

        from hybridflow.core.resharding.exchange import ShardReader

        def values(name: str, box):
            shape = self.plan.source.params[name].shape
            index = torch.arange(box.start[0], box.stop[0], dtype=torch.float32)
            return (index.view(-1, *[1] * (len(shape) - 1)) % 1000).expand(box.shape)

        self.into = None
        held = []
        if self.name == "planned":
            target = [
                (n, b, torch.ones(b.shape))
                for n, bs in self.plan.target.held[self.rank].items()
                for b in bs
            ]
            self.into = ShardReader(target)
        for name, boxes in self.plan.source.held[self.rank].items():
            for box in boxes:
                tensor = self.into.read(name, box) if self.into else torch.empty(box.shape)
                tensor.copy_(values(name, box))
                held.append((name, box, tensor))
        self.source = ShardReader(held)
        self.expected = values

    def transition(self):
        """Weights ready to generate with; gives what was moved."""
        import torch

        from hybridflow.core.resharding.exchange import ShardReader, same_storage

        if self.name == "planned":
            return self.exchange.run(self.transport, self.source.read, self._write)
        whole = [
            (n, b, torch.empty(b.shape))
            for n, bs in self.plan.target.held[self.rank].items()
            for b in bs
        ]
        self.into = ShardReader(whole)
        for name, box in self.local:
            view, own = self.into.read(name, box), self.source.read(name, box)
            if not same_storage(view, own):
                view.copy_(own)
        moved = self.exchange.run(self.transport, self.source.read, self._write)
        final = self.plan.final.held[self.rank]
        sliced = [
            (n, b, self.into.read(n, b).clone()) for n, bs in final.items() for b in bs if b.numel
        ]
        self.into = ShardReader(sliced)
        return moved

    def _write(self, name: str, box, values) -> None:
        self.into.read(name, box).copy_(values)

    def check(self) -> None:
        import torch

        wanted = (self.plan.target if self.name == "planned" else self.plan.final).held[self.rank]
        for name, boxes in wanted.items():
            for box in boxes:
                assert torch.equal(self.into.read(name, box), self.expected(name, box)), (
                    f"{self.name}: {name} {box}"
                )


def work(rank: int, store: str, answers) -> None:
    import torch
    import torch.distributed as dist

    from hybridflow.core.contracts.transport import Link

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    link = Link(rank, list(range(WORLD)), torch.device("cpu"), dist.group.WORLD)
    found: dict = {}
    for case, (tp, _) in CASES.items():
        made = plans(tp)
        sides = {name: Side(name, made[name], rank, link) for name in ENGINES}
        for repeat in range(REPEATS + 1):
            for name in ENGINES:
                side = sides[name]
                side.allocate()
                gc.collect()
                stood = resident("VmRSS") - sum(t.nbytes for t in _tensors(side))
                Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
                dist.barrier()
                started = time.perf_counter()
                moved = side.transition()
                dist.barrier()
                seconds = time.perf_counter() - started
                peak = resident("VmHWM") - stood
                side.check()
                side.into = side.source = None
                if repeat:  # the first one warms up
                    figures = (seconds, moved.bytes_received, peak, side.plan.peak_bytes[rank])
                    found.setdefault(case, {}).setdefault(name, []).append(figures)
    answers.put((rank, json.dumps(found)))
    dist.barrier()
    dist.destroy_process_group()


def _tensors(side: Side):
    held = {}
    for shards in (side.source, side.into):
        for pieces in shards._of.values() if shards else ():
            for _, tensor in pieces:
                storage = tensor.untyped_storage()
                held[storage.data_ptr()] = storage
    return [torch_tensor(s) for s in held.values()]


def torch_tensor(storage):
    import torch

    return torch.empty(0, dtype=torch.uint8).set_(storage)


def main() -> int:
    import torch.multiprocessing as mp

    context = mp.get_context("spawn")
    answers = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=work, args=(r, f"{folder}/store", answers)) for r in range(WORLD)
        ]
        for process in ranks:
            process.start()
        told = {}
        for _ in ranks:
            rank, text = answers.get()
            told[rank] = json.loads(text)
        for process in ranks:
            process.join()
    good = True
    for case, (_, bar) in CASES.items():
        per = {
            n: [max(told[r][case][n][i][0] for r in told) for i in range(REPEATS)] for n in ENGINES
        }
        for name in ENGINES:
            rows = [row for r in told for row in told[r][case][name]]
            received, stated = max(r[1] for r in rows), max(r[3] for r in rows)
            over = statistics.median(max(told[r][case][name][i][2] - told[r][case][name][i][3] for r in told)
                                     for i in range(REPEATS))  # fmt: skip
            key = f"{case}, {name}"
            emit(f"{key}: received per rank", received / 1e6, "MB")
            emit(f"{key}: weights, as planned", stated / 1e6, "MB")
            planned = name == "planned"
            good &= emit(f"{key}: peak above the plan", over / 1e6, "MB",
                         bar=BUCKET / 1e6 if planned else None, at_most=True)  # fmt: skip
            ratio = statistics.median(
                a / b for a, b in zip(per[name], per["everything"], strict=True)
            )
            good &= emit(f"{key}: seconds", statistics.median(per[name]), "s", ratio=ratio, against="everything",
                         bar=bar if planned else None, at_most=True)  # fmt: skip
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
