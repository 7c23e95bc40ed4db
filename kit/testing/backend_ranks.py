"""BackendRanks: over several ranks, each a process, a step is that of one rank with all rows.

test process                           ranks (`_rank`), over each layout
answers  --  spawn  ---------------->    gradients, with rows dealt out unevenly, and to one alone
                                         three steps of AdamW with clipping
                                         a checkpoint, from which new backends go on
checks   <--  a file per rank  ------    what came of each
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import attrs
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from hybridflow.core.contracts.training import OptimizerConfig, TrainingBackend
from hybridflow.core.contracts.worker import RankContext
from hybridflow.core.values.model import ModelSpec
from hybridflow.core.values.parallel import ParallelLayout, generation_layout
from hybridflow.kit.testing.backend_base import LENGTHS, BackendBase, first_output
from hybridflow.kit.testing.checks import require
from hybridflow.kit.testing.models import Sequences
from hybridflow.kit.testing.passes import (
    Passes,
    gradients,
    memoryless,
    optimizer_step,
    whole_weights,
)

SEED = 12
DEALT = {
    "three rows and two": ([0, 1, 2], [3, 4]),
    "all rows and none": ([0, 1, 2, 3, 4], []),
}
"""Case -> the rows of each of two dp ranks; one without rows has a dummy micro-batch."""
STEPS = OptimizerConfig(
    lr=1e-2, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.1, max_grad_norm=0.5, warmup_steps=2
)


@attrs.frozen
class Task:
    """What the ranks are told."""

    backend: type[TrainingBackend]
    config: Any
    spec: ModelSpec
    layout: ParallelLayout
    needs: list[str]
    folder: str
    """Where they meet and leave their answers."""


class BackendRanks(BackendBase):
    """Tests of a backend over the layouts of `layouts` that its `problems` allow."""

    layouts: Sequence[ParallelLayout] = (ParallelLayout(dp=2),)
    """Layouts of two dp ranks that the tests train over."""
    ranks_timeout_s = 240.0
    """Seconds that the ranks of a layout may take."""

    @pytest.fixture(scope="class")
    @classmethod
    def over_ranks(cls, tmp_path_factory) -> list[tuple[ParallelLayout, list[Any]]]:
        """Each layout with its ranks' answers; an error of a rank fails the test."""
        kit = cls()
        if kit.backend is None:
            pytest.skip("give `backend` and `config` in the place of `build`: ranks are started")
        kit._needs_training()
        ref = next(kit.references())
        config = kit._settings()
        allowed = [
            layout for layout in kit.layouts if not kit.backend.problems(config, layout, ref.spec)
        ]
        if not allowed:
            pytest.skip("its `problems` allow none of `layouts`")
        answers = []
        for layout in allowed:
            folder = str(tmp_path_factory.mktemp("ranks"))
            task = Task(kit.backend, config, ref.spec, layout, first_output(ref), folder)
            answers.append((layout, run_ranks(task, kit.ranks_timeout_s)))
        return answers

    @pytest.mark.parametrize("case", DEALT)
    def test_the_gradients_of_all_ranks_add_up(self, over_ranks, case):
        """However the rows are dealt out, the gradient is Hugging Face's of all of them."""
        ref = next(self.references())
        passes = _references()
        expected = passes.expected_gradients(ref, first_output(ref))
        for layout, answers in over_ranks:
            for rank, answer in enumerate(answers):
                self._same(
                    answer[case],
                    expected,
                    f"the gradient over {layout}, {case}, rank {rank}",
                    "gradients are not added up over the dp ranks, or are averaged: each rank's "
                    "loss is its share of one sum",
                )

    def test_a_step_of_all_ranks_is_one_of_adamw(self, over_ranks):
        """Weights and gradient norm are torch's over three steps, and equal on every rank."""
        ref = next(self.references())
        passes = _references()
        step_of_torch = optimizer_step(ref, STEPS)
        for step in range(3):
            norm, expected = step_of_torch(passes, first_output(ref), step)
            for layout, answers in over_ranks:
                for rank, answer in enumerate(answers):
                    found = answer["norms"][step]
                    require(
                        abs(found - norm) <= max(1e-2, 0.1 * self.gradient_tolerance) * norm,
                        got=f"grad_norm {found:.5g} in step {step}, {layout}, rank {rank}",
                        expected=f"{norm:.5g}, that of the whole gradient, on every rank",
                        likely="the norm is that of a rank's shard, or counts a replica twice",
                    )
                    if step == 2:
                        self._same(
                            answer["weights"],
                            expected,
                            f"the weights after three steps over {layout}, rank {rank}",
                            "clipping uses another norm than the whole gradient's, or the ranks "
                            "step by gradients of their own",
                        )
        for layout, (first, *others) in over_ranks:
            for answer in others:
                different = _differing(answer["weights"], first["weights"])
                require(
                    not different,
                    got=f"{len(different)} parameters differ between ranks of {layout}: "
                    f"{different[:3]}",
                    expected="full_parameters equal on every rank, bit for bit",
                    likely="replicas have drifted apart",
                )

    def test_ranks_go_on_from_their_checkpoint_bit_for_bit(self, over_ranks):
        """Two steps, a checkpoint and two steps by new backends give the weights of four steps."""
        for layout, answers in over_ranks:
            for rank, answer in enumerate(answers):
                require(
                    answer["resumed"] == [],
                    got=f"{len(answer['resumed'])} parameters of rank {rank} of {layout} differ "
                    f"after a checkpoint and two more steps: {answer['resumed'][:3]}",
                    expected="the same bits as without the interruption",
                    likely="a rank's part of the moments, or its step count, is not saved, or is "
                    "read as another rank's",
                )


def _references() -> Passes:
    """Return passes without a backend, of which only the references are asked."""
    return Passes(cast(TrainingBackend, None), Sequences.random(LENGTHS, seed=SEED), seed=SEED)


def run_ranks(task: Task, timeout_s: float) -> list[Any]:
    """Run the task on a process for each rank of its layout; return the ranks' answers.

    Raises AssertionError with the traceback of a rank that failed, or the ranks that did not end.
    """
    context = mp.get_context("spawn")
    processes = [
        context.Process(target=_rank, args=(rank, task)) for rank in range(task.layout.world)
    ]
    for process in processes:
        process.start()
    try:
        for process in processes:
            process.join(timeout_s)
    finally:
        # A rank that hangs must not outlive the test.
        for process in processes:
            process.kill()
    answers = []
    for rank in range(task.layout.world):
        path = Path(task.folder) / f"rank-{rank}.pt"
        assert path.is_file(), f"rank {rank} of {task.layout} did not end in {timeout_s:g} s"
        answers.append(torch.load(path, weights_only=True))
    for rank, answer in enumerate(answers):
        assert "error" not in answer, f"rank {rank} of {task.layout}: {answer['error']}"
    return answers


def _rank(rank: int, task: Task) -> None:
    """Do everything on one rank, and leave the answer, or a traceback, in the folder."""
    # The ranks share the machine with other tests.
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    answer: dict[str, Any] = {}
    try:
        # They meet by a file, which needs no port.
        dist.init_process_group(
            "gloo",
            init_method=f"file://{task.folder}/rendezvous",
            rank=rank,
            world_size=task.layout.world,
        )
        answer = _work(rank, task)
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        answer = {"error": traceback.format_exc()}
    # Written aside, since the test looks for the whole file.
    path = Path(task.folder) / f"rank-{rank}.pt"
    torch.save(answer, path.with_suffix(".new"))
    path.with_suffix(".new").rename(path)


def _work(rank: int, task: Task) -> dict[str, Any]:
    """Return what the tests look at: gradients by case, norms, weights, and what resumes wrong."""
    layout = task.layout
    generation = generation_layout(layout)
    context = RankContext("conformance", rank, layout, torch.device("cpu"), generation=generation)
    rows = Sequences.random(LENGTHS, seed=SEED)

    def built(optimizer: OptimizerConfig) -> TrainingBackend:
        backend = task.backend(task.spec, task.config, optimizer, context)
        backend.build()
        return backend

    def dealt(case: str) -> tuple[list[list[int]], int]:
        """This rank's micro-batches, and how many dummies."""
        own = list(DEALT[case][layout.coords(rank).dp])
        return ([own], 0) if own else ([], 1)

    answer: dict[str, Any] = {}
    for case in DEALT:
        passes = Passes(built(memoryless()), rows, seed=SEED)
        answer[case] = gradients(passes, task.needs, *dealt(case))

    # Steps of AdamW, and a checkpoint after two of four.
    plan, dummies = dealt("three rows and two")

    def steps(backend: TrainingBackend, count: int) -> list[float]:
        norms = []
        for _ in range(count):
            Passes(backend, rows, seed=SEED).backward(task.needs, plan, dummies)
            norms.append(float(backend.optim_step()["grad_norm"]))
        return norms

    backend = built(STEPS)
    answer["norms"] = steps(backend, 3)
    answer["weights"] = whole_weights(backend)
    folder = Path(task.folder) / "saved"
    if rank == 0:
        folder.mkdir()
    dist.barrier()
    writing = backend.save(folder)
    steps(backend, 2)
    if writing is not None:
        writing.done(wait=True)
    dist.barrier()
    resumed = built(STEPS)
    resumed.load(folder)
    steps(resumed, 2)
    answer["resumed"] = _differing(whole_weights(resumed), whole_weights(backend))
    return answer


def _differing(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[str]:
    """Return the names of the parameters that are not equal, bit for bit."""
    return [name for name, values in expected.items() if not torch.equal(found[name], values)]
