"""Who holds what: the ranks' pieces make up the parameters; what cannot be cut is refused."""

from __future__ import annotations

import attrs
import pytest
import torch
from helpers.training_check import assert_equal
from helpers.training_jobs import (
    Setup,
    export,
    failing_build,
    holdings,
    load_and_train,
    logit_shapes,
    save_after,
)  # fmt: skip
from helpers.training_reference import MODELS, Blend, Nothing, load, make_batch

from hybridflow.backends.fsdp.config import FSDPConfig
from hybridflow.backends.fsdp.sharding import boxes_of, copies, local, replica_group
from hybridflow.core.values.model import ModelSpec
from hybridflow.core.values.parallel import ParallelLayout
from hybridflow.core.values.weights import Box

ONE = ParallelLayout()
DP2, TP2 = ParallelLayout(dp=2), ParallelLayout(tp=2)
DP4, DP2_TP2 = ParallelLayout(dp=4), ParallelLayout(dp=2, tp=2)


def test_a_plain_parameter_is_whole_on_every_rank_and_its_own_piece():
    parameter = torch.nn.Parameter(torch.ones(5, 3))
    assert local(parameter) is parameter
    assert boxes_of(parameter, DP2_TP2, 1) == dict.fromkeys(range(4), Box((0, 0), (5, 3)))
    assert copies(parameter, DP2_TP2, 1) == 4


def test_one_replica_is_the_whole_group():
    assert replica_group(DP2_TP2, 1, 3) == ([0, 1, 2, 3], None)


LAYOUTS = [
    ("qwen2-tied", ONE, FSDPConfig()),
    ("llama", ONE, FSDPConfig(precision="bf16")),
    ("qwen2-odd", DP2, FSDPConfig()),
    ("qwen2-tied", TP2, FSDPConfig()),
    ("llama-odd", DP4, FSDPConfig(wrap_min_parameters=0)),
    ("qwen2-odd", DP4, FSDPConfig(replicas=2)),
    ("qwen2-tied", DP2_TP2, FSDPConfig(wrap_min_parameters=0)),
    ("llama", DP2_TP2, FSDPConfig(replicas=2)),
    ("llama", ParallelLayout(dp=2, tp=2, order="dp-tp-cp-pp"), FSDPConfig()),
]


@pytest.mark.parametrize(("name", "layout", "config"), LAYOUTS, ids=str)
def test_boxes_of_all_ranks_make_up_the_parameters_bit_for_bit(ranks, folder, name, layout, config):
    found = ranks(holdings, layout.world, Setup(folder(name), layout=layout, config=config))
    want = dict(load(folder(name)).named_parameters())
    said = found[0]["layout"]
    assert set(said.params) == set(want)
    tied = MODELS[name][1]
    assert said.ties == ({"lm_head.weight": "model.embed_tokens.weight"} if tied else {})
    copies = config.replicas
    for parameter, whole in want.items():
        assert said.params[parameter].shape == tuple(whole.shape)
        filled, times = torch.full_like(whole, torch.nan), torch.zeros_like(whole)
        for rank, answer in enumerate(found):
            held = [(box, tensor) for n, box, tensor in answer["shards"] if n == parameter]
            assert (
                tuple(box for box, _ in held)
                == answer["layout"].held[rank][parameter]
                == said.held[rank][parameter]
            )
            for box, tensor in held:
                filled[box.slices()] = tensor
                times[box.slices()] += 1
            assert torch.equal(answer["whole"][parameter], whole)
        assert torch.equal(filled, whole)
        assert times.unique().tolist() in (
            [copies],
            [copies * layout.tp],
        )  # the same number of times everywhere


def test_sizes_that_nothing_divides_are_cut_as_torch_cuts_them(ranks, folder):
    found = ranks(holdings, 4, Setup(folder("qwen2-odd"), layout=DP4))
    held = [found[0]["layout"].held[rank]["model.embed_tokens.weight"] for rank in range(4)]
    assert held == [(Box((a, 0), (b, 64)),) for a, b in ((0, 17), (17, 34), (34, 51), (51, 67))]


@pytest.mark.parametrize("vocab", [66, 2])
def test_tensor_parallel_pieces_that_dp_does_not_divide_are_whole_again(ranks, tmp_path, vocab):
    """A parameter that is cut twice in one dim, unevenly: 66 rows are 33 per tp rank, cut into 17 and 16."""
    config = {"model_type": "qwen2", "vocab_size": vocab, "hidden_size": 8, "intermediate_size": 6}
    config |= {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    setup = Setup("", layout=DP2_TP2, model=ModelSpec(config, None, 3))
    batch = make_batch(5, vocab=vocab)
    checkpoint, copy = str(tmp_path / "checkpoint"), str(tmp_path / "hf")
    before = ranks(save_after, 4, setup, [(batch, Nothing())], 1, checkpoint, 0)[0]["saved"]
    one = attrs.evolve(setup, layout=ONE)
    assert_equal(
        ranks(holdings, 1, one)[0]["whole"], before
    )  # the same model was drawn on every rank
    trained = ranks(save_after, 4, setup, [(batch, Blend())], 2, str(tmp_path / "trained"), 1)[0]
    for layout in (ONE, DP2_TP2, TP2, DP4):
        there = attrs.evolve(setup, layout=layout)
        again = ranks(
            load_and_train, layout.world, there, [(batch, Blend())], str(tmp_path / "trained"), 1
        )[0]
        assert_equal(again["loaded"], trained["saved"])
        for name, tensor in again["end"].items():
            torch.testing.assert_close(tensor, trained["end"][name], rtol=1e-4, atol=1e-6)
    ranks(export, 4, setup, [], copy)
    assert_equal(dict(load(copy).named_parameters()), before)


@pytest.mark.parametrize(("layout", "each"), [(DP2, 68), (TP2, 34)], ids=str)
def test_a_rank_has_the_logits_of_its_part_of_the_vocabulary(ranks, folder, layout, each):
    setup = Setup(folder("qwen2-tied"), layout=layout)
    assert ranks(logit_shapes, 2, setup, make_batch(4), Blend()) == [{each}] * 2


def test_tensor_parallelism_refuses_sizes_that_it_cannot_cut(ranks, folder):
    said = ranks(failing_build, 2, Setup(folder("qwen2-odd"), layout=TP2))
    assert (
        said
        == ["ModelError: tp 2 must divide the model's vocab_size 67; choose a smaller layout.tp"]
        * 2
    )
    config = {"model_type": "gpt2", "vocab_size": 68, "n_embd": 32, "n_layer": 1, "n_head": 2}
    said = ranks(failing_build, 2, Setup("", layout=TP2, model=ModelSpec(config, None, 0)))
    assert "needs a Llama-like model" in said[0]
