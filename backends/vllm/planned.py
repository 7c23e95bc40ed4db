"""Traces vLLM's loader for each tp rank, from a config.json: without engine, GPU and weights.

    python -m hybridflow.backends.vllm.planned REQUEST ANSWER

is a process of its own (kit/planned.py), since vLLM changes the process that it is imported in. The
model of each tp rank is built on torch's meta device, with simulated process groups.
"""

from __future__ import annotations

import inspect
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from hybridflow.core.errors import ModelError
from hybridflow.core.values.model import ModelSpec
from hybridflow.core.values.weights import Box, Param
from hybridflow.kit.huggingface.models import hf_config_of, saved_parameters, write_config
from hybridflow.kit.planned import TracedRanks, answer
from hybridflow.kit.tracing.coverage import check_taken
from hybridflow.kit.tracing.tracer import trace

VARIABLES = {
    "VLLM_LOGGING_LEVEL": "CRITICAL",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
"""Environment variables of the process, before vLLM is imported."""


def traced_ranks(
    fields: Mapping[str, Any],
    tp: int,
    dtype: str,
    arguments: Mapping[str, Any],
) -> TracedRanks:
    """Return the boxes that each tp rank reads of the model with these config fields.

    It changes this process, as vLLM does. Raises ModelError for a model that vLLM does not support.
    """
    # Before vLLM, which changes transformers' classes
    hf_config = hf_config_of(ModelSpec(dict(fields), None, 0))
    shapes, ties = saved_parameters(hf_config)
    params = {name: Param(shape, getattr(torch, dtype)) for name, shape in shapes.items()}
    boxes = []
    opaque: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        write_config(hf_config, folder)
        for rank in range(tp):
            own, reasons = _traced(folder, params, tp, rank, dtype, arguments)
            boxes.append(own)
            opaque |= reasons

    check_taken(params, boxes, "vLLM", fields.get("model_type"))
    return TracedRanks(shapes, ties, tuple(boxes), opaque)


def _traced(
    folder: str,
    params: Mapping[str, Param],
    tp: int,
    rank: int,
    dtype: str,
    arguments: Mapping[str, Any],
) -> tuple[dict[str, tuple[Box, ...]], Mapping[str, str]]:
    """Return (name -> the boxes that one rank reads, opaque name -> reason)."""
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model

    from hybridflow.backends.vllm.weights import tensors_of

    # A config for each rank, as layers register themselves in it.
    config = EngineArgs(
        model=folder,
        skip_tokenizer_init=True,
        load_format="dummy",
        dtype=dtype,
        tensor_parallel_size=tp,
        enforce_eager=True,
        distributed_executor_backend="external_launcher",
        **arguments,
    ).create_engine_config()
    with set_current_vllm_config(config), _groups_of_nobody(tp, rank):
        with torch.device("meta"):
            model = initialize_model(config)
        found = trace(model.load_weights, tensors_of(model), params)

    for name, reason in found.opaque.items():
        if not found.touched[name]:
            raise ModelError(f"{type(model).__name__} of vLLM does not take {name}: {reason}")
    boxes = {
        name: (Box.full(param.shape),) if name in found.opaque else found.boxes(name)
        for name, param in params.items()
    }
    return boxes, found.opaque


@contextmanager
def _groups_of_nobody(tp: int, rank: int) -> Iterator[None]:
    """Give vLLM simulated process groups, in which this process is rank `rank` of `tp`.

    torch's fake backend answers every collective at once; communicators are left out (vLLM 0.32).
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from vllm.distributed import (
        ensure_model_parallel_initialized,
        init_distributed_environment,
        parallel_state,
    )

    from hybridflow.backends.vllm.patches import forget_ended_groups

    new_group = dist.new_group
    coordinator: Any = parallel_state.GroupCoordinator
    make = coordinator.__init__
    count_nodes = parallel_state._node_count

    def make_alone(self, *args, **kwargs):
        bound = inspect.signature(make).bind(self, *args, **kwargs)
        bound.arguments["use_device_communicator"] = False
        bound.arguments["use_message_queue_broadcaster"] = False
        make(*bound.args, **bound.kwargs)

    def group_of_nobody(ranks=None, **_):
        return new_group(ranks, backend="fake")

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=tp)
    dist.new_group = group_of_nobody  # type: ignore[assignment]
    coordinator.__init__ = make_alone
    parallel_state._node_count = lambda group: 1
    try:
        init_distributed_environment(tp, rank, "env://", 0, "fake")
        ensure_model_parallel_initialized(tp, 1)
        yield
    finally:
        dist.new_group = new_group
        coordinator.__init__ = make
        parallel_state._node_count = count_nodes
        dist.destroy_process_group()
        forget_ended_groups()


def main() -> None:
    """Answer one request."""
    os.environ.update(VARIABLES)
    answer(traced_ranks)


if __name__ == "__main__":
    main()
