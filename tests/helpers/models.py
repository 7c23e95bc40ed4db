"""Hugging Face's models with the weights of tiny runs."""

from __future__ import annotations

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hybridflow.kit.testing.runs import MODEL, TinyRun


def hugging_face_model(tiny: TinyRun) -> torch.nn.Module:
    """Hugging Face's model with the actor's weights."""
    fields = dict(MODEL)
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    model = AutoModelForCausalLM.from_config(config).eval()
    model.load_state_dict(tiny.weights("actor"), strict=False)
    return model
