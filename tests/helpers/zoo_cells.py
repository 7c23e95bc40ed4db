"""One cell of the zoo, an architecture through an engine, and what came of it.

    folders 1 and 2     written by transformers' save_pretrained, with random weights
    fsdp trainer        loads 1; later its parameters are set to 2's
    engine              starts, gets a sync of 1, speaks; gets a sync of 2, speaks
    Hugging Face        loads 1 and 2 itself: its greedy tokens, and its logprobs of them

`python -m helpers.zoo_cells ENGINE TP ARCHITECTURE...` (from tests/) runs cells in one process, a JSON line each.
"""

from __future__ import annotations

import faulthandler
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import attrs
import pytest
import torch

from helpers.zoo import BAR, ENGINES, ZOO, limit_of

TESTS = Path(__file__).resolve().parents[1]
TOKENS = 12
LIMIT_S = 300
"""How long a cell may take; then its process says where each thread is, and ends."""
PROMPTS = [[5, 17, 90, 2, 41, 8, 60, 33, 70], [1, 2, 3, 4, 5, 6, 7], [61], [9, 9, 30, 55]]
"""Longer than the sliding windows, and shorter."""
Spoken = list[tuple[list[int], list[float]]]
"""For each prompt the tokens of the response, and their logprobs."""


@attrs.frozen
class Outcome:
    """What came of a cell."""

    architecture: str
    engine: str
    tp: int
    kind: str
    """ "works", "differs" (other tokens, or logprobs beyond BAR), or "refused"."""
    worst: float = 0.0
    """The largest difference of a logprob from Hugging Face's."""
    message: str = ""
    """Why it was refused, or what differs."""

    def unexpected(self) -> str | None:
        """Say how it is not as the limits say; None where it is."""
        limit = limit_of(self.architecture, self.engine, self.tp)
        kind = limit.kind if limit else "works"
        if self.kind == kind and (limit is None or limit.message in self.message):
            return None
        asked = f"{kind} {limit.message}" if limit else kind
        return f"{self.architecture}, {self.engine}, tp {self.tp}: {self.kind} {self.message}; expected: {asked}"


# --- a cell ---


def write_model(name: str, seed: int, folder: Path) -> Path:
    """Write a model with random weights, so large that a mistake in any of them shows."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from hybridflow.kit.huggingface.modeling import saved_buffers

    fields = ZOO[name].config()
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() > 1:
                parameter.copy_(0.15 * noise)
            else:
                parameter.add_(0.2 * noise)
        for _, values in saved_buffers(model):
            values.add_(0.2 * torch.randn(values.shape, generator=generator))
    model.save_pretrained(folder)
    return folder


def spoken_by_hugging_face(model: Any) -> Spoken:
    """The greedy tokens of `generate`, and their logprobs in one forward pass."""
    answers = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        with torch.no_grad():
            whole = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS, do_sample=False
            )
            logits = model(input_ids=whole, use_cache=False).logits[0, len(prompt) - 1 : -1]
        response = whole[0, len(prompt) :]
        logprobs = logits.float().log_softmax(-1).gather(-1, response[:, None])[:, 0]
        answers.append((response.tolist(), logprobs.tolist()))
    return answers


def read_model(folder: str) -> Any:
    """The model in a folder, in plain matrix products."""
    from transformers import AutoModelForCausalLM

    kernels = {"dtype": torch.float32, "attn_implementation": "eager"}
    return AutoModelForCausalLM.from_pretrained(folder, **kernels).eval()


def cell(rank: int, world: int, folders: Sequence[str], engine: str) -> dict[str, list]:
    """What a rank's engine says after a sync of each folder's weights, and the trainer of it. Collective."""
    from helpers.training_jobs import Setup, make_worker
    from hybridflow.core.contracts.rollout import SamplingParams
    from hybridflow.core.values.batch import Batch
    from hybridflow.core.values.columns import tokens
    from hybridflow.core.values.parallel import ParallelLayout

    torch.set_num_threads(1)
    said: dict[str, list] = {"spoken": [], "trained": []}
    prompts = [torch.tensor(prompt) for prompt in PROMPTS]
    ask = Batch({"prompt_ids": tokens(prompts, torch.int32), "sample_id": torch.arange(4)})
    greedy = SamplingParams(max_tokens=TOKENS, temperature=0.0)
    # Read before the engine changes the process
    models = [read_model(folder) for folder in folders]
    setup = Setup(
        folders[0], layout=ParallelLayout(dp=world), generation_tp=world, engine=engine,
        engine_config=ENGINES[engine], keep_engine=False,
    )  # fmt: skip
    worker = make_worker(rank, setup)
    try:
        for version, model in enumerate(models):
            if version:
                set_weights(worker.backend, model)
            made = worker.generate(ask, greedy, seed=0)
            assert worker.engine.version == version
            rows = zip(made["response_ids"], made["rollout_logprobs"], strict=True)
            said["spoken"].append([(ids.tolist(), logprobs.tolist()) for ids, logprobs in rows])
            trained = worker.logprobs(ask.join(made), {"logprobs": "x"})["x"]
            said["trained"].append([row.tolist() for row in trained])
    finally:
        worker.close()
    return said


def set_weights(backend: Any, model: torch.nn.Module) -> None:
    """Give an FSDP trainer another model's weights, as a step of training would."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    from hybridflow.kit.huggingface.modeling import saved_buffers

    others = dict(model.named_parameters())
    for name, parameter in backend.parameters.items():
        values = others.pop(name).detach()
        if isinstance(parameter, DTensor):
            values = distribute_tensor(values, parameter.device_mesh, parameter.placements)
        with torch.no_grad():
            parameter.copy_(values)
    assert not others, others.keys()
    buffers = zip(saved_buffers(backend.module.hf), saved_buffers(model), strict=True)
    for (_, values), (_, new) in buffers:
        values.copy_(new)
    backend.version += 1


# --- what came of it ---


def judged(
    name: str, engine: str, expected: Sequence[Spoken], answers: Sequence[dict[str, list]]
) -> Outcome:
    """Compare what the ranks of a cell say with what Hugging Face says."""
    worst, wrong = 0.0, []
    for answer in answers:
        for sync in range(2):
            said = answer["spoken"][sync], answer["trained"][sync]
            rows = zip(*said, expected[sync], strict=True)
            for (ids, logprobs), trained, (right_ids, right) in rows:
                if ids != right_ids:
                    wrong.append(f"other tokens after sync {sync + 1}")
                    continue
                worst = max(worst, apart(logprobs, right))
                if apart(trained, right) > BAR:
                    wrong.append("the trainer's logprobs are others")
    if worst > BAR:
        wrong.append(f"logprobs differ by {worst:.0e}")
    message = "; ".join(dict.fromkeys(wrong))
    kind = "differs" if wrong else "works"
    return Outcome(name, engine, len(answers), kind, worst, message)


def apart(some: Sequence[float], others: Sequence[float]) -> float:
    return max(abs(one - other) for one, other in zip(some, others, strict=True))


def run_cell(name: str, engine: str, tp: int = 1) -> Outcome:
    """Run a cell in this process, or with two ranks in two others; it raises nothing."""
    from helpers.ranks import Ranks

    ranks = Ranks()
    with tempfile.TemporaryDirectory() as root:
        folders = [str(write_model(name, seed, Path(root, str(seed)))) for seed in (1, 2)]
        expected = [spoken_by_hugging_face(read_model(folder)) for folder in folders]
        try:
            return judged(name, engine, expected, ranks(cell, tp, folders, engine))
        except Exception as error:
            message = reason(f"{type(error).__name__}: {error}")
            return Outcome(name, engine, tp, "refused", message=message)
        finally:
            ranks.end()


def reason(text: str) -> str:
    """The error itself, in what may be a traceback or the end of a log."""
    errors = re.findall(
        r"^[ |]*(?:\[rank\d\]: )?(?:\w+\.)*(\w*(?:Error|Exception)(?:: .*)?)$", text, re.M
    )
    return errors[-1] if errors else text.splitlines()[-1]


def run_cells(names: Sequence[str], engine: str, tp: int = 1) -> Iterator[Outcome]:
    """Run cells in a process of their own; what ends it, ends a cell, and the next ones have another process."""
    left = list(names)
    while left:
        command = [sys.executable, "-m", "helpers.zoo_cells", engine, str(tp), *left]
        # Into a file: what an engine leaves behind would hold a pipe open.
        with tempfile.NamedTemporaryFile("r", prefix="zoo-") as output:
            with open(output.name, "w") as end:
                process = subprocess.Popen(command, cwd=TESTS, stdout=end, stderr=end)
            lines = []
            for line in lines_of(process, output):
                lines.append(line)
                if line.startswith("cell "):
                    outcome = Outcome(**json.loads(line[5:]))
                    left.remove(outcome.architecture)
                    yield outcome
        if process.returncode:
            said = "".join(lines)
            message = f"the process ended with {process.returncode}: {reason(said)}"
            if "Timeout (" in said:
                message = f"it took longer than {LIMIT_S} s: {said[-6000:]}"
            yield Outcome(left.pop(0), engine, tp, "refused", message=message)


def lines_of(process: subprocess.Popen, output: IO[str]) -> Iterator[str]:
    """Yield the lines that a process writes to a file, as they come, until it has ended."""
    line = ""
    while True:
        ended = process.poll() is not None
        for part in output:
            line += part
            if line.endswith("\n"):
                yield line
                line = ""
        if ended:
            break
        time.sleep(0.2)
    if line:
        yield line


def check_cells(names: Sequence[str], engine: str, tp: int = 1) -> None:
    """Require that these cells are as the limits say; a test is skipped where the engine is not installed."""
    if engine != "transformers":
        pytest.importorskip(engine)
    outcomes = list(run_cells(names, engine, tp))
    assert [outcome.unexpected() for outcome in outcomes] == [None] * len(names)


def main() -> None:
    """Run cells one after another, up to the first that is refused; each gives a line on stdout."""
    engine, tp, *names = sys.argv[1:]
    for name in names:
        faulthandler.dump_traceback_later(LIMIT_S, exit=True)
        outcome = run_cell(name, engine, int(tp))
        print("cell " + json.dumps(attrs.asdict(outcome)), flush=True)
        # An engine whose start failed may leave its process in any state.
        if outcome.kind == "refused":
            break


if __name__ == "__main__":
    main()
