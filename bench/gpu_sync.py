"""Weights on their way on one GPU: from the trainer to an engine, and to the host's memory and back; Qwen2.5-1.5B's shape.

python bench/gpu_sync.py [--layers 28]
python bench/gpu_sync.py --mini          a tiny model on the CPU, to see that all of this works

* To the embedded engine in the trainer's process, and in a process of its own (a bucket that both map): the seconds of a sync
  after a step of the optimizer, beside a copy of the same parameters on the device, and the memory that it takes. Bar: what the
  engine then has equals the trainer's weights, each of them compared.
* Weights and optimizer to the host and back, by the parts that an update and a forward pass need: seconds, beside one copy of
  as many bytes through pinned memory. Bar: afterwards nothing is left on the device, and the weights are the same.

Times are the median of five, after one that does not count. One JSON line per figure. Exits 1 where a bar is missed; without a
GPU it says that it was skipped.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from common import MINI_MODEL, ROOT, device_of, emit, release, seconds_of

CONFIG = ROOT / "examples" / "gpu_grpo.toml"
ROUNDS = 5
LEFT = 64 << 20
"""Bytes on the device after all has gone that do not count: cuBLAS's workspaces, which torch allocates, and buffers."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--mini", action="store_true", help="a tiny model on the CPU")
    options, overrides = parser.parse_known_args(arguments)
    device = device_of(options.mini, "gpu sync")
    if device is None:
        return 0
    settings = [f"actor.model.config.num_hidden_layers={options.layers}"]
    if options.mini:
        settings = MINI_MODEL
    met = True
    for own_process in (False, True):
        with tempfile.TemporaryDirectory() as logs:
            more = [f"rollout.own_process={str(own_process).lower()}", *overrides]
            met &= syncs([*settings, *more], device, own_process, logs)
        release(device)
    met &= moves([*settings, *overrides], device)
    return 0 if met else 1


def role_of(settings: list[str], **changes: Any) -> Any:
    """The actor's role by the example's config."""
    import attrs

    from hybridflow.settle.launch import load_config

    [job] = load_config(CONFIG, settings)
    return attrs.evolve(job.models["actor"].spec, **changes)


# --- to an engine ---


def syncs(settings: list[str], device: str, own_process: bool, logs: str) -> bool:
    """Emit the figures of syncs to an engine; give whether it has the trainer's weights."""
    from hybridflow.core.workers.model_worker import ModelWorker
    from hybridflow.kit.testing import one_rank
    from hybridflow.planner.calibration.probes import Likelihood, made_up

    what = "sync to the engine's process" if own_process else "sync in the same process"
    with one_rank(device, "actor") as context:
        worker = ModelWorker(context, role_of(settings, logs=logs))
        worker.build()
        try:
            pair = (made_up(4, 8, 16), Likelihood())
            seconds = seconds_of(worker.sync, device, ROUNDS, lambda: worker.update([pair]))
            parameters = [shard for _, _, shard in worker.backend.named_shards()]
            copies = [shard.clone() for shard in parameters]

            def copy() -> None:
                for source, target in zip(parameters, copies, strict=True):
                    target.copy_(source)

            nbytes = sum(copied.nbytes for copied in copies)
            plain = seconds_of(copy, device, ROUNDS)
            emit(
                f"{what}: {nbytes / 1e9:.3g} GB of the trainer's", seconds, "s", ratio=seconds / plain,
                against=f"a copy on the device, {plain:.3g} s",
            )  # fmt: skip
            peak = worker.sync_peak
            emit(f"{what}: memory beside", max(peak.most - peak.before, 0) / 1e6, "MB")
            different = worker.compared()
            return emit(
                f"{what}: parameters that differ", len(different), ", ".join(sorted(different)[:3]), bar=0, at_most=True
            )  # fmt: skip
        finally:
            if worker.engine is not None:
                worker.engine.close()


# --- to the host ---


def moves(settings: list[str], device: str) -> bool:
    """Emit the figures of moves to the host and back; give whether nothing stays, and nothing changes."""
    import torch

    from hybridflow.core.workers.model_worker import ModelWorker
    from hybridflow.kit.testing import one_rank
    from hybridflow.planner.calibration.probes import Likelihood, made_up

    with one_rank(device, "actor") as context:
        worker = ModelWorker(context, role_of(settings, engine=None, engine_config=None))
        worker.build()
        worker.update([(made_up(4, 8, 16), Likelihood())])
        backend, good = worker.backend, True

        def weights() -> list[torch.Tensor]:
            return [shard.to("cpu", copy=True) for _, _, shard in backend.named_shards()]

        before = weights()
        for what, parts in (("update", ("weights", "optimizer")), ("forward pass", ("weights",))):
            backend.offload(("weights", "optimizer"))
            release(device)
            left = torch.cuda.memory_allocated() if device == "cuda" else 0
            onload, offload = partial(backend.onload, parts), partial(backend.offload, parts)
            back = seconds_of(onload, device, ROUNDS, before=offload)
            nbytes = (torch.cuda.memory_allocated() if device == "cuda" else 0) - left
            away = seconds_of(offload, device, ROUNDS, before=partial(returned, backend, parts))
            plain = pinned_copy(nbytes, device)
            for way, seconds in (("to the device", back), ("to the host", away)):
                emit(
                    f"{what}: {nbytes / 1e9:.3g} GB {way}", seconds, "s",
                    **({"ratio": seconds / plain, "against": f"one pinned copy, {plain:.3g} s"} if plain else {}),
                )  # fmt: skip
            good &= emit(f"{what}: left on the device", left, "bytes", bar=LEFT, at_most=True)
        backend.onload(("weights", "optimizer"))
        changed = sum(not a.equal(b) for a, b in zip(weights(), before, strict=True))
        return good & emit("parameters that moving has changed", changed, "", bar=0, at_most=True)


def returned(backend: Any, parts: tuple[str, ...]) -> None:
    """Bring parts back, and say that they have changed, as an update does."""
    backend.onload(parts)
    backend.residence.changed(*parts)


def pinned_copy(nbytes: int, device: str) -> float:
    """Seconds of one copy from pinned memory to the device; 0 on a CPU."""
    import torch

    if device == "cpu" or not nbytes:
        return 0.0
    here = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(nbytes, dtype=torch.uint8, device=device)
    return seconds_of(lambda: there.copy_(here, non_blocking=True), device, ROUNDS)


if __name__ == "__main__":
    sys.exit(main())
