"""verl's single controller on two CPU workers: times calls as it is told on stdin (see bench/common.py, Peer)."""

import json
import sys
import time

import ray
import torch
from verl import DataProto
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

WORKERS = 2
ray.init(
    num_cpus=2 * WORKERS, include_dashboard=False, object_store_memory=2 << 30, log_to_driver=False
)


@ray.remote
class Calls(Worker):
    def __init__(self):
        super().__init__()

    @register(Dispatch.DP_COMPUTE_PROTO)
    def echo(self, data):
        return data

    @register(Dispatch.DP_COMPUTE_PROTO)
    def add(self, data):
        data.batch["y"] = data.batch.pop("x") + 1
        return data


pool = RayResourcePool(process_on_nodes=[WORKERS], use_gpu=False, max_colocate_count=1)
group = RayWorkerGroup(
    resource_pool=pool,
    ray_cls_with_init=RayClassWithInitArgs(Calls),
    use_gpu=False,
    device_name="cpu",
)


def batch(rows, columns):
    return DataProto.from_dict(tensors={"x": torch.rand(rows, columns)})


def seconds(method, data, times):
    taken = []
    for _ in range(times):
        started = time.perf_counter()
        out = method(data)
        taken.append(time.perf_counter() - started)
        del out
    return taken


checked = batch(4, 8)
assert torch.equal(group.add(checked).batch["y"], checked.batch["x"] + 1)
inputs = {}
print("answer true", flush=True)
for line in sys.stdin:
    method, rows, columns, times = line.split()
    data = inputs.setdefault((rows, columns), batch(int(rows), int(columns)))
    print("answer", json.dumps(seconds(getattr(group, method), data, int(times))), flush=True)
ray.shutdown()
