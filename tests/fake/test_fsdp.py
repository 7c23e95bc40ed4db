"""FSDP2 on GPUs and ranks that are not there."""

from __future__ import annotations

from hybridflow.backends.fsdp.backend import FSDPBackend
from hybridflow.backends.fsdp.config import FSDPConfig
from hybridflow.core.values.parallel import ParallelLayout
from hybridflow.kit.testing.fake_gpu import FakeCase, FakeGPUConformance

BF16 = {"precision": "bf16"}


def case(layout: dict, shards: int, /, config: dict | None = None, **more) -> FakeCase:
    """bf16 with float32 masters; the root (embedding and head) stays gathered between micro-batches."""
    stated = {"weight_bytes": 4.0, "outside_gathered": 2.0, **more}
    return FakeCase(
        layout=ParallelLayout(**layout), config=FSDPConfig(**(BF16 | (config or {}))), shards=shards, **stated
    )  # fmt: skip


class TestFSDP(FakeGPUConformance):
    backend = FSDPBackend
    layers = 2
    cases = {
        "dp 8": case({"dp": 8}, 8),
        "dp 8, 2 replicas": case({"dp": 8}, 4, {"replicas": 2}),
        "dp 4 tp 2": case({"dp": 4, "tp": 2}, 8),
        "dp 8, kept gathered": case({"dp": 8}, 8, {"reshard_after_forward": False}, gathered=2.0),
        "dp 64, on the host": case(
            {"dp": 64}, 64, {"cpu_offload": True}, weight_bytes=0.0, moment_bytes=0.0, gradient_bytes=0.0,
            moves=False, saves=False,
        ),
        "dp 64, a value model, recomputed": case({"dp": 64}, 64, {"activation_checkpointing": True}, kind="value"),
        "dp 64, frozen": case({"dp": 64}, 64, trained=False, weight_bytes=2.0),
    }  # fmt: skip
