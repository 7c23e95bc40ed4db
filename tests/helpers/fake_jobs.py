"""What tests of the fake device run in a process of their own."""

from __future__ import annotations

import gc
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hybridflow.backends.fsdp.backend import FSDPBackend
from hybridflow.backends.fsdp.config import FSDPConfig
from hybridflow.core.contracts.training import OptimizerConfig
from hybridflow.core.values.model import ModelSpec
from hybridflow.core.values.parallel import ParallelLayout
from hybridflow.core.workers.device_memory import DeviceWorker
from hybridflow.kit.fakes.device import FakeGPU
from hybridflow.kit.fakes.process import Asked, rehearse
from hybridflow.kit.fakes.ranks import fake_ranks
from hybridflow.kit.fakes.rehearsal import MicroBatches, rehearsed
from hybridflow.kit.testing import one_rank
from hybridflow.kit.testing.fake_gpu import FakeCase, live
from hybridflow.kit.testing.models import reference


def device() -> dict[str, Any]:
    """What operations do under the fake device."""
    found: dict[str, Any] = {}
    before = torch.__future__.get_overwrite_module_params_on_conversion()
    with FakeGPU() as gpu:
        there = torch.empty(3, 4, device=gpu.device, requires_grad=True)
        loss = (there @ torch.ones(4, 2).to(gpu.device)).relu().sum()
        loss.backward()
        found["gradient"] = (tuple(there.grad.shape), there.grad.device.type)
        found["item"] = (
            loss.item(),
            bool(loss.isfinite()),
            int(torch.zeros(1, dtype=torch.int64).to(gpu.device)),
        )
        found["here"] = (torch.ones(2, 2) @ torch.ones(2, 2)).tolist()
        host = torch.full((2,), 7.0)
        host.copy_(torch.empty(2, device=gpu.device))
        found["host"] = (host.device.type, type(host) is torch.Tensor)
        found["home"] = torch.empty(5, device=gpu.device).cpu().tolist()
        module = torch.nn.Linear(2, 2)
        module.to(gpu.device)
        found["module"] = module.weight.device.type
        try:
            there + torch.ones(3, 4)
        except RuntimeError as error:
            found["mixed"] = "device" in str(error)
        found["waits"] = waits(gpu)
        found["attention"] = attention(gpu)
    found["flag"] = torch.__future__.get_overwrite_module_params_on_conversion() == before
    return found


def waits(gpu: FakeGPU) -> dict[str, Any]:
    """The waits of some reads and copies, and whether a size that depends on values raises."""
    there = torch.empty(3, 4, device=gpu.device)
    found: dict[str, Any] = {}

    def count(name: str, act: Any) -> None:
        before = gpu.waits.copy()
        act()
        found[name] = dict(gpu.waits - before)

    count("a number", lambda: float(there.sum()))
    count("a list", there.tolist)
    count("home", there.cpu)
    count("equal", lambda: torch.equal(there, there))
    count("into the host's", lambda: torch.zeros(3, 4).copy_(there))
    count("later", lambda: torch.zeros(3, 4).copy_(there, non_blocking=True))
    count("to the device", lambda: torch.zeros(3).to(gpu.device))
    count("on the device", lambda: (there.to(torch.bfloat16) @ there.to(torch.bfloat16).T).argmax())
    with torch.inference_mode():
        made = there + 1.0
    count("of inference", made.cpu)
    try:
        there[there > 0]
    except RuntimeError as error:
        found["mask"] = "boolean indices" in str(error)
    return found


def attention(gpu: FakeGPU) -> tuple[int, int, list[tuple[int, ...]]]:
    """Bytes that attention makes, those that its backward pass adds, and the gradients' shapes: 2 rows of 512 tokens, 4
    heads of 8, 2 of keys."""
    query = torch.empty(2, 4, 512, 8, device=gpu.device, requires_grad=True)
    key, value = (
        torch.empty(2, 2, 512, 8, device=gpu.device, requires_grad=True) for _ in range(2)
    )
    gpu.memory.restart()
    before = gpu.memory.now
    result = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, enable_gqa=True
    )
    forward = gpu.memory.peak - before
    kept = gpu.memory.now
    torch.autograd.grad(result.sum(), value, retain_graph=True)
    # Nothing of the first pass may go during the second: autograd's own thread frees the last of it.
    deadline = time.monotonic() + 10
    while gpu.memory.now > kept and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    gpu.memory.restart()
    before = gpu.memory.now
    found = torch.autograd.grad(result, [query, key, value], torch.empty_like(result))
    return forward, gpu.memory.peak - before, [tuple(gradient.shape) for gradient in found]


def told(folder: str) -> dict[str, Any]:
    """What a rehearsal in a process of its own tells, of a role that trains and leaves."""
    rows = {"rows": 2, "tokens": 32, "count": 2}
    asked = Asked(
        backend="fsdp", config=FSDPConfig(precision="bf16"), model=attributes(folder), optimizer=OptimizerConfig(),
        layout=ParallelLayout(dp=2), forward=rows, update=rows, offload=True,
    )  # fmt: skip
    return dict(rehearse(asked))


def memory() -> dict[str, int]:
    """What the counter says of a few storages."""
    found = {}
    with FakeGPU() as gpu:
        count = gpu.memory
        first = torch.empty(1000, device=gpu.device)  # 4,000 bytes
        second = torch.empty(500, dtype=torch.float64, device=gpu.device)  # 4,000 bytes
        found["two"] = count.now
        view = first[10:20]
        found["view"] = count.now
        del second
        gc.collect()
        found["one"] = count.now
        found["peak"] = count.peak
        count.restart()
        found["restarted"] = count.peak
        first.untyped_storage().resize_(0)
        found["resized"] = count.now
        first.untyped_storage().resize_(4000)
        found["again"] = count.now
        found["largest"] = count.largest
        view.copy_(torch.zeros(10))
        first.cpu()
        found["arrived"], found["left"] = count.arrived, count.left
    resized = torch.empty(10)
    resized.untyped_storage().resize_(0)
    return found


def ranks() -> dict[str, Any]:
    """What a rank among ranks that are not there sees."""
    with FakeGPU() as gpu, fake_ranks(ParallelLayout(dp=8, tp=2), gpu.device, rank=3) as context:
        group = context.group("tp")
        there = torch.empty(4, device=gpu.device)
        dist.all_reduce(there, group=group)
        found = {
            "world": dist.get_world_size(),
            "rank": dist.get_rank(),
            "coords": (context.coords.dp, context.coords.tp),
            "group": dist.get_process_group_ranks(group),
            "sum": context.sum([1.0, 2.0]),
            "max": context.max([3.0]),
        }
    return found | {"ended": not dist.is_initialized()}


def rehearsal(folder: str) -> dict[str, Any]:
    """A tiny role's life on two ranks that are not there."""
    spec = attributes(folder)
    config = FSDPConfig(precision="bf16")
    with rehearsed(FSDPBackend, spec, config, OptimizerConfig(), ParallelLayout(dp=2)) as run:
        run.update("update", MicroBatches(count=2))
        run.forward("forward", MicroBatches(rows=1))
        run.sync("sync")
        run.offload("away")
        run.onload("back")
        run.save_and_load("disk")
        record = run.result()
    return {"record": record, "on": record.devices}


def attributes(folder: str) -> ModelSpec:
    from hybridflow.core.values.model import ModelConfig
    from hybridflow.settle.models import resolve_model

    return resolve_model(ModelConfig(path=folder), "policy", "fake")


def case(folder: str) -> Any:
    """A case's record, of the tiny reference model."""
    config = FSDPConfig(precision="bf16")
    made = FakeCase(layout=ParallelLayout(dp=2), config=config, shards=2, weight_bytes=4.0)
    return live(FSDPBackend, made, Path(folder))


def reference_folder() -> str:
    return str(reference("qwen2").spec.path)


def deterministic() -> dict[str, Any]:
    """What a process that must repeat its bits has told torch."""
    with one_rank() as context:
        DeviceWorker(context).be_deterministic()
    return {
        "workspace": os.environ["CUBLAS_WORKSPACE_CONFIG"],
        "algorithms": torch.are_deterministic_algorithms_enabled(),
        "fills": torch.utils.deterministic.fill_uninitialized_memory,
    }
