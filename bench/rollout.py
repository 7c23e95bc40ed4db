"""Tokens per second of generation: the rollout engines beside `transformers`' generate; and a weight sync into each engine.

The same weights, prompts (16 tokens each, so that generate pads nothing) and forced lengths, float32, sampled at
temperature 1: 32 tokens each, and long-tailed, where generate decodes every row to the longest and only tokens that were
asked for count. Our engines always give logprobs; generate does so by its output_logits or by a second forward, whichever
was faster in the warm-up. transformers' continuous batching takes part as well, without logprobs.
Everyone runs in a process of this script (`--engine`) in one environment, with one thread, and
takes turns: the best round after a warm-up counts. SGLang works in processes of its own, so that its scheduler may run
beside what hands it requests: tokens per processor second are those of all processes of a contestant, over all rounds.

A sync is begin_update, every parameter whole, end_update, beside a plain copy of every parameter. One JSON line per
figure; no bars. Exits 1 when something fails, an engine is missing, or a process is left behind.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
from common import ROOT, Peer, emit, family, processes  # noqa: E402

BASELINE, CONTINUOUS, ENGINES = (
    "generate",
    "continuous batching",
    ("transformers", "vllm", "sglang"),
)
AIMS = {"fixed 32": 1.6, "long-tailed": 6.0}
"""Of the embedded engine: times as fast as generate without logprobs."""
COMMON = {
    "model_type": "qwen2", "max_position_embeddings": 512, "tie_word_embeddings": True, "bos_token_id": None,
    "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
MODELS = {
    "0.8M": {"vocab_size": 64, "hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
             "num_key_value_heads": 2, "intermediate_size": 384},
    "20M": {"vocab_size": 8192, "hidden_size": 384, "num_hidden_layers": 8, "num_attention_heads": 12,
            "num_key_value_heads": 4, "intermediate_size": 1536},
    "75M": {"vocab_size": 18432, "hidden_size": 768, "num_hidden_layers": 7, "num_attention_heads": 24,
            "num_key_value_heads": 8, "intermediate_size": 3072},
}  # fmt: skip
"""Heads of 32 dimensions: the least that vLLM takes on a CPU."""
GENERATING = {"0.8M": 128, "20M": 32}
"""Requests, all at once."""
SYNCED = "75M"
SETTINGS = {
    "transformers": {},
    "vllm": {},
    "sglang": {"kv_tokens": 16384, "engine_args": {"sleep_on_idle": True}},
}
"""Of each engine's config. SGLang's scheduler would keep a core busy while others have their turn."""
PROMPT, FIXED, LONGEST = 16, 32, 128
WARM_UP = 0
"""The round that is not counted, and in which no response is longer than FIXED."""
SAME_NATS = 1e-2
PLAIN, WITH = "generate without logprobs", "generate with logprobs"


# The process of a contestant
def draws(requests: int, at: int, lengths: str, vocab: int):
    """int64 [requests, PROMPT], new ones each round, so that nobody has them in a cache; and lengths, always the same."""
    import numpy as np

    prompts = np.random.default_rng([7, at]).integers(0, vocab, (requests, PROMPT))
    if lengths != "long-tailed":
        return prompts, [FIXED] * requests
    tail = np.clip(
        np.random.default_rng(7).lognormal(2.8, 1.0, requests).astype(int) + 1, 1, LONGEST
    )
    tail[0] = LONGEST
    return prompts, np.minimum(tail, FIXED if at == WARM_UP else LONGEST).tolist()


class Contestant:
    """Holds the model whose weights everyone has; `generation` and `sync` are what is timed."""

    def __init__(self, name: str, model: str, requests: int, logs: str):
        import torch
        from transformers import AutoModelForCausalLM

        from hybridflow.core.values.model import ModelSpec
        from hybridflow.kit.huggingface.models import hf_config_of

        torch.set_num_threads(1)
        self.name, self.requests, self.logs = name, requests, logs
        self.spec = ModelSpec({**COMMON, **MODELS[model]}, None, 0)
        torch.manual_seed(0)
        self.model = AutoModelForCausalLM.from_config(
            hf_config_of(self.spec), dtype=torch.float32
        ).eval()
        self.parameters = {name: p.detach() for name, p in self.model.named_parameters()}
        self.start()

    def start(self) -> None:
        """Ready for `copy_weights`."""

    def close(self) -> None:
        """Leave nothing behind."""

    def generation(self, kind: str, lengths: str, at: int) -> dict:
        prompts, wanted = draws(self.requests, at, lengths, self.spec.vocab_size)
        seconds, responses, logprobs, how = self.sample(prompts, wanted, kind, at)
        if [len(r) for r in responses] != wanted:
            raise RuntimeError(
                f"{self.name} gave responses of {[len(r) for r in responses]} tokens, not of {wanted}"
            )
        if at == WARM_UP and logprobs is not None:
            self.check(prompts[0], responses[0], logprobs[0])
        return {"seconds": seconds, "tokens": sum(wanted), "how": how}

    def check(self, prompt, response, logprobs) -> None:
        """The logprobs are those of the model: the contestant has its weights, and computes what it should."""
        import torch

        ids = torch.cat([torch.as_tensor(prompt), torch.as_tensor(response)])
        with torch.no_grad():
            expected = self.model(ids[None]).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        expected = expected.gather(-1, torch.as_tensor(response)[:, None])[:, 0]
        off = (expected - torch.as_tensor(logprobs)).abs().max().item()
        if not off < SAME_NATS:
            raise RuntimeError(f"{self.name}'s logprobs are {off:.3g} nats off the model's")

    def sync(self, at: int, memory: bool) -> dict:
        import ctypes

        import torch

        from hybridflow.core.workers.memory import measured
        from hybridflow.kit.memory import M_MMAP_THRESHOLD

        if memory:  # what is freed goes back at once, so that the resident set is what is in use
            ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 17)
            ctypes.CDLL(None).malloc_trim(0)
            with measured(torch.device("cpu")) as peak:
                self.copy_weights(at)
            return {"bytes": peak.most - peak.before}
        started = time.perf_counter()
        self.copy_weights(at)
        return {
            "seconds": time.perf_counter() - started,
            "bytes": sum(p.nbytes for p in self.parameters.values()),
        }


class Generate(Contestant):
    """transformers' generate: all requests as one batch."""

    def start(self) -> None:
        self.other = {name: p.clone() for name, p in self.parameters.items()}
        self.faster = ""

    def copy_weights(self, at: int) -> None:
        for name, values in self.parameters.items():
            self.other[name].copy_(values)

    def sample(self, prompts, wanted, kind: str, at: int):
        if kind == PLAIN:
            return (*self._run("none", prompts, wanted, at), "")
        if not self.faster:
            ways = ("output_logits", "second forward")
            seconds = {
                way: min(self._run(way, prompts, wanted, at)[0] for _ in range(2)) for way in ways
            }
            self.faster = min(seconds, key=seconds.__getitem__)
        return (*self._run(self.faster, prompts, wanted, at), self.faster)

    def _run(self, way: str, prompts, wanted, at: int):
        import torch

        torch.manual_seed(at)
        started = time.perf_counter()
        with torch.inference_mode():
            ids = torch.from_numpy(prompts)
            out = self.model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=max(wanted), do_sample=True, temperature=1.0,
                top_k=0, top_p=1.0, pad_token_id=0, return_dict_in_generate=True, output_logits=way == "output_logits",
            )  # fmt: skip
            sampled, logprobs = out.sequences[:, PROMPT:], None
            if way == "output_logits":
                steps = [
                    x.gather(1, y[:, None])[:, 0] - x.logsumexp(-1)
                    for x, y in zip(out.logits, sampled.T, strict=True)
                ]
                logprobs = torch.stack(steps, 1)
            elif way == "second forward":
                logits = self.model(
                    out.sequences[:, :-1], use_cache=False, logits_to_keep=max(wanted)
                ).logits
                logprobs = logits.gather(-1, sampled[..., None])[..., 0] - logits.logsumexp(-1)
            responses = [row[:n].numpy() for row, n in zip(sampled, wanted, strict=True)]
        seconds = time.perf_counter() - started
        values = (
            None
            if logprobs is None
            else [row[:n].numpy() for row, n in zip(logprobs, wanted, strict=True)]
        )
        return seconds, responses, values


class Continuous(Contestant):
    """transformers' continuous batching: a thread that takes requests one by one."""

    def start(self) -> None:
        from transformers import ContinuousBatchingConfig, GenerationConfig

        config = GenerationConfig(
            do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=LONGEST,
            eos_token_id=-1, pad_token_id=0,
        )  # fmt: skip
        # By itself it would take most of the machine's memory, which the others share.
        cache = ContinuousBatchingConfig(max_memory_percent=0.1)
        self.manager = self.model.init_continuous_batching(
            generation_config=config, continuous_batching_config=cache
        )
        self.manager.start()

    def sample(self, prompts, wanted, kind: str, at: int):
        import torch

        torch.manual_seed(at)
        started = time.perf_counter()
        ids = [
            self.manager.add_request(prompt.tolist(), max_new_tokens=n)
            for prompt, n in zip(prompts, wanted, strict=True)
        ]
        done: dict = {}
        while len(done) < len(ids):
            result = self.manager.get_result(timeout=60)
            if result is None:
                raise RuntimeError("no result within a minute")
            if result.is_finished():
                done[result.request_id] = result.generated_tokens
        seconds = time.perf_counter() - started
        return seconds, [done[number] for number in ids], None, ""

    def close(self) -> None:
        self.manager.stop(block=True)


class Engine(Contestant):
    """One of our engines, as a worker has it."""

    def start(self) -> None:
        import torch
        import torch.distributed as dist

        from hybridflow.core.contracts.worker import RankContext
        from hybridflow.core.plugins import registry
        from hybridflow.core.rollouts.build import build_engine
        from hybridflow.core.values.parallel import ParallelLayout, generation_layout

        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        layout = ParallelLayout()
        context = RankContext(
            "bench", 0, layout, torch.device("cpu"), generation=generation_layout(layout)
        )
        config = registry().get("rollout_engine", self.name).Config(**SETTINGS[self.name])
        self.engine = build_engine(self.name, self.spec, config, context, self.logs)
        self.engine.start()
        self.copy_weights(0)

    def copy_weights(self, at: int) -> None:
        from hybridflow.core.values.weights import Box

        self.engine.begin_update(at)
        for name in self.engine.layout().params:
            values = self.parameters[name]
            self.engine.receive(name, Box.full(values.shape), values)
        self.engine.end_update()

    def sample(self, prompts, wanted, kind: str, at: int):
        from hybridflow.core.contracts.rollout import Request, SamplingParams

        started = time.perf_counter()
        requests = [
            Request(
                row, prompt, SamplingParams(max_tokens=n, ignore_stop=True), seed=1000 * at + row
            )
            for row, (prompt, n) in enumerate(zip(prompts, wanted, strict=True))
        ]
        done = self.engine.generate(requests)
        seconds = time.perf_counter() - started
        return seconds, [c.response_ids for c in done], [c.logprobs for c in done], ""

    def close(self) -> None:
        self.engine.close()


def serve(arguments: argparse.Namespace) -> int:
    """Calls come as JSON, one a line, until there are no more; whatever libraries print goes to the log."""
    sys.path.remove(str(HERE))  # our file names are nobody's modules
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(value) -> None:
        print("answer", json.dumps(value), file=answers, flush=True)

    made = {BASELINE: Generate, CONTINUOUS: Continuous}.get(arguments.engine, Engine)
    if made is Engine and find_spec(arguments.engine) is None:
        answer("missing")
        return 0
    contestant = made(arguments.engine, arguments.model, arguments.requests, arguments.logs)
    try:
        answer("ready")
        for line in sys.stdin:
            call = json.loads(line)
            answer(getattr(contestant, call.pop("call"))(**call))
    finally:
        contestant.close()
    return 0


# The process that asks them
class Process(Peer):
    """One contestant with one model. `ready` waits until it has started."""

    def __init__(self, name: str, model: str, arguments: argparse.Namespace, logs: Path):
        self.name, self.log = name, logs / f"{name}-{model}.log"
        command = [
            str(arguments.python),
            str(HERE / "rollout.py"),
            "--engine",
            name,
            "--model",
            model,
        ]
        requests = arguments.requests or GENERATING.get(model, 1)
        command += ["--requests", str(requests), "--logs", str(logs)]
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self.seen: set[tuple[int, str]] = set()

    def ready(self) -> bool:
        """False when the environment lacks the engine."""
        if self._answer() == "ready":
            return True
        print(
            f"# {self.process.args[0]} has no {self.name}: make .venv-engines/.done",
            file=sys.stderr,
        )
        return False

    def call(self, name: str, **parameters) -> dict:
        """What it answers, and the processor seconds that all of its processes took."""
        before = family(self.process.pid)
        answer = self.ask(json.dumps({"call": name, **parameters}))
        after = family(self.process.pid)
        self.seen |= before.keys() | after.keys()
        return {**answer, "processor": sum(after.values()) - sum(before.values())}

    def _answer(self):
        try:
            return super()._answer()
        except RuntimeError as error:
            raise RuntimeError(
                f"{self.name}: {error}\n{self.log.read_text(errors='replace')[-4000:]}"
            ) from None

    def left_behind(self) -> set[tuple[int, str]]:
        """Close it; its processes that live on."""
        self.seen |= family(self.process.pid).keys()
        self.close()
        deadline = time.monotonic() + 10
        while left := self.seen & {(p, start) for p, (_, start, _) in processes().items()}:
            if time.monotonic() > deadline:
                break
            time.sleep(0.1)
        return left


@contextlib.contextmanager
def contestants(model: str, arguments: argparse.Namespace, more: tuple[str, ...] = ()):
    """Name -> its process with this model, started at once; ended, and missed, afterwards."""
    logs = Path(tempfile.mkdtemp(prefix="hybridflow-bench-"))
    started = {
        name: Process(name, model, arguments, logs)
        for name in (BASELINE, *more, *arguments.engines)
    }
    try:
        there = {name: process for name, process in started.items() if process.ready()}
        arguments.good &= len(there) == len(started)
        yield there
    finally:
        left = set().union(*(process.left_behind() for process in started.values()))
        if left:
            print(f"# left behind: processes {sorted(pid for pid, _ in left)}", file=sys.stderr)
            arguments.good = False
        shutil.rmtree(logs, ignore_errors=True)


def compare(model: str, lengths: str, there: dict[str, Process], rounds: int) -> None:
    turns = [(PLAIN, BASELINE), (WITH, BASELINE)] + [
        (name, name) for name in there if name != BASELINE
    ]
    found: dict[str, list[dict]] = {kind: [] for kind, _ in turns}
    for at in range(rounds + 1):
        for kind, name in turns:
            answer = there[name].call("generation", kind=kind, lengths=lengths, at=at)
            if at != WARM_UP:
                found[kind].append(answer)
    rate = {
        kind: max(a["tokens"] / a["seconds"] for a in answers) for kind, answers in found.items()
    }
    frugal = {
        kind: sum(a["tokens"] for a in answers) / sum(a["processor"] for a in answers)
        for kind, answers in found.items()
    }
    tokens = found[PLAIN][0]["tokens"]
    case = f"generation, {model}, {lengths} ({tokens} tokens)"
    how = {
        PLAIN: PLAIN,
        WITH: f"{WITH} ({found[WITH][0]['how']})",
        "sglang": "sglang (processes of its own)",
    }
    for kind, answers in found.items():
        ours = kind in ENGINES
        name = f"{case}, {how.get(kind, kind)}{', logprobs always' if ours else ''}"
        if kind == PLAIN:
            emit(name, rate[kind], "tokens/s")
        else:
            emit(
                name, rate[kind], "tokens/s", ratio=rate[kind] / rate[PLAIN], against=PLAIN,
                spread=in_rounds(answers, found[PLAIN]),
                aim=AIMS.get(lengths) if kind == "transformers" else None,
            )  # fmt: skip
        if ours:
            emit(
                name, rate[kind], "tokens/s", ratio=rate[kind] / rate[WITH], against=WITH,
                spread=in_rounds(answers, found[WITH]),
            )  # fmt: skip
        ratio = {"ratio": frugal[kind] / frugal[WITH], "against": WITH} if ours else {}
        emit(name, frugal[kind], "tokens/processor s", **ratio)


def in_rounds(ours: list[dict], theirs: list[dict]) -> list[float]:
    """How many times as fast ours were, in each round."""
    return [b["seconds"] / a["seconds"] for a, b in zip(ours, theirs, strict=True)]


def syncs(model: str, there: dict[str, Process], rounds: int) -> None:
    found: dict[str, list[dict]] = {name: [] for name in there}
    for at in range(1, rounds + 2):
        for name, process in there.items():
            found[name].append(process.call("sync", at=at, memory=False))
    best = {name: min(a["seconds"] for a in answers[1:]) for name, answers in found.items()}
    for name, process in there.items():
        case = f"weight sync, {model} ({found[name][0]['bytes'] / 1e6:.0f} MB)"
        if name == BASELINE:
            emit(f"{case}, a plain copy", best[name], "s")
            continue
        emit(
            f"{case}, {name}",
            best[name],
            "s",
            ratio=best[name] / best[BASELINE],
            against="a plain copy",
        )
        peak = process.call("sync", at=rounds + 2, memory=True)["bytes"]
        where = "the worker's process, not SGLang's own" if name == "sglang" else "its process"
        emit(f"{case}, {name}: peak above what stood before, in {where}", peak / 1e6, "MB")


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--python", type=Path, default=ROOT / ".venv-engines/bin/python", help="has all engines"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, help="of every model")
    parser.add_argument("--models", nargs="*", choices=list(GENERATING), default=list(GENERATING))
    parser.add_argument(
        "--synced", choices=list(MODELS), default=SYNCED, help="the model of the weight sync"
    )
    parser.add_argument("--only", choices=("generation", "sync"))
    parser.add_argument("--engines", nargs="*", choices=ENGINES, default=ENGINES)
    parser.add_argument(
        "--engine", choices=(BASELINE, CONTINUOUS, *ENGINES), help=argparse.SUPPRESS
    )
    parser.add_argument("--model", choices=list(MODELS), help=argparse.SUPPRESS)
    parser.add_argument("--logs", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    arguments = parsed()
    if arguments.engine:
        return serve(arguments)
    if not arguments.python.exists():
        print(
            f"# there is no {arguments.python}: make .venv-engines/.done, or --python PATH",
            file=sys.stderr,
        )
        return 1
    arguments.good = True
    for model in arguments.models if arguments.only != "sync" else ():
        with contestants(model, arguments, (CONTINUOUS,)) as there:
            for lengths in (f"fixed {FIXED}", "long-tailed"):
                compare(model, lengths, there, arguments.rounds)
    if arguments.only != "generation":
        with contestants(arguments.synced, arguments) as there:
            syncs(arguments.synced, there, arguments.rounds)
    return 0 if arguments.good else 1


if __name__ == "__main__":
    sys.exit(main())
