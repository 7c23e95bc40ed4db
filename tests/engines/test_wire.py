"""What travels to a tensor-parallel engine, counted in the transport, against an account by hand; and that it speaks."""

from __future__ import annotations

import itertools
from functools import partial
from math import prod
from typing import Any

import pytest
import torch
from helpers import wire
from helpers.paths import EVERY, matrix
from helpers.training_jobs import Setup
from helpers.training_reference import ReplayedPPO, load, make_batch
from safetensors.torch import load_file

from hybridflow.backends.deepspeed.config import DeepSpeedConfig
from hybridflow.backends.megatron.config import MegatronConfig
from hybridflow.core.values.columns import Column
from hybridflow.core.values.parallel import ParallelLayout

SIZES = {
    "even": dict(heads=4, kv_heads=4, vocab=128, width=192),
    "odd": dict(
        heads=4, kv_heads=1, vocab=97, width=178
    ),  # replicated or padded heads, padded vocabulary
}
LAYERS = 2
ENGINES: dict[str, dict[str, Any]] = {
    "vllm": {"kv_memory_gb": 0.02, "max_sequences": 4},
    "sglang": {"kv_tokens": 512, "max_sequences": 4},
}
RULES = {"vllm": wire.tensor_parallel, "sglang": wire.sglang_on_cpu}
VOCABULARY = 64
"""Both engines pad embeddings to a multiple of so many rows."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """`model(name)`: the folder of a Hugging Face model of these sizes, heads of 32, untied, without biases."""
    from transformers import LlamaConfig, LlamaForCausalLM

    root, made = tmp_path_factory.mktemp("wire"), {}

    def get(name: str) -> str:
        if name not in made:
            sizes = SIZES[name]
            config = LlamaConfig(
                vocab_size=sizes["vocab"], hidden_size=32 * sizes["heads"], head_dim=32, num_hidden_layers=LAYERS,
                num_attention_heads=sizes["heads"], num_key_value_heads=sizes["kv_heads"], intermediate_size=sizes["width"],
                max_position_embeddings=64, tie_word_embeddings=False, bos_token_id=None, eos_token_id=None,
            )  # fmt: skip
            torch.manual_seed(3)
            written = LlamaForCausalLM(config)
            with torch.no_grad():
                for parameter in written.parameters():
                    scale = 0.1 if parameter.dim() > 1 else 0.2
                    parameter.add_(scale * torch.randn_like(parameter))
            made[name] = str(root / name)
            written.save_pretrained(made[name])
        return made[name]

    return get


def shapes_of(path: str) -> dict[str, tuple[int, ...]]:
    return {name: tuple(t.shape) for name, t in load_file(f"{path}/model.safetensors").items()}


def replayed(ranks: Any, path: str) -> Any:
    """Rollouts with the logprobs that the model gives them."""
    from helpers.training_jobs import outputs

    batch = make_batch(8)
    old = ranks(outputs, 1, Setup(path, optimizer=None), batch)[0]["logprobs"]
    return batch.with_columns(old_logprobs=Column(old.values, old.lengths))


def wanted(engine: str, groups: list[list[int]], sizes: dict[str, int]) -> wire.Part:
    """What the engine takes: its tp rank is the place of the rank in its group."""
    place = {rank: group.index(rank) for group in groups for rank in group}
    tp = len(groups[0])

    def part(name, shape, rank):
        return RULES[engine](name, shape, place[rank], tp, sizes["kv_heads"], VOCABULARY)

    return part


def held(backend: str, layout: ParallelLayout, sizes: dict[str, int]) -> wire.Part:
    if backend == "fsdp":
        return partial(wire.rows_of_fsdp, world=layout.world)
    if backend == "deepspeed":
        return partial(wire.range_of_zero, world=layout.world)
    return partial(
        wire.shard_of_megatron, tp=layout.tp, pp=layout.pp, layers=LAYERS, kv_heads=sizes["kv_heads"]
    )  # fmt: skip


TRAINERS = {
    "fsdp": (None, ParallelLayout(dp=2)),
    "deepspeed": (DeepSpeedConfig(stage=3), ParallelLayout(dp=2)),
    "megatron": (MegatronConfig(vocab_multiple=1), ParallelLayout(tp=2)),
    "megatron-pp": (MegatronConfig(vocab_multiple=1), ParallelLayout(pp=2)),
}
PACKAGES = {"megatron": "megatron.core", "deepspeed": "deepspeed", "fsdp": "torch"}


def check(
    ranks: Any, path: str, trainer: tuple, engine: str, groups: list[list[int]], name: str
) -> list[dict[str, Any]]:
    """Each rank receives what it lacks, and speaks as Hugging Face and, behind a step, as the trainer."""
    backend, config, layout = trainer
    pytest.importorskip(engine)
    pytest.importorskip(PACKAGES[backend])
    setup = Setup(
        path, layout=layout, backend=backend, config=config, engine=engine, generation_tp=2, engine_config=ENGINES[engine],
    )  # fmt: skip
    batch = replayed(ranks, path)
    found = ranks(wire.sync_and_speak, layout.world, setup, batch, ReplayedPPO())

    shapes, sizes = shapes_of(path), SIZES[name]
    target, source = wanted(engine, groups, sizes), held(backend, layout, sizes)
    for rank, answer in enumerate(found):
        assert answer["received"] == wire.lacking(shapes, target, source, rank)
        assert answer["worst"] < 1e-4
        assert wire.from_hugging_face(load(path), batch, answer["spoken"][0]) < 1e-4
        if engine == "vllm":
            group = next(group for group in groups if rank in group)
            assert answer["group"] == (group, group.index(rank))
    assert sum(answer["sent"] for answer in found) == sum(a["received"] for a in found)
    return found


ALL = [
    (trainer, sizes, engine)
    for trainer, sizes, engine in itertools.product(TRAINERS, SIZES, ENGINES)
    # Megatron wants at least tp heads of keys and values.
    if (trainer, sizes) != ("megatron", "odd")
]
SLICE = [case for case in ALL if case[2] == "vllm" and (case[1] == "even" or case[0] == "fsdp")]
"""A start of SGLang's on two ranks takes a minute and more: `make matrix` has all."""


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("trainer", "sizes", "engine"),
    ALL if EVERY else SLICE,
)
def test_each_rank_receives_what_it_lacks_and_speaks_with_it(ranks, model, trainer, sizes, engine):
    config, layout = TRAINERS[trainer]
    backend = trainer.partition("-")[0]
    check(ranks, model(sizes), (backend, config, layout), engine, [[0, 1]], sizes)


def bytes_of(shapes: dict[str, tuple[int, ...]], dims: int) -> int:
    return 4 * sum(prod(shape) for shape in shapes.values() if len(shape) == dims)


@pytest.mark.timeout(500)
@pytest.mark.parametrize(
    ("layout", "groups"),
    [
        pytest.param(ParallelLayout(pp=2, tp=2), [[0, 1], [2, 3]], marks=matrix),
        (ParallelLayout(tp=4), [[0, 2], [1, 3]]),
    ],
)
def test_megatron_to_zero_redundancy_groups_moves_the_papers_bytes(ranks, model, layout, groups):
    config = MegatronConfig(vocab_multiple=1)
    found = check(ranks, model("even"), ("megatron", config, layout), "vllm", groups, "even")

    # Table 2 of the paper with t_g = 2 and p_g = 1, for matrices. Norms come from another stage, whole.
    shapes = shapes_of(model("even"))
    trained = layout.tp * layout.pp
    papers = (trained - 2) * bytes_of(shapes, 2) // (2 * trained)
    source = held("megatron", layout, SIZES["even"])
    norms = {name: shape for name, shape in shapes.items() if len(shape) == 1}
    for rank, answer in enumerate(found):
        missing = sum(
            4 * shape[0] for name, shape in norms.items() if not source(name, shape, rank).all()
        )
        assert answer["received"] == papers + missing


@pytest.mark.timeout(500)
@pytest.mark.parametrize("engine", ENGINES if EVERY else ["vllm"])
def test_fsdp_on_four_ranks_feeds_replicas_of_ranks_that_are_no_neighbours(ranks, model, engine):
    layout = ParallelLayout(dp=4)
    groups = [[0, 2], [1, 3]]
    check(ranks, model("odd"), ("fsdp", None, layout), engine, groups, "odd")


@pytest.mark.timeout(500)
@pytest.mark.parametrize("trainer", ["fsdp", "megatron-pp"])
def test_stages_of_vllm_receive_their_layers_alone_and_speak(ranks, model, trainer):
    """Stages as in Megatron: equally many layers, the embeddings with the first, the head with the last."""
    pytest.importorskip("vllm")
    config, layout = TRAINERS[trainer]
    backend = trainer.partition("-")[0]
    pytest.importorskip(PACKAGES[backend])
    path, sizes = model("odd"), SIZES["odd"]
    setup = Setup(
        path, layout=layout, backend=backend, config=config, engine="vllm", generation_pp=2, engine_config=ENGINES["vllm"],
    )  # fmt: skip
    batch = replayed(ranks, path)
    found = ranks(wire.sync_and_speak, 2, setup, batch, ReplayedPPO())

    stage = partial(wire.shard_of_megatron, tp=1, pp=2, layers=LAYERS, kv_heads=sizes["kv_heads"])
    source = held(backend, layout, sizes)
    for rank, answer in enumerate(found):
        assert answer["received"] == wire.lacking(shapes_of(path), stage, source, rank)
        assert answer["worst"] < 1e-4
        assert wire.from_hugging_face(load(path), batch, answer["spoken"][0]) < 1e-4
