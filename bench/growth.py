"""What a step costs the controller, against the number of ranks and of rows: at most linear, and no Python for each row.

python bench/growth.py [--plot docs/growth.svg]

GRPO's own step, with two shuffled mini-batches, runs through the real controller: contexts, groups, protocols, messages,
replies, metrics. Behind it stands a runtime whose ranks are not there: of each call one rank is computed, in this process, and
all ranks give its reply. Told is the processor time that is left when that rank's is taken off, for 20,000 rows on 2 to 10,000
ranks and for 100 to 1,000,000 rows on 8; and the bytecode instructions that the controller executes with 1,000 and with
100,000 rows. One JSON line per figure; exits 1 when a bar is missed.
"""

from __future__ import annotations

import argparse
import gc
import math
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import numpy as np
import torch
from common import draw, emit

from hybridflow.algorithms.grpo import GRPO, GRPOConfig
from hybridflow.backends.inline.runtime import InlineRuntime, InlineStore
from hybridflow.core.context import GroupStepContext
from hybridflow.core.contracts.protocol import Protocol
from hybridflow.core.contracts.role import Role
from hybridflow.core.contracts.rollout import SamplingParams
from hybridflow.core.contracts.runtime import Label, Message, Process, ResourcePool
from hybridflow.core.contracts.worker import Worker, register
from hybridflow.core.groups.group import Pool, WorkerGroup
from hybridflow.core.groups.host import Host
from hybridflow.core.values.batch import Batch
from hybridflow.core.values.columns import Column
from hybridflow.core.values.metrics import Metrics
from hybridflow.core.values.outcomes import finished
from hybridflow.core.values.parallel import ParallelLayout, generation_layout
from hybridflow.core.workers.generation import GENERATED
from hybridflow.core.workers.gradients import loss_reads
from hybridflow.core.workers.tasks import run_on_columns

RANKS = (2, 10, 100, 1_000, 10_000)
ROWS = (100, 1_000, 10_000, 100_000, 1_000_000)
FEW_RANKS, SOME_ROWS = 8, 20_000
GROUP, PROMPT, RESPONSE = 8, 8, 16
SLOPE = 1.1
"""Largest exponent of the cost's growth over the last tenfold step; 1 is linear."""
INSTRUCTIONS = 1.05
"""How many times as many instructions 100,000 rows may take as 1,000."""


def filled(rows: int, length: int, value: float, dtype: torch.dtype) -> Column:
    return Column(torch.full((rows * length,), value, dtype=dtype), np.full(rows, length))


class Tasks(Worker):
    """Rows of data, and numerical work."""

    @register(Protocol.RANK_ZERO, same_rows=False)
    def draw(self, name: str, count: int) -> Batch:
        prompts = filled(count, PROMPT, 1, torch.int64)
        return Batch({"prompt_ids": prompts, "group": torch.arange(count)})

    @register(Protocol.RANK_ZERO)
    def compute(self, batch: Batch, function) -> Batch:
        return run_on_columns(batch, function)


class Models(Worker):
    """Verbs that travel as the model worker's do, and compute nothing."""

    @register(Protocol.MICRO_DP, reads=("prompt_ids", "sample_id"), writes=GENERATED)
    def generate(self, batch: Batch, sampling, seed) -> Batch:
        rows = batch.rows
        columns = {
            "response_ids": filled(rows, RESPONSE, 2, torch.int64),
            "rollout_logprobs": filled(rows, RESPONSE, -1, torch.float32),
            "loss_mask": filled(rows, RESPONSE, 1, torch.uint8),
            "weight_version": filled(rows, RESPONSE, 0, torch.int32),
            "finish_reason": ["stop"] * rows,
            "outcome": [finished("stop")] * rows,
        }
        return Batch(columns, Metrics({"response_length": (RESPONSE * rows, rows)}))

    @register(Protocol.THREE_D, reads=("prompt_ids", "response_ids"))
    def score(self, batch: Batch, column: str) -> Batch:
        return Batch({column: torch.arange(batch.rows, dtype=torch.float32)})

    @register(Protocol.THREE_D, reads=("prompt_ids", "response_ids"))
    def logprobs(self, batch: Batch, columns: dict[str, str], topk: int) -> Batch:
        return Batch({columns["logprobs"]: filled(batch.rows, RESPONSE, -1, torch.float32)})

    @register(Protocol.THREE_D, reads=loss_reads)
    def update(self, pairs) -> Metrics:
        return Metrics({"loss": (0.0, float(sum(batch.rows for batch, _ in pairs)))})

    @register()
    def sync(self) -> None: ...


class Absent(Process):
    """A rank whose calls are those of the first rank."""

    def __init__(self, pool: ResourcePool, rank: int, host: Host, runtime: Simulated):
        self.pool = pool
        self.rank = rank
        self.host = host
        self.runtime = runtime

    def submit(self, message: Message, label: Label) -> Any:
        if label is not self.runtime.label:
            self.runtime.label = label
            self.runtime.reply = self._computed(message)
        return self.runtime.reply

    def _computed(self, message: Message) -> Any:
        """Compute the call; neither its time nor its instructions are the controller's."""
        trace = sys.gettrace()
        sys.settrace(None)
        started = time.process_time()
        reply = self.host.call(message.blob, message.handles, message.replies)
        self.runtime.away += time.process_time() - started
        sys.settrace(trace)
        return reply


class Simulated(InlineRuntime):
    """A runtime of ranks that are not there."""

    label: Label | None = None
    reply: Any = None
    away: float = 0.0
    """Processor seconds of what is not the controller's."""

    def launch(self, pool: ResourcePool, device: str, environment: dict[str, str]) -> list[Process]:
        host = Host(pool.name, 0, [0], InlineStore())
        host.join(None, device)
        return [Absent(pool, rank, host, self) for rank in range(pool.world)]

    def wait(self, reply: Any) -> Any:
        return reply

    def shutdown(self) -> None: ...


class Step:
    """A step of GRPO with so many ranks and rows."""

    def __init__(self, ranks: int, rows: int):
        self.runtime = Simulated()
        self.runtime.start()
        models = Pool.launch(ResourcePool("models", (ranks,)), self.runtime)
        tasks = Pool.launch(ResourcePool("tasks", (1,)), self.runtime)
        layout = ParallelLayout(dp=ranks)
        group = WorkerGroup(Models, models, layout=layout, generation=generation_layout(layout))
        roles = [Role("actor", trained=True, generates=True), Role("reward", "reward")]
        work = WorkerGroup(Tasks, tasks)
        self.context = GroupStepContext(
            {role.name: (role, group) for role in roles},
            work,
            work,
            SamplingParams(RESPONSE),
            0,
        )
        prompts = math.ceil(rows / GROUP)
        config = GRPOConfig(
            prompts_per_step=prompts, group_size=GROUP, mini_batch_size=prompts * GROUP // 2
        )
        self.algorithm = GRPO(config)

    def run(self) -> None:
        self.algorithm.step(self.context)
        metrics = self.context.finish()
        assert metrics["actor/response_length"] == RESPONSE, metrics

    def seconds(self, repeats: int) -> float:
        """The controller's processor seconds: the median of some steps after the first one."""
        self.run()
        gc.collect()
        taken = []
        for _ in range(repeats):
            self.runtime.away = 0.0
            started = time.process_time()
            self.run()
            taken.append(time.process_time() - started - self.runtime.away)
        return statistics.median(taken)

    def instructions(self) -> int:
        """The bytecode instructions that the controller executes in a step."""
        self.run()
        count = 0

        def trace(frame, event, _):
            nonlocal count
            frame.f_trace_opcodes = True
            count += event == "opcode"
            return trace

        sys.settrace(trace)
        try:
            self.run()
        finally:
            sys.settrace(None)
        return count


def costs_of(steps: dict[int, tuple[int, int]], what: str) -> dict[int, float]:
    """Size -> the controller's seconds, of steps with so many (ranks, rows); each is told."""
    costs = {}
    for size, (ranks, rows) in steps.items():
        costs[size] = Step(ranks, rows).seconds(3)
        emit(f"controller's step, {size:,} {what}", costs[size], "CPU s")
    return costs


def grown(costs: dict[int, float], what: str) -> bool:
    """Tell whether the last tenfold step is at most linear."""
    (before, less), (after, more) = list(costs.items())[-2:]
    slope = math.log(more / less) / math.log(after / before)
    return emit(
        f"growth from {before:,} to {after:,} {what}", slope, "exponent", bar=SLOPE, at_most=True
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plot", help="draw the costs: a file ending in .svg or .png")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    by_ranks = costs_of({n: (n, SOME_ROWS) for n in RANKS}, "ranks")
    by_rows = costs_of({n: (FEW_RANKS, n) for n in ROWS}, "rows")
    good = grown(by_ranks, "ranks")
    good &= grown(by_rows, "rows")
    few, many = (Step(FEW_RANKS, rows).instructions() for rows in (1_000, 100_000))
    good &= emit(
        "instructions of the controller, 100,000 rows", many, "bytecodes", ratio=many / few,
        against="1,000 rows", bar=INSTRUCTIONS, at_most=True,
    )  # fmt: skip
    if arguments.plot:
        sizes = np.array([1e3, 1e6])
        draw(
            arguments.plot,
            {f"ranks, {SOME_ROWS:,} rows": by_ranks, f"rows, {FEW_RANKS} ranks": by_rows},
            "ranks, or rows",
            "CPU seconds a step",
            beside=lambda axes: axes.plot(
                sizes, sizes * 1e-6, ":", color="#999999", label="linear"
            ),
        )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
