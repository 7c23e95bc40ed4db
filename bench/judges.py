"""Rewards in a pool on CPUs: judges side by side, beside the reference model, and 1,024 programs of 5 tests.

python bench/judges.py

On Ray, on two cores. The programs' baseline is the sandbox of commit fa6a200, which started two interpreters for each test, one
test at a time; it is taken from git and measured in the same run. One JSON line per figure; exits 1 where a bar is missed.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).parent))
import torch
from common import emit

from hybridflow.algorithms.grpo import GRPO, GRPOConfig
from hybridflow.core.contracts.reward import RewardSample
from hybridflow.core.contracts.runtime import ResourcePool
from hybridflow.core.contracts.tokenizer import TokenizerConfig
from hybridflow.core.groups.group import Pool, WorkerGroup
from hybridflow.core.job.sections import RewardPart
from hybridflow.core.plugins.resolve import build_tokenizer
from hybridflow.core.values.batch import Batch
from hybridflow.core.values.columns import tokens
from hybridflow.core.workers.tasks import RewardWorker
from hybridflow.kit.testing import TinyRun
from hybridflow.kit.testing.runs import MODEL

PARENT = "fa6a200"
"""The commit whose sandbox is the baseline."""
JUDGES, BESIDE, PROGRAMS = 3.5, 1.1, 5.0
"""Bars: four judges over one; reward and reference together over the longer of the two; programs over the baseline."""
AIM_S = 60.0
"""Aim for all programs."""
COUNT = 1024
PARENT_TESTS = 200
SLEEP_S = 0.05
PROGRAM = (
    "import sys\n\ndef add(a, b):\n    return a + b + {0} - {0}\n\n"
    "if line := sys.stdin.readline():\n    print(add(*map(int, line.split())))\n"
)
TESTS = [
    {"input": "3 4", "output": "7"},
    {"input": "10 -4", "output": "6"},
    "assert add(1, 2) == 3",
    "assert add(0, 0) == 0\nassert add(-1, 1) == 0",
    "assert [add(n, n) for n in range(100)] == [2 * n for n in range(100)]",
]


def sleeps(sample: RewardSample) -> float:
    """A judge that waits for somebody else."""
    time.sleep(SLEEP_S)
    return float(len(sample.response_ids))


def in_pool(
    runtime: Any, ranks: int, part: RewardPart, batch: Batch, tokenizer: Any
) -> tuple[float, list[float]]:
    """Seconds, and scores, of a batch that is scored in a pool of so many ranks; the second time."""
    pool = Pool.launch(ResourcePool(f"judges{ranks}{part.name}", (ranks,), "cpu"), runtime)
    group = WorkerGroup(RewardWorker, pool, [part], tokenizer, name="reward")
    group.score(batch.take(slice(0, 2 * ranks)), "scores")[
        "scores"
    ]  # imports, and the first interpreter
    started = time.perf_counter()
    scores = torch.as_tensor(group.score(batch, "scores")["scores"].values).tolist()
    return time.perf_counter() - started, scores


def texts(lines: list[str], meta: dict, tokenizer: Any) -> Batch:
    return Batch(
        {
            "prompt_ids": tokens([tokenizer.encode("1")] * len(lines), torch.int64),
            "response_ids": tokens([tokenizer.encode(line) for line in lines], torch.int64),
            "meta": [meta] * len(lines),
        }
    )


def parents_test_s() -> float:
    """Seconds of a test in the sandbox of the parent commit."""
    root = Path(__file__).parents[1]
    with tempfile.TemporaryDirectory() as folder:
        for name in ("jail.py", "sandbox.py"):
            command = ["git", "-C", str(root), "show", f"{PARENT}:backends/rewards/{name}"]
            Path(folder, name).write_bytes(
                subprocess.run(command, check=True, capture_output=True).stdout
            )
        spec = importlib.util.spec_from_file_location("parents_sandbox", f"{folder}/sandbox.py")
        assert spec is not None and spec.loader is not None
        sandbox = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sandbox)

        program = PROGRAM.format(0)
        started = time.perf_counter()
        for number in range(PARENT_TESTS):
            test = TESTS[number % len(TESTS)]
            if isinstance(test, str):
                good = sandbox.run_program(f"{program}\n\n{test}\n", None).good
            else:
                good = sandbox.run_program(program, test["input"]).output.strip() == test["output"]
            assert good
        return (time.perf_counter() - started) / PARENT_TESTS


def beside_the_reference() -> tuple[float, float, float]:
    """Seconds of the reference's logprobs, of a reward of about as long, and of both."""
    actor = {**MODEL, "max_position_embeddings": 128}
    large = {**actor, "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 8}
    tables = {
        "runtime": "ray",
        "pools": {"main": [1], "judges": {"devices": [4], "device": "cpu"}},
        "reward": {"function": "judges:sleeps", "pool": "judges"},
        "actor": {"model": {"config": actor}},
        "ref": {"model": {"config": large}},
        "sampling": {"max_tokens": 64},
    }
    with TinyRun(GRPO(GRPOConfig(prompts_per_step=24, group_size=4, kl_coef=0.1)), tables) as run:
        ctx = run.ctx
        batch = ctx.actor.generate(ctx.prompts(24).repeat(4))
        batch["response_ids"]

        def timed(*verbs: Any) -> float:
            started = time.perf_counter()
            for made in [verb(batch) for verb in verbs]:
                assert made.metrics is not None  # waits
            return time.perf_counter() - started

        timed(ctx.ref.logprobs, ctx.reward.score)
        return (
            timed(ctx.ref.logprobs),
            timed(ctx.reward.score),
            timed(ctx.ref.logprobs, ctx.reward.score),
        )


def main() -> int:
    from hybridflow.backends.ray.config import RayConfig
    from hybridflow.backends.ray.runtime import RayRuntime

    runtime = RayRuntime(RayConfig(object_store_gb=0.2))
    runtime.start()
    characters = "".join(map(chr, range(32, 127))) + "\n"
    tokenizer = build_tokenizer(TokenizerConfig(characters=characters), None, list)

    waits = RewardPart("sleeps", "judges:sleeps")
    lines = texts(["1"] * 64, {}, tokenizer)
    one, _ = in_pool(runtime, 1, waits, lines, tokenizer)
    four, _ = in_pool(runtime, 4, waits, lines, tokenizer)
    met = emit("four sleeping judges", four, "s", ratio=one / four, against="one", bar=JUDGES)

    parent = COUNT * len(TESTS) * parents_test_s()
    emit(
        f"{COUNT} programs of {len(TESTS)} tests, sandbox of {PARENT}",
        parent,
        f"s (from {PARENT_TESTS} tests)",
    )
    code = RewardPart("code", "code")
    batch = texts([PROGRAM.format(number) for number in range(COUNT)], {"tests": TESTS}, tokenizer)
    seconds, scores = in_pool(runtime, 2, code, batch, tokenizer)
    assert set(scores) == {1.0}, set(scores)
    met &= emit(
        f"{COUNT} programs of {len(TESTS)} tests, two judges", seconds, "s", ratio=parent / seconds,
        against=f"the sandbox of {PARENT}", bar=PROGRAMS, aim=AIM_S,
    )  # fmt: skip
    runtime.shutdown()

    reference, reward, both = beside_the_reference()
    emit("the reference's logprobs", reference, "s")
    emit("a reward on four judges", reward, "s")
    longer = max(reference, reward)
    met &= emit(
        "both",
        both,
        "s",
        ratio=both / longer,
        against="the longer of the two",
        bar=BESIDE,
        at_most=True,
    )
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
