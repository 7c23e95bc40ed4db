"""The Hugging Face model of a role, wrapped so that one forward gives what the role is asked for."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PretrainedConfig,
)
from transformers.utils import logging as hf_logging

from hybridflow.core.contracts.footprint import LOGITS_AT_ONCE
from hybridflow.core.contracts.training import MicroBatch
from hybridflow.core.errors import ModelError
from hybridflow.core.values.model import ModelSpec

DROPOUTS = (
    "attention_dropout",
    "resid_pdrop",
    "embd_pdrop",
    "attn_pdrop",
    "hidden_dropout",
    "classifier_dropout",
)


def hf_config(spec: ModelSpec) -> PretrainedConfig:
    """The model's config as it is exported. Raises ModelError when transformers does not accept it."""
    fields = dict(spec.hf_config)
    model_type = fields.pop("model_type")
    try:
        config = (
            AutoConfig.from_pretrained(spec.path)
            if spec.path
            else AutoConfig.for_model(model_type, **fields)
        )
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise ModelError(
            f"transformers does not accept the model config of type {model_type!r}: {error}"
        ) from error
    if spec.kind != "policy":
        config.num_labels = 1
        config.pad_token_id = config.pad_token_id if isinstance(config.pad_token_id, int) else 0
    return config


def running_config(config: PretrainedConfig) -> PretrainedConfig:
    """The config to train with: a dropped unit would make old and new logprobs of equal weights differ."""
    config = copy.deepcopy(config)
    config._attn_implementation = "sdpa"
    for name in DROPOUTS:
        if getattr(config, name, None):
            setattr(config, name, 0.0)
    return config


def build_hf_model(spec: ModelSpec, dtype: torch.dtype) -> tuple[Any, PretrainedConfig]:
    """The model with its weights, from the folder or drawn from `init_seed`, equal on every rank; and its config."""
    config = hf_config(spec)
    running = running_config(config)
    auto = AutoModelForCausalLM if spec.kind == "policy" else AutoModelForSequenceClassification
    level = hf_logging.get_verbosity()
    hf_logging.set_verbosity(
        logging.ERROR
    )  # a value head that the checkpoint lacks is meant to be new
    hf_logging.disable_progress_bar()  # every rank would show one
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(spec.init_seed)
            if spec.path is not None:
                model = auto.from_pretrained(spec.path, config=running, dtype=dtype)
            else:
                model = auto.from_config(running, dtype=dtype)
    except (OSError, ValueError, RuntimeError) as error:
        raise ModelError(
            f"could not build {config.model_type!r} from {spec.path or 'its config'}: {error}"
        ) from error
    finally:
        hf_logging.set_verbosity(level)
    return model, config


ADAPTER = "default"
"""peft's name of an adapter that has no other."""


def canonical(name: str) -> str:
    """A parameter's name without what RoleModel and peft put into it."""
    return name.removeprefix("hf.").replace(".base_layer.", ".").replace(f".{ADAPTER}.", ".")


def ties_of(role: RoleModel) -> dict[str, str]:
    """Canonical name -> the name whose parameter it shares."""
    kept = {id(p): canonical(name) for name, p in role.hf.named_parameters()}
    every = [(canonical(name), p) for name, p in role.hf.named_parameters(remove_duplicate=False)]
    return {name: kept[id(p)] for name, p in every if name != kept[id(p)]}


class RoleModel(nn.Module):
    """Calls the trunk on right-padded rows and the head on the positions that are needed, and on no other.

    Rows start at position 0 and padding is on their right, so causal attention needs no mask.
    """

    hf: Any  # a PreTrainedModel; nn.Module's own types would make every attribute a Tensor | Module

    def __init__(self, hf: nn.Module, kind: str):
        super().__init__()
        self.hf, self.kind = hf, kind

    @property
    def head(self) -> nn.Module:
        return self.hf.get_output_embeddings() if self.kind == "policy" else self.hf.score

    def forward(
        self, micro: MicroBatch, needs: Sequence[str], temperature: float
    ) -> dict[str, torch.Tensor]:
        last = "scores" in needs
        ids = (
            micro.ids if last or micro.ids.shape[1] == 1 else micro.ids[:, :-1]
        )  # the last token predicts nothing
        hidden = self.hf.base_model(input_ids=ids, use_cache=False).last_hidden_state
        if last:
            ends = (
                torch.arange(len(ids)) * ids.shape[1]
                + micro.prompt_lengths
                + micro.response_lengths
                - 1
            )
            return {
                "scores": self.head(pick(hidden, ends.to(ids.device))).float().sum(-1)
            }  # FSDP wants no view
        rows, at = micro.places
        before = rows * ids.shape[1] + micro.prompt_lengths[rows] + at - 1
        target = before + 1 + rows * (micro.ids.shape[1] - ids.shape[1])
        rows, at, before, target = torch.stack([rows, at, before, target]).to(
            ids.device, non_blocking=True
        )
        states, shape = pick(hidden, before), (len(ids), micro.width)
        if "values" in needs:
            return {"values": spread(self.head(states)[:, 0].float(), rows, at, shape)}
        wanted = micro.ids.flatten().index_select(0, target)
        topk = None if micro.topk_ids is None else micro.topk_ids[rows, at]
        outputs = self._token_outputs(states, wanted, needs, temperature, topk)
        return {name: spread(value, rows, at, shape) for name, value in outputs.items()}

    def _token_outputs(
        self, states, targets, needs, temperature, topk_ids
    ) -> dict[str, torch.Tensor]:
        """Logits in pieces when they are many, made again in the backward instead of kept."""

        def piece(states, targets, topk_ids):
            return dict(token_outputs(self.head(states), targets, needs, temperature, topk_ids))

        size = max(LOGITS_AT_ONCE // self.hf.config.vocab_size, 1)
        if len(states) <= size:
            return piece(states, targets, topk_ids)
        cuts = [slice(start, start + size) for start in range(0, len(states), size)]
        found = [
            checkpoint(
                piece,
                states[c],
                targets[c],
                topk_ids if topk_ids is None else topk_ids[c],
                use_reentrant=False,
            )
            for c in cuts
        ]
        return {name: torch.cat([f[name] for f in found]) for name in found[0]}


def token_outputs(
    logits: torch.Tensor,
    targets: torch.Tensor,
    needs: Sequence[str],
    temperature: float,
    topk_ids: torch.Tensor | None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, [N, ...]) for each need, from logits [N, V] at the N response tokens, targets [N], topk_ids [N, K]."""
    logits = logits.float()
    if temperature not in (0.0, 1.0):
        logits = logits / temperature
    if list(needs) == ["logprobs"]:
        yield "logprobs", -F.cross_entropy(logits, targets, reduction="none")
        return
    log_p = logits.log_softmax(-1)
    if "logprobs" in needs:
        yield "logprobs", log_p.gather(-1, targets[:, None])[:, 0]
    if "entropy" in needs:
        yield "entropy", -(log_p.exp() * log_p).sum(-1)
    if "topk_logprobs" in needs:
        assert topk_ids is not None
        yield "topk_logprobs", log_p.gather(-1, topk_ids)
    for need in needs:
        if need.startswith("topk:"):
            values, ids = log_p.topk(min(int(need[5:]), log_p.shape[-1]), dim=-1)
            yield "topk_ids", ids
            yield "topk_logprobs", values


def pick(hidden: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """hidden [B, S, H], flat places [N] in [B, S], each at most once -> [N, H]."""
    return _Pick.apply(hidden, places)


class _Pick(torch.autograd.Function):
    """index_select whose backward copies instead of adding up (no place occurs twice)."""

    @staticmethod
    def forward(ctx, hidden, places):
        ctx.shape = hidden.shape
        ctx.save_for_backward(places)
        return hidden.flatten(0, 1).index_select(0, places)

    @staticmethod
    def backward(ctx, grad):
        (places,) = ctx.saved_tensors
        out = grad.new_zeros(ctx.shape)
        out.flatten(0, 1).index_copy_(0, places, grad)
        return out, None


def spread(
    flat: torch.Tensor, rows: torch.Tensor, at: torch.Tensor, shape: tuple[int, int]
) -> torch.Tensor:
    """[N, ...] to the places (rows, at) of [B, T, ...], 0 elsewhere; differentiable."""
    return flat.new_zeros((*shape, *flat.shape[1:])).index_put((rows, at), flat)
