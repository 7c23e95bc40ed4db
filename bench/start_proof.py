"""The proof of an engine's start, for a model of 1B in bfloat16: seconds, in loads of the same weights.

At its start an engine's loader is asked where it puts weights, and the answer is proven with known values, every element
(kit/tracing). Beside it the same engine loads a checkpoint of this size from files that lie in the page cache. One
thread. One JSON line per figure; exits 1 where the proof takes more of them than its bar.
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
    "model_type": "qwen2", "vocab_size": 65536, "hidden_size": 2048, "num_hidden_layers": 18, "num_attention_heads": 16,
    "num_key_value_heads": 4, "intermediate_size": 6144, "max_position_embeddings": 512, "tie_word_embeddings": False,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
ENGINES = ("vllm", "sglang")
ROUNDS = 3
BARS = {"vllm": 2.0, "sglang": 16.0}
"""Loads that the proof may take. vLLM packs what it loads; a load of SGLang's is one copy of memory."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine", choices=ENGINES, help="measure one in this process (internal)")
    parser.add_argument("--only", nargs="+", choices=ENGINES, default=ENGINES)
    options = parser.parse_args()
    if options.engine:
        print("answer " + json.dumps(measure(options.engine)), flush=True)
        os._exit(0)

    met = True
    for engine in options.only:
        said = measured(__file__, "--engine", engine, environment=environment(engine))
        emit(f"start proof/{engine}/parameters", said["parameters"] / 1e9, "1e9")
        load = statistics.median(said["load"])
        emit(f"start proof/{engine}/load", load, "s")
        proof = statistics.median(said["proof"])
        met &= emit(
            f"start proof/{engine}",
            proof,
            "s",
            ratio=proof / load,
            against="load",
            bar=BARS[engine],
            at_most=True,
        )
    raise SystemExit(0 if met else 1)


def environment(engine: str) -> dict[str, str]:
    """That of an engine's process."""
    if engine == "vllm":
        return dict(os.environ)
    import torch

    from hybridflow.backends.sglang.engine import SGLangEngine

    return os.environ | SGLangEngine.environment(torch.device("cpu"))


def measure(engine: str) -> dict:
    """Seconds of each round, and the number of parameters."""
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="hybridflow-bench-") as folder:
        return (vllm if engine == "vllm" else sglang)(Path(folder))


def written(engine, folder: Path) -> Path:
    """Write a checkpoint of the engine's model, in shards; its files are in the page cache then."""
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(0)
    shard: dict[str, torch.Tensor] = {}
    index: dict[str, str] = {}
    params = engine.layout().params
    for number, (name, param) in enumerate(params.items()):
        shard[name] = torch.randn(param.shape, generator=generator, dtype=param.dtype)
        index[name] = file = f"model-{number // 64:05}.safetensors"
        if number % 64 == 63 or number == len(params) - 1:
            save_file(shard, folder / file, {"format": "pt"})
            shard = {}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    (folder / "config.json").write_text(json.dumps(MODEL))
    for file in folder.iterdir():
        file.read_bytes()
    return folder


def started(name: str):
    """Start an engine in this process."""
    import torch

    from hybridflow.core.contracts.worker import RankContext
    from hybridflow.core.values.model import ModelSpec
    from hybridflow.core.values.parallel import ParallelLayout

    context = RankContext("actor", 0, ParallelLayout(), torch.device("cpu"))
    if name == "vllm":
        from hybridflow.backends.vllm.config import VLLMConfig as Config
        from hybridflow.backends.vllm.engine import VLLMEngine as Engine

        config = Config(dtype="bfloat16", kv_memory_gb=0.05, max_sequences=8)
    else:
        from hybridflow.backends.sglang.config import SGLangConfig as Config
        from hybridflow.backends.sglang.engine import SGLangEngine as Engine

        config = Config(dtype="bfloat16", kv_tokens=4096, max_sequences=8)
    engine = Engine(ModelSpec(MODEL, None, 0), config, context)
    engine.start()
    return engine


def vllm(folder: Path) -> dict:
    """vLLM in this process: its loader with its own reader of files, and its processing of layers."""
    import torch
    from vllm.config.load import LoadConfig
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
    from vllm.model_executor.model_loader.reload import layerwise

    engine = started("vllm")
    files = written(engine, folder)
    mapped = engine.weights
    loader = DefaultModelLoader(LoadConfig(load_format="safetensors"))
    config = mapped.model_config
    config.model = str(files)
    config.revision = None

    @torch.no_grad()
    def load() -> None:
        with engine._configured():
            layerwise.initialize_layerwise_reload(mapped.model)
            mapped.model.load_weights(loader.get_all_weights(config, mapped.model))
            layerwise.finalize_layerwise_reload(mapped.model, config)

    def proof() -> None:
        with engine._configured():
            mapped.prove()

    return rounds(engine, load, proof)


def sglang(folder: Path) -> dict:
    """SGLang's scheduler: its update from files, and the job that asks and proves."""
    from hybridflow.backends.sglang.places import Ask

    engine = started("sglang")
    files = str(written(engine, folder))
    layout = engine.layout()
    ask = Ask(layout.params, layout.ties)

    def load() -> None:
        succeeded, reason = engine.engine.update_weights_from_disk(files, "auto")[:2]
        if not succeeded:
            raise SystemExit(reason)

    def proof() -> None:
        engine._map_weights(ask)

    return rounds(engine, load, proof)


def rounds(engine, load, proof) -> dict:
    seconds: dict = {"load": [], "proof": []}
    for at in range(ROUNDS + 1):
        for name, function in (("load", load), ("proof", proof)):
            took = timed(function)
            if at:
                seconds[name].append(took)
    return {**seconds, "parameters": sum(p.numel for p in engine.layout().params.values())}


if __name__ == "__main__":
    main()
