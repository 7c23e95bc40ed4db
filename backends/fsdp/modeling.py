"""The Hugging Face model of a role, wrapped so that one forward gives what the role is asked for."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, PretrainedConfig
from transformers.utils import logging as hf_logging

from hybridflow.core.errors import ModelError
from hybridflow.core.model import ModelSpec
from hybridflow.core.training import MicroBatch


def hf_config(spec: ModelSpec) -> PretrainedConfig:
    fields = dict(spec.hf_config)
    model_type = fields.pop("model_type")
    try:
        config = AutoConfig.from_pretrained(spec.path) if spec.path else AutoConfig.for_model(model_type, **fields)
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise ModelError(f"transformers does not accept the model config of type {model_type!r}: {error}") from error
    config._attn_implementation = "sdpa"
    for name in (
        "attention_dropout",
        "resid_pdrop",
        "embd_pdrop",
        "attn_pdrop",
        "hidden_dropout",
        "classifier_dropout",
    ):
        if getattr(config, name, None):
            setattr(config, name, 0.0)  # a dropped unit would make old and new logprobs of equal weights differ
    if spec.kind != "policy":
        config.num_labels = 1
        config.pad_token_id = config.pad_token_id if isinstance(config.pad_token_id, int) else 0
    return config


def build_hf_model(spec: ModelSpec, dtype: torch.dtype) -> nn.Module:
    """The model with its weights: from the folder, or drawn from `init_seed`. Equal on every rank."""
    config = hf_config(spec)
    auto = AutoModelForCausalLM if spec.kind == "policy" else AutoModelForSequenceClassification
    level = hf_logging.get_verbosity()
    hf_logging.set_verbosity(logging.ERROR)  # a value head that the checkpoint lacks is meant to be new
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(spec.init_seed)
            if spec.path is not None:
                model = auto.from_pretrained(spec.path, config=config, dtype=dtype)
            else:
                model = auto.from_config(config, dtype=dtype)
    except (OSError, ValueError, RuntimeError) as error:
        raise ModelError(f"could not build {config.model_type!r} from {spec.path or 'its config'}: {error}") from error
    finally:
        hf_logging.set_verbosity(level)
    model.config.use_cache = False
    return model


class RoleModel(nn.Module):
    """Calls the trunk on right-padded rows and the head on the positions that are needed, and on no other.

    Rows start at position 0 and padding is on their right, so causal attention needs no mask.
    """

    def __init__(self, hf: nn.Module, kind: str):
        super().__init__()
        self.hf, self.kind = hf, kind

    @property
    def head(self) -> nn.Module:
        return self.hf.get_output_embeddings() if self.kind == "policy" else self.hf.score

    def forward(self, micro: MicroBatch, needs: Sequence[str], temperature: float) -> dict[str, torch.Tensor]:
        last = "scores" in needs
        ids = micro.ids if last else micro.ids[:, :-1]  # the last token predicts nothing
        hidden = self.hf.base_model(input_ids=ids, use_cache=False).last_hidden_state
        if last:
            ends = micro.prompt_lengths + micro.response_lengths - 1
            return {"scores": self.head(hidden[torch.arange(len(ids), device=ids.device), ends])[:, 0].float()}
        mask = micro.response_mask
        rows, at = mask.nonzero(as_tuple=True)
        before = hidden[rows, micro.prompt_lengths[rows] - 1 + at]
        out = self.head(before)
        if "values" in needs:
            return {"values": _fill(mask, out[:, 0].float())}
        targets = micro.ids[rows, micro.prompt_lengths[rows] + at]
        return {name: _fill(mask, flat) for name, flat in token_outputs(out, targets, needs, temperature, micro, mask)}


def token_outputs(logits, targets, needs: Sequence[str], temperature: float, micro: MicroBatch, mask):
    """(name, [N, ...]) for each need, from logits [N, V] at the N response positions."""
    logits = logits.float()
    if temperature not in (0.0, 1.0):
        logits = logits / temperature
    if "logprobs" in needs:
        yield "logprobs", -F.cross_entropy(logits, targets, reduction="none")
    if "entropy" in needs:
        log_p = logits.log_softmax(-1)
        yield "entropy", -(log_p.exp() * log_p).sum(-1)
    if "topk_logprobs" in needs:
        assert micro.topk_ids is not None
        yield "topk_logprobs", logits.log_softmax(-1).gather(-1, micro.topk_ids[mask])
    for need in needs:
        if need.startswith("topk:"):
            values, ids = logits.log_softmax(-1).topk(min(int(need[5:]), logits.shape[-1]), dim=-1)
            yield "topk_ids", ids
            yield "topk_logprobs", values


def _fill(mask: torch.Tensor, flat: torch.Tensor) -> torch.Tensor:
    """[N, ...] at the true places of mask [B, T] -> [B, T, ...], 0 elsewhere; differentiable."""
    out = flat.new_zeros((*mask.shape, *flat.shape[1:]))
    return out.masked_scatter(mask.view(*mask.shape, *([1] * (flat.dim() - 1))).expand_as(out), flat)
