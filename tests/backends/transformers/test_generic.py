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
