"""Memory of the host while each of four ranks loads its part of a model from bfloat16 safetensors.

python bench/loading.py                                            FSDP2, 2.0B parameters; a minute
.venv-engines/bin/python bench/loading.py --backend zero3          ZeRO stage 3 or megatron, fewer layers

Each rank is a process, and its device is the CPU, so that what it keeps is in the same memory as what it needs on the way.
Told is the largest anonymous memory (RssAnon: the pages of files that are read do not count) above that after the imports, of
the rank that had most. The bar is FSDP2's: 1.3 times the rank's share of the float32 masters. Exits 1 when it is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).parent))
from common import emit

RANKS = 4
FIELDS: dict[str, Any] = {
    "model_type": "qwen2", "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 8960,
    "num_attention_heads": 16, "num_key_value_heads": 4, "max_position_embeddings": 4096, "tie_word_embeddings": True,
}  # fmt: skip
LAYERS = {"fsdp": 26, "zero3": 6, "megatron": 6}
"""FSDP2's moments are made in the first step, the others' when they are built: 26 layers of theirs do not fit 24 GiB."""
BYTES = {"fsdp": 4.0, "zero3": 16.0, "megatron": 18.0}
"""Of a parameter that a rank holds, by design: FSDP2 4 for its master; ZeRO-3 2 for the weight, 2 for its gradient, and 12 for
master and moments; Megatron has gradients of 4."""
BAR = 1.3


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backend", choices=tuple(LAYERS), default="fsdp")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        print("answer", json.dumps(load(options.backend, options.rank, options.folder)))
        return 0

    from hybridflow.kit.fakes.folder import write_hollow_folder

    name, layers = options.backend, options.layers or LAYERS[options.backend]
    with tempfile.TemporaryDirectory() as root:
        # Zeros are read and converted as all values are.
        write_hollow_folder(Path(root) / "model", {**FIELDS, "num_hidden_layers": layers})
        ranks = [
            subprocess.Popen(
                [sys.executable, __file__, "--backend", name, "--rank", str(rank), "--folder", root],
                stdout=subprocess.PIPE, text=True,
            )
            for rank in range(RANKS)
        ]  # fmt: skip
        answers = []
        for process in ranks:
            lines = process.communicate()[0].splitlines()
            said = [line for line in lines if line.startswith("answer ")]
            if not said:
                raise SystemExit(f"rank {len(answers)} failed")
            answers.append(json.loads(said[-1].removeprefix("answer ")))

    count = answers[0]["parameters"]
    share = count * BYTES[name] / RANKS
    kept, peak = (max(answer[key] for answer in answers) for key in ("kept", "peak"))
    emit(f"loading/{name}/parameters", count / 1e9, "1e9")
    emit(f"loading/{name}/seconds", max(answer["seconds"] for answer in answers), "s")
    against = "the rank's share, by design"
    emit(f"loading/{name}/kept", kept / 1e9, "GB", ratio=kept / share, against=against)
    bar: dict[str, Any] = {"bar": BAR, "at_most": True} if name == "fsdp" else {}
    met = emit(f"loading/{name}/peak", peak / 1e9, "GB", ratio=peak / share, against=against, **bar)
    return 0 if met else 1


def load(name: str, rank: int, folder: str) -> dict[str, float]:
    """Build the backend as one rank; return its bytes and seconds."""
    import torch
    import torch.distributed as dist

    from hybridflow.core.contracts.training import OptimizerConfig
    from hybridflow.core.contracts.worker import RankContext
    from hybridflow.core.values.model import ModelConfig
    from hybridflow.core.values.parallel import ParallelLayout
    from hybridflow.settle.models import resolve_model

    torch.set_num_threads(1)
    layout = ParallelLayout(tp=RANKS) if name == "megatron" else ParallelLayout(dp=RANKS)
    kind, config = settings(name)
    context = RankContext("actor", rank, layout, torch.device("cpu"))
    spec = resolve_model(ModelConfig(path=f"{folder}/model"), "policy", "loading")
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=RANKS
    )
    dist.all_reduce(torch.zeros(1))
    backend = kind(spec, config, OptimizerConfig(), context)
    dist.barrier()

    peak = Peak()
    started = time.perf_counter()
    backend.build()
    seconds = time.perf_counter() - started
    found = {"peak": peak.stop(), "kept": anonymous() - peak.before, "seconds": seconds}
    held = backend.layout()
    found["parameters"] = sum(
        torch.Size(parameter.shape).numel() for parameter in held.params.values()
    )
    dist.barrier()
    dist.destroy_process_group()
    return found


def settings(name: str) -> tuple[Any, Any]:
    """The backend's class, and its settings in bfloat16."""
    if name == "fsdp":
        from hybridflow.backends.fsdp.backend import FSDPBackend
        from hybridflow.backends.fsdp.config import FSDPConfig

        return FSDPBackend, FSDPConfig(precision="bf16")
    if name == "zero3":
        from hybridflow.backends.deepspeed.backend import DeepSpeedBackend
        from hybridflow.backends.deepspeed.config import DeepSpeedConfig

        return DeepSpeedBackend, DeepSpeedConfig(stage=3, precision="bf16")
    from hybridflow.backends.megatron.backend import MegatronBackend
    from hybridflow.backends.megatron.config import MegatronConfig

    return MegatronBackend, MegatronConfig(precision="bf16")


class Peak:
    """The largest anonymous memory of this process above that at the beginning, looked at each 2 ms."""

    def __init__(self) -> None:
        self.before = self.most = anonymous()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while not self._over.wait(0.002):
            self.most = max(self.most, anonymous())

    def stop(self) -> int:
        """Bytes above those at the beginning."""
        self._over.set()
        self._thread.join()
        return max(self.most, anonymous()) - self.before


def anonymous() -> int:
    """Bytes of this process's anonymous pages (RssAnon)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no RssAnon")


if __name__ == "__main__":
    sys.exit(main())
