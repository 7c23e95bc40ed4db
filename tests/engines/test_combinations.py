"""Each training backend with each rollout engine, on the same ranks.

By default some pairs, SGLang's none; `make matrix` runs all nine.
"""

from __future__ import annotations

import itertools

import attrs
import pytest
import torch
from helpers.hybrid_jobs import train_and_sync
from helpers.paths import EVERY
from helpers.training_check import output_ranks
from helpers.training_jobs import Setup, outputs
from helpers.training_reference import ReplayedPPO, make_batch

from hybridflow.backends.deepspeed.config import DeepSpeedConfig
from hybridflow.backends.megatron.config import MegatronConfig
from hybridflow.core.values.columns import Column
from hybridflow.core.values.parallel import ParallelLayout

BACKENDS = {
    "fsdp": Setup("", layout=ParallelLayout(dp=2)),
    "megatron": Setup(
        "", layout=ParallelLayout(tp=2), backend="megatron", config=MegatronConfig(vocab_multiple=4)
    ),
    "deepspeed": Setup(
        "", layout=ParallelLayout(dp=2), backend="deepspeed", config=DeepSpeedConfig(stage=3)
    ),
}
ENGINES = {
    "transformers": {},
    "vllm": {"own_process": True, "kv_memory_gb": 0.05},
    "sglang": {"kv_tokens": 4096},
}
ALL = list(itertools.product(BACKENDS, ENGINES))
SLICE = [("megatron", "vllm"), ("megatron", "transformers"), ("deepspeed", "transformers")]
END: dict[str, dict[str, torch.Tensor]] = {}
"""What one rank under fsdp ends with, which all others must end with."""


@pytest.fixture
def replayed(ranks, folder):
    """(path of the model, rollouts with the logprobs that the model gave them)."""
    path, batch = folder("qwen2-wide"), make_batch(8)
    old = ranks(outputs, 1, Setup(path, optimizer=None), batch)[0]["logprobs"]
    return path, batch.with_columns(old_logprobs=Column(old.values, old.lengths))


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("backend", "engine"), ALL if EVERY else SLICE)
def test_five_steps_of_ppo_end_alike_and_engines_follow(ranks, replayed, backend, engine):
    for package in (backend, engine):
        if package not in ("fsdp", "transformers"):
            pytest.importorskip("megatron.core" if package == "megatron" else package)
    path, batch = replayed
    if not END:
        END["one"] = ranks(
            train_and_sync, 1, Setup(path, engine="transformers"), batch, ReplayedPPO(), 4
        )[0]["parameters"]
    setup = attrs.evolve(BACKENDS[backend], path=path, engine=engine, engine_config=ENGINES[engine])
    found = ranks(train_and_sync, 2, setup, batch, ReplayedPPO(), 4)
    for rank, answer in enumerate(found):
        assert answer["versions"] == {0, 1, 2, 3, 4}
        assert answer["worst"] < 1e-4 or rank not in output_ranks(setup.layout)
        assert answer["moved"] == answer["planned"]
        for name, values in END["one"].items():
            assert (answer["parameters"][name] - values).abs().max() < 1e-4, name


@pytest.mark.timeout(400)
@pytest.mark.parametrize("engine", ["transformers", "vllm"])
def test_pipelines_of_megatron_feed_tensor_parallel_engines_what_their_shards_lack(
    ranks, replayed, engine
):
    """tp 2 x pp 2 to tp 2, counted."""
    pytest.importorskip("megatron.core")
    settings = {} if engine == "transformers" else {"kv_memory_gb": 0.05, "max_sequences": 8}
    if settings:
        pytest.importorskip("vllm")
    path, batch = replayed
    setup = Setup(
        path, layout=ParallelLayout(tp=2, pp=2), backend="megatron", config=MegatronConfig(vocab_multiple=1),
        engine=engine, generation_tp=2, engine_config=settings,
    )  # fmt: skip
    for rank, answer in enumerate(ranks(train_and_sync, 4, setup, batch, ReplayedPPO(), 2)):
        assert answer["wrong"] == []
        assert answer["worst"] < 1e-4 or rank not in output_ranks(setup.layout)
        assert answer["moved"] == answer["planned"]
        assert answer["moved"][0] == answer["lacking"] > 0
