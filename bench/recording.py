"""What recording and reporting a run cost.

    python bench/recording.py            about five minutes
    python bench/recording.py --only step bound page

step: processor time of the recorder in 300 steps of the demo's second stage, begun from nothing, against the time of these
steps; and of a run whose steps take about a second, against a second. All that exists for recording counts: the choice of
rows, the logprobs that the loss keeps, reading their columns, the timeline, and writing. The run is in one process, so that
nothing of it happens elsewhere.

bound: 3,000 steps of 8 rows of 512 tokens, whose files stay within their bound at each flush.

page: of 300 steps of the demo, and of 2,000 steps x 512 rows, of which as many are recorded as the bound allows.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "tests")]
from common import emit  # noqa: E402
from helpers.recorded import made_run, metrics_of, row_of  # noqa: E402

STEPS = 300
PIECES = [f"w{number:x}" for number in range(50_000)]
DEMO = ("algorithm.prompts_per_step=128", "algorithm.group_size=8", "sampling.max_tokens=4")
SECOND = ("algorithm.prompts_per_step=24", "algorithm.group_size=8", "sampling.max_tokens=48")
ALGORITHM = """
algorithm = { name = "grpo" }
runtime = "inline"
run.report = false
run.export = false
run.final_checkpoint = false
[pools]
main = [1]
[tokenizer]
characters = "0123456789+="
[data]
source = "arithmetic"
bos = true
answer = "{answer}"
max_prompt_tokens = 8
[reward]
function = "exact_match"
[actor]
micro_batch_tokens = 8192
optimizer = { lr = 3e-4 }
[actor.model.config]
model_type = "qwen2"
vocab_size = 16
hidden_size = 128
num_hidden_layers = 4
num_attention_heads = 4
num_key_value_heads = 2
intermediate_size = 384
max_position_embeddings = 64
tie_word_embeddings = true
"""


@contextlib.contextmanager
def counted() -> Iterator[list[float]]:
    """Count processor seconds of whatever exists for recording, in a list of one number."""
    from hybridflow.core.running.samples import RowRecorder
    from hybridflow.core.running.timeline import Timeline
    from hybridflow.core.workers.gradients import LossPart
    from hybridflow.report.recorder import RunRecording

    spent = [0.0]
    depth = [0]
    # `take` of the timeline is where a step's times come from too; all of it counts as recording.
    named: list[tuple[type, str]] = [
        *((RowRecorder, name) for name in ("mark", "scored", "take")),
        *(
            (RunRecording, name)
            for name in ("begin", "samples", "spans", "step", "checkpoint", "close")
        ),
        (Timeline, "take"),
        (Timeline, "add"),
        (LossPart, "_record"),
    ]
    before = [(owner, name, getattr(owner, name)) for owner, name in named]

    def wrapped(function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            depth[0] += 1
            started = time.process_time()
            try:
                return function(*args, **kwargs)
            finally:
                depth[0] -= 1
                if not depth[0]:
                    spent[0] += time.process_time() - started

        return call

    for owner, name, function in before:
        setattr(owner, name, wrapped(function))
    try:
        yield spent
    finally:
        for owner, name, function in before:
            setattr(owner, name, function)


def recorded(folder: Path, steps: int, settings: tuple[str, ...]) -> tuple[float, float]:
    """Run, and return the recorder's processor seconds and the median seconds of a step."""
    from hybridflow.kit.runs import logged
    from hybridflow.settle.launch import run

    config = folder / "run.toml"
    config.write_text(ALGORITHM)
    overrides = [f"run.steps={steps}", f"run.folder={folder}", *settings]
    with counted() as spent, contextlib.redirect_stdout(io.StringIO()):
        run(config, overrides, overwrite=True)
    took = [row["seconds/step"] for row in logged(folder / "run")]
    return spent[0], sum(took) / len(took)


def drawn_rows(generator: np.random.Generator, step: int, rows: int, length: int) -> list[dict]:
    """Rows of random tokens of a vocabulary of 50,000, which nothing compresses as repeated text would be."""
    made = []
    for at in range(rows):
        ids = generator.integers(0, 50_000, length, dtype=np.int32)
        logprobs = -generator.exponential(1.0, length).astype(np.float32)
        texts = [PIECES[token] for token in ids]
        own = {"response_ids": ids, "response_tokens": texts, "response": "".join(texts)}
        noise = generator.normal(0, 1e-6, length).astype(np.float32)
        columns = {"rollout_logprobs": logprobs, "old_logprobs": logprobs + noise}
        made.append(row_of(step, at, length=length, **own, **columns))
    return made


def step(folder: Path) -> bool:
    met = True
    for name, settings, most in (("demo", DEMO, 0.03), ("second", SECOND, 0.01)):
        own = folder / name
        own.mkdir()
        spent, took = recorded(own, STEPS, settings)
        met &= emit(f"recording/{name}/step", took, "s")
        each = spent / STEPS
        # Of steps that take longer or shorter than a second, the share of a second.
        whole = took if name == "demo" else 1.0
        met &= emit(
            f"recording/{name}/recorder", each, "s", ratio=each / whole,
            against="the step" if name == "demo" else "a second", bar=most, at_most=True,
        )  # fmt: skip
    return met


def bound(folder: Path) -> bool:
    from hybridflow.kit.recording import SAMPLES, RecordedTable, parts_of

    most = 64_000_000
    table = RecordedTable(folder, SAMPLES, most)
    table.begin(0)
    largest = 0
    generator = np.random.default_rng(0)
    started = time.process_time()
    for number in range(1, 3001):
        table.add(drawn_rows(generator, number, 8, 512))
        if number % 20 == 0:
            table.flush()
            largest = max(
                largest, sum(part.stat().st_size for part in parts_of(table.folder, SAMPLES))
            )
    emit(
        "recording/bound/cpu",
        (time.process_time() - started) / 3000,
        "s a step, with making the rows",
    )
    emit("recording/bound/every", table.every, "steps")
    return emit("recording/bound/largest", largest / 1e6, "MB", bar=most / 1e6, at_most=True)


def page(folder: Path) -> bool:
    from hybridflow.kit.recording import SAMPLES, RecordedTable
    from hybridflow.report.building import write_report

    demo = folder / "demo"
    demo.mkdir()
    recorded(demo, STEPS, DEMO)
    large = made_run(
        folder / "large", {"run.steps": 2000}, [metrics_of(number) for number in range(1, 2001)], []
    )
    table = RecordedTable(large, SAMPLES, 64_000_000)
    table.begin(0)
    generator = np.random.default_rng(0)
    for number in range(1, 2001):
        table.add(drawn_rows(generator, number, 512, 32))
    table.flush()
    met = True
    for name, run, most in (("demo", demo / "run", 5), ("large", large, 20)):
        started = time.perf_counter()
        file = write_report([run], folder / f"{name}.html")
        met &= emit(f"report/{name}/time", time.perf_counter() - started, "s", bar=10, at_most=True)
        met &= emit(f"report/{name}/size", file.stat().st_size / 1e6, "MB", bar=most, at_most=True)
    return met


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", nargs="+", default=["step", "bound", "page"])
    arguments = parser.parse_args()
    met = True
    for measure in (step, bound, page):
        if measure.__name__ in arguments.only:
            with tempfile.TemporaryDirectory() as folder:
                met &= measure(Path(folder))
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
