"""Hugging Face's own code as a decoder."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers.decoders import check_decoder
from transformers import AutoConfig

from hybridflow.backends.transformers.generic import GenericDecoder
from hybridflow.core.errors import ModelError


@pytest.mark.parametrize("model_type", ["gpt2", "llama"])
def test_logits_are_those_of_hugging_face_while_rows_leave(tiny, model_type):
    case = tiny(model_type, fast=False)
    check_decoder(case.engine.decoder, case.model, steps=4)


def test_without_rows_nothing_is_kept(tiny):
    decoder = tiny("gpt2").engine.decoder
    decoder.reserve(2, 10)
    decoder.admit([np.array([1, 2, 3])], [2])
    assert decoder.longest == 3
    decoder.keep(np.array([], np.int64))
    assert decoder.longest == 0
    assert decoder.cache is None


def test_the_bytes_of_a_row_are_those_of_every_column(tiny):
    # keys and values of 2 layers, 4 or 2 heads and 10 columns of 16 floats
    assert tiny("gpt2").engine.decoder.row_bytes(10) == 2 * 2 * 4 * 10 * 16 * 4
    assert tiny("llama", fast=False).engine.decoder.row_bytes(10) == 2 * 2 * 2 * 10 * 16 * 4


def test_a_model_that_is_no_causal_one_is_refused_by_its_type():
    config = AutoConfig.for_model("vit", hidden_size=32, num_hidden_layers=1)
    with pytest.raises(ModelError, match="no causal model for 'vit'"):
        GenericDecoder(config, torch.float32, torch.device("cpu"))


def test_a_checkpoints_buffers_have_their_places():
    config = AutoConfig.for_model(
        "glm4_moe", vocab_size=8, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        intermediate_size=8, moe_intermediate_size=8, n_routed_experts=4, num_experts_per_tok=2, first_k_dense_replace=1,
    )  # fmt: skip
    decoder = GenericDecoder(config, torch.float32, torch.device("cpu"))
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    decoder.places[name].storage.copy_(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    assert decoder.model.state_dict()[name].tolist() == [1.0, 2.0, 3.0, 4.0]
