"""A weight sync of 300 MB in bfloat16, one trainer rank and tp 1: seconds in memory copies of the same bytes.

A sync is begin_update, every box of the engine's layout, end_update. Beside it, in the same process and in turns, the
engine's own loader with whole tensors. vLLM is measured twice: with weights as they are loaded (what packs them for a
CPU is switched off, as on a GPU), and packed, where the packing alone is the measure. One thread. One JSON line per
figure; exits 1 when a bar is missed: at most 2 copies for vLLM as loaded and for the embedded engine, 1.3 times the
packing for vLLM packed, 4 copies for SGLang. The proofs of a sync, on both sides, stand apart: one of a 32nd of the values
may take 0.3 of one of all values, which has no bar.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from common import emit, measured, timed

MODEL = {
    "model_type": "qwen2", "vocab_size": 16384, "hidden_size": 1024, "num_hidden_layers": 9, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 4096, "max_position_embeddings": 512, "tie_word_embeddings": False,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
CASES = ("transformers", "vllm as loaded", "vllm packed", "sglang")
BARS = {"transformers": 2.0, "vllm as loaded": 2.0, "vllm packed": 1.3, "sglang": 4.0}
"""Memory copies, or times the packing alone for "vllm packed"."""
PROOF_BAR = 0.3
"""What a rotating proof takes, as a part of one of all values: a 32nd of the arithmetic, and all of the Python."""
ROUNDS = 9
"""After one that is not counted."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", choices=CASES, help="measure one in this process (internal)")
    parser.add_argument("--only", nargs="+", choices=CASES, default=CASES)
    options = parser.parse_args()
    if options.case:
        print("answer " + json.dumps(measure(options.case)), flush=True)
        os._exit(0)

    met = True
    for case in options.only:
        met &= report(case, measured(__file__, "--case", case))
    raise SystemExit(0 if met else 1)


def report(case: str, seconds: dict[str, list[float]]) -> bool:
    """Print the figures of a case; whether its bar is met."""
    best = {name: min(rounds) for name, rounds in seconds.items() if name != "bytes"}
    size = seconds["bytes"][0]
    emit(f"sync/{case}/megabytes", size / 1e6, "MB")
    emit(f"sync/{case}/copy", best["copy"], "s")
    if "own" in best:
        emit(
            f"sync/{case}/own loader",
            best["own"],
            "s",
            ratio=best["own"] / best["copy"],
            against="copy",
        )
    proofs = report_proofs(case, seconds)
    if case == "vllm packed":
        ratio = statistics.median(seconds["sync"]) / statistics.median(seconds["packing"])
        emit(
            f"sync/{case}/packing",
            best["packing"],
            "s",
            ratio=best["packing"] / best["copy"],
            against="copy",
        )
        return proofs & emit(
            f"sync/{case}",
            best["sync"],
            "s",
            ratio=ratio,
            against="packing",
            bar=BARS[case],
            at_most=True,
        )
    ratio = statistics.median(seconds["sync"]) / statistics.median(seconds["copy"])
    return proofs & emit(
        f"sync/{case}", best["sync"], "s", ratio=ratio, against="copy", bar=BARS[case], at_most=True
    )


def report_proofs(case: str, seconds: dict[str, list[float]]) -> bool:
    """Print what the proofs of a sync take; whether the rotating one's bar is met."""
    middle = {name: statistics.median(rounds) for name, rounds in seconds.items()}
    full = middle["full proof"]
    emit(f"sync/{case}/full proof", full, "s", ratio=full / middle["copy"], against="copy")
    rotating = middle["rotating proof"]
    emit(
        f"sync/{case}/rotating proof",
        rotating,
        "s",
        ratio=rotating / middle["copy"],
        against="copy",
    )
    return emit(
        f"sync/{case}/rotating proof as a part of a full one",
        rotating,
        "s",
        ratio=rotating / full,
        against="full proof",
        bar=PROOF_BAR,
        at_most=True,
    )


def measure(case: str) -> dict[str, list[float]]:
    """Seconds of each round: of a copy, of the sync, of the engine's own loader, of packing alone."""
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    torch.set_num_threads(1)
    engine = started(case)
    layout = engine.layout()
    generator = torch.Generator().manual_seed(0)
    weights = {
        name: torch.randn(param.shape, generator=generator).to(param.dtype)
        for name, param in layout.params.items()
    }
    targets = {name: torch.empty_like(values) for name, values in weights.items()}

    def copy() -> None:
        for name, values in weights.items():
            targets[name].copy_(values)

    versions = iter(range(10**6))

    def sync() -> None:
        engine.begin_update(next(versions))
        for name, boxes in layout.held[0].items():
            for box in boxes:
                engine.receive(name, box, weights[name][box.slices()])
        engine.end_update()

    work = {"copy": copy, "sync": sync, **others(case, engine, weights)}
    proof = Proofs(engine, weights)
    seconds: dict[str, list[float]] = {name: [] for name in work}
    for at in range(ROUNDS + 1):
        for name, function in work.items():
            took = timed(function)
            if at:
                seconds[name].append(took)
        for name, part in (("rotating proof", at + 1), ("full proof", None)):
            took = proof.seconds(next(versions), part)
            if at:
                seconds.setdefault(name, []).append(took)
    return {**seconds, "bytes": [sum(values.nbytes for values in weights.values())]}


class Proofs:
    """Syncs that are proven, of which only the proofs on both sides are timed."""

    def __init__(self, engine, weights):
        from hybridflow.core.resharding.exchange import ShardReader
        from hybridflow.core.resharding.plan import plan_reshard
        from hybridflow.core.values.weights import Box, WeightLayout

        self.engine = engine
        boxes = {name: (Box.full(values.shape),) for name, values in weights.items()}
        layout = engine.layout()
        self.plan = plan_reshard(WeightLayout(layout.params, {0: boxes}), layout)
        self.source = ShardReader(
            (name, boxes[name][0], values) for name, values in weights.items()
        )
        self.looked = 0.0
        """Seconds that vLLM's layers are looked at before they are packed."""
        if hasattr(engine, "weights"):
            look = engine.weights._look

            def timed_look(layer: str) -> None:
                self.looked += timed(lambda: look(layer))

            engine.weights._look = timed_look

    def seconds(self, version: int, part: int | None) -> float:
        """Bring the weights, and prove a part of them; the seconds of the proofs alone."""
        from hybridflow.core.rollouts.checksums import compare, sums_sent, wanted

        self.engine.begin_update(version)
        self.looked = 0.0
        spent = timed(lambda: self.engine.expect(wanted(self.plan, 0, part)))
        for name, boxes in self.plan.target.held[0].items():
            for box in boxes:
                self.engine.receive(name, box, self.source.read(name, box))
        # What a bucket still holds is a part of the transfer.
        if hasattr(self.engine, "bucket"):
            self.engine._hand_over(self.engine.bucket.taken())
        spent += self.looked

        # Looks within `proof` are in its own time.
        both = []
        spent += timed(lambda: both.append(sums_sent(self.plan, 0, self.source, part)))
        spent += timed(lambda: both.append({0: self.engine.proof()}))
        spent += timed(lambda: both.append(compare(version, [tuple(both)])))
        if both[2]:
            raise SystemExit(f"the sync has not brought {both[2]}")
        self.looked = 0.0
        self.engine.end_update()
        spent += self.looked
        self.engine.expect({})  # the syncs beside it are timed without a proof
        return spent


def started(case: str):
    """The engine of a case, started, in this process or with its own."""
    import torch

    from hybridflow.core.contracts.worker import RankContext
    from hybridflow.core.values.model import ModelSpec
    from hybridflow.core.values.parallel import ParallelLayout

    if case == "vllm as loaded":
        import vllm._custom_ops as operations

        operations._supports_onednn = False
    context = RankContext("actor", 0, ParallelLayout(), torch.device("cpu"))
    spec = ModelSpec(MODEL, None, 0)
    name = case.split()[0]
    if name == "transformers":
        from hybridflow.backends.transformers.config import TransformersEngineConfig as Config
        from hybridflow.backends.transformers.engine import TransformersEngine as Engine

        config = Config(dtype="bfloat16")
    elif name == "vllm":
        from hybridflow.backends.vllm.config import VLLMConfig as Config
        from hybridflow.backends.vllm.engine import VLLMEngine as Engine

        config = Config(dtype="bfloat16", kv_memory_gb=0.05, max_sequences=8)
    else:
        from hybridflow.backends.sglang.config import SGLangConfig as Config
        from hybridflow.backends.sglang.engine import SGLangEngine as Engine

        config = Config(dtype="bfloat16", kv_tokens=4096, max_sequences=8)
    engine = Engine.build(spec, config, context, tempfile.mkdtemp(prefix="hybridflow-bench-"))
    engine.start()
    return engine


def others(case: str, engine, weights) -> dict:
    """Beside a sync into vLLM: its own loader, and the processing of its layers alone."""
    if not case.startswith("vllm"):
        return {}
    import torch
    from vllm.model_executor.model_loader.reload import layerwise

    mapped = engine.weights
    model, config = mapped.model, mapped.model_config

    @torch.no_grad()
    def own() -> None:
        with engine._configured():
            layerwise.initialize_layerwise_reload(model)
            for name, values in weights.items():
                model.load_weights([(name, values)])
            layerwise.finalize_layerwise_reload(model, config)

    if case == "vllm as loaded":
        return {"own": own}

    @torch.no_grad()
    def made() -> None:
        with engine._configured():
            mapped.begin(0)
            for tensor in mapped.targets:
                mapped.tensor(tensor)

    @torch.no_grad()
    def packing() -> None:
        with engine._configured():
            for name in list(mapped._open):
                mapped._process(name)
            mapped._finalize()
            mapped.updating = False

    return {"own": own, "made": made, "packing": packing}


if __name__ == "__main__":
    main()
