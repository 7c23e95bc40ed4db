"""Megatron on one rank under the conformance kit; what it refuses."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from helpers.installed import needs
from helpers.one_rank_backends import InBfloat16, OneRank
from helpers.packed_rows import LOSSES, same_packed_and_padded

from hybridflow.backends.megatron.backend import MegatronBackend
from hybridflow.backends.megatron.config import MegatronConfig
from hybridflow.core.contracts.worker import RankContext
from hybridflow.core.errors import ModelError
from hybridflow.core.values.model import ModelSpec
from hybridflow.core.values.parallel import ParallelLayout
from hybridflow.kit.testing import tiny_config

TP2, PP2 = ParallelLayout(tp=2), ParallelLayout(pp=2)


class Megatron(OneRank):
    backend, config = MegatronBackend, MegatronConfig()


@needs("megatron.core")
class TestPlain(Megatron):
    pass


@needs("megatron.core")
class TestRecomputed(Megatron):
    config = MegatronConfig(vocab_multiple=1, recompute=True)


@needs("megatron.core")
class TestBfloat16(InBfloat16, Megatron):
    config = MegatronConfig(precision="bf16")


@needs("megatron.core")
def test_a_model_that_megatron_does_not_have_is_refused(alone):
    spec = ModelSpec({"model_type": "gpt2", "vocab_size": 32}, None, 0)
    with pytest.raises(ModelError, match="'gpt2': choose backend fsdp"):
        MegatronBackend(spec, MegatronConfig(), None, alone).build()


@pytest.mark.parametrize(
    ("settings", "layout", "said"),
    [
        ({"virtual_stages": 2}, TP2, ["backend.virtual_stages 2 needs pp > 1, got pp 1"]),
        ({"sequence_parallel": True}, PP2, ["backend.sequence_parallel needs tp > 1, got tp 1"]),
        ({"virtual_stages": 2}, PP2, []),
        ({"sequence_parallel": True}, TP2, []),
    ],
)
def test_settings_that_the_layout_makes_no_sense_of_are_named(settings, layout, said):
    model = ModelSpec(tiny_config("qwen2") | {"num_hidden_layers": 4}, None, 0)
    assert MegatronBackend.problems(MegatronConfig(**settings), layout, model) == said


def test_it_needs_a_process_group(monkeypatch):
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    context = RankContext("actor", 0, ParallelLayout(), torch.device("cpu"))
    backend = MegatronBackend(ModelSpec(tiny_config(), None, 0), MegatronConfig(), None, context)
    with pytest.raises(RuntimeError, match=r"backend megatron needs torch\.distributed"):
        backend.build()


@needs("megatron.core")
@pytest.mark.parametrize("name", LOSSES)
def test_packed_rows_train_as_padded_ones(name, alone):
    def build(spec, optimizer):
        made = MegatronBackend(spec, MegatronConfig(), optimizer, alone)
        made.build()
        return made

    same_packed_and_padded(build, LOSSES[name])
