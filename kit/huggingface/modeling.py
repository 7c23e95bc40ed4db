"""The Hugging Face model of a role, wrapped so that one forward pass gives the requested outputs.

ids [B, S]  ->  trunk  ->  hidden [B, S, H]       packed rows: ids [1, N]
                              |  pick the states before the N response tokens
                           states [N, H]  ->  head  ->  logits [N, V]  ->  outputs [N, ...]
                                                                              |  spread
                                                                       outputs [B, T, ...]
"""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop
from transformers import AutoConfig, PretrainedConfig
from transformers.utils import logging as hf_logging

from hybridflow.core.contracts.footprint import LOGITS_AT_ONCE
from hybridflow.core.contracts.training import MicroBatch, counted
from hybridflow.core.errors import ModelError
from hybridflow.core.processes.page import moved
from hybridflow.core.values.model import ModelSpec
from hybridflow.kit import onednn
from hybridflow.kit.huggingface import attention, norms
from hybridflow.kit.huggingface.attention import PackedRows
from hybridflow.kit.huggingface.models import attention_of, auto_class, why_padded
from hybridflow.kit.vocabulary import VocabularyPart, scaled

HEAD = "score."
"""Prefix of the parameter names of a value or score model's head."""


def hf_config(spec: ModelSpec) -> PretrainedConfig:
    """Return the model's config as it is exported.

    Raises ModelError when transformers does not accept it.
    """
    # A folder's config is read by transformers itself; else the fields are complete.
    with model_errors(f"transformers does not accept {spec.path or 'this'} model config"):
        config = (
            AutoConfig.from_pretrained(spec.path)
            if spec.path
            else AutoConfig.for_model(**spec.hf_config)
        )

    # Value and score models are classifiers with one label, which need a token for padding.
    if spec.kind != "policy":
        config.num_labels = 1
        config.pad_token_id = config.pad_token_id if isinstance(config.pad_token_id, int) else 0
    return config


def running_config(config: PretrainedConfig) -> PretrainedConfig:
    """Return the config to train with: without dropout and noise, with a suitable attention kernel.

    Dropout would make old and new log-probabilities of equal weights differ.
    """
    config = copy.deepcopy(config)
    padded = why_padded(config.to_dict())
    config._attn_implementation = attention_of(config) if padded else attention.NAME
    # Each architecture has names of its own: attention_dropout, resid_pdrop, router_jitter_noise.
    for name, value in list(vars(config).items()):
        if isinstance(value, float) and ("drop" in name or "jitter" in name):
            setattr(config, name, 0.0)
    return config


@contextlib.contextmanager
def model_errors(what: str) -> Iterator[None]:
    """Raise ModelError in the place of what transformers raises for fields that it cannot use.

    Its code meets them anywhere, so that is any exception: 0 heads are a ZeroDivisionError.
    """
    try:
        yield
    except ModelError:
        raise
    except Exception as error:
        # A field of another type is said in the last line; its class tells nothing then.
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
        if isinstance(error, StrictDataclassError):
            _, _, text = lines[-1].partition("Error: ")
        else:
            text = f"{type(error).__name__}: {lines[0]}"
        raise ModelError(f"{what}: {text}") from error


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers while it builds a model.

    It warns of a value head that the checkpoint lacks (it is new on purpose), and every rank would
    show its progress bar.
    """
    level = hf_logging.get_verbosity()
    bars = hf_logging.is_progress_bar_enabled()
    hf_logging.set_verbosity(logging.ERROR)
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        hf_logging.set_verbosity(level)
        if bars:
            hf_logging.enable_progress_bar()


def build_hf_model(spec: ModelSpec, dtype: torch.dtype) -> tuple[Any, PretrainedConfig]:
    """Return the model with its weights, equal on every rank, and its config.

    Weights come from the folder, or are drawn from `init_seed`, as is the head of a value or score
    model if the folder lacks it. Raises ModelError when transformers cannot build the model, and
    when the folder lacks another parameter.
    """
    # `config` is returned for export; the model runs with another one.
    config = hf_config(spec)
    running = running_config(config)
    auto = auto_class(spec.kind)
    missing: set[str] = set()
    what = f"could not build {config.model_type!r} from {spec.path or 'its config'}"
    # New weights are equal on every rank, and the caller's random state stays as it was.
    with model_errors(what), quiet(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(spec.init_seed)
        if spec.path is not None:
            model, found = auto.from_pretrained(
                spec.path, config=running, dtype=dtype, output_loading_info=True
            )
            missing = set(found["missing_keys"])
        else:
            model = auto.from_config(running, dtype=dtype)

    # transformers would initialise parameters that the folder lacks at random.
    if spec.kind != "policy":
        missing = {name for name in missing if not name.startswith(HEAD)}
    if missing:
        raise ModelError(
            f"{spec.path} has no {min(missing)}, which this {config.model_type} needs "
            f"({len(missing)} parameters are missing)"
        )
    return model, config


ADAPTER = "default"
"""peft's default name of an adapter."""


def canonical(name: str) -> str:
    """Return a parameter's canonical name: without the parts that RoleModel and peft add."""
    return name.removeprefix("hf.").replace(".base_layer.", ".").replace(f".{ADAPTER}.", ".")


def ties_of(role: RoleModel) -> dict[str, str]:
    """Return tied name -> the name whose parameter it shares, in canonical names."""
    owners = {id(p): canonical(name) for name, p in role.hf.named_parameters()}
    ties = {}
    # By default a shared parameter comes once, under its owner's name; here under all of them.
    for name, parameter in role.hf.named_parameters(remove_duplicate=False):
        owner = owners[id(parameter)]
        if canonical(name) != owner:
            ties[canonical(name)] = owner
    return ties


def saved_buffers(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, values) of the module's buffers that a checkpoint has."""
    for path, part in module.named_modules():
        for name, values in part.named_buffers(path, recurse=False):
            if name.rpartition(".")[2] not in part._non_persistent_buffers_set:
                yield name, values


class RoleModel(nn.Module):
    """A model that runs its trunk on rows, and its head only where it is needed.

    Padded rows start at position 0 with padding on their right, so causal attention needs no mask.
    Rows are packed for models for which `why_padded` returns None.
    """

    hf: Any
    """A PreTrainedModel. (nn.Module's own types would make every attribute a Tensor | Module.)"""

    def __init__(self, hf: nn.Module, kind: str):
        super().__init__()
        self.hf = hf
        self.kind = kind
        self.vocabulary_part: VocabularyPart | None = None
        """The part of the vocabulary whose logits the head gives; None: all of it."""
        # Padding is masked by the losses. A pad token that was sampled is a token like any other,
        # whose embedding torch would leave without a gradient.
        embedding = self.hf.get_input_embeddings()
        if isinstance(embedding, nn.Embedding):
            embedding.padding_idx = None
        onednn.use(hf)
        norms.use(hf)

    @property
    def head(self) -> nn.Module:
        """The layer from hidden states to logits, values or scores."""
        return self.hf.get_output_embeddings() if self.kind == "policy" else self.hf.score

    def forward(
        self, micro: MicroBatch, needs: Sequence[str], temperature: float
    ) -> dict[str, torch.Tensor]:
        """Return the outputs in `needs`, float32, 0 after each response's end.

        See TrainingBackend for their names and shapes: [B, T, ...], scores [B].
        """
        moved()
        # The last token of a row predicts nothing, but a score is read at it.
        last = "scores" in needs
        inputs, prompt_ends, starts = _inputs(micro, last)
        hidden = self.hf.base_model(**inputs, use_cache=False).last_hidden_state
        shares = bool(micro.shared.any())
        if last:
            # Flat indices of the last tokens.
            lengths = micro.response_lengths
            ends = torch.where(lengths > 0, starts + lengths - 1, prompt_ends)
            scores = self.head(pick(hidden, ends.to(hidden.device), shares))

            # A sum over the one label: FSDP wants no view of the head's output.
            return {"scores": scores.float().sum(-1)}

        # Flat indices of the state before each response token, and of the token itself among ids.
        rows, at = micro.places
        before = torch.where(at > 0, starts[rows] + at - 1, prompt_ends[rows])
        target = micro.response_starts[rows] + at
        indices = torch.stack([rows, at, before, target])
        rows, at, before, target = indices.to(hidden.device, non_blocking=True)
        states = pick(hidden, before, shares)
        shape = (micro.rows, micro.width)

        # A value is the head's only output. A policy's outputs are computed from its logits.
        if "values" in needs:
            values = self.head(states)[:, 0].float()
            return {"values": spread(values, rows, at, shape)}
        targets = micro.ids.flatten().index_select(0, target)
        topk_ids = None if micro.topk_ids is None else micro.topk_ids[rows, at]
        outputs = self._token_outputs(states, targets, needs, temperature, topk_ids)
        return {name: spread(value, rows, at, shape) for name, value in outputs.items()}

    def _token_outputs(
        self, states, targets, needs, temperature, topk_ids
    ) -> dict[str, torch.Tensor]:
        """Return the outputs of states [N, H], in pieces where there are many logits."""
        part = self.vocabulary_part
        of_logits = token_outputs if part is None else part.outputs
        columns = self.hf.config.vocab_size
        if part is not None:
            columns //= part.group.size()

        def piece(states, targets, topk_ids):
            # Without a name here, the logits are freed as soon as something else is made of them.
            outputs = of_logits(
                finished(self.head(states), self.hf.config), targets, needs, temperature, topk_ids
            )
            return dict(outputs)

        return in_pieces(piece, columns, states, targets, topk_ids)


def in_pieces(
    outputs_of: Callable[..., dict[str, torch.Tensor]],
    columns: int,
    states: torch.Tensor,
    targets: torch.Tensor,
    topk_ids: torch.Tensor | None,
) -> dict[str, torch.Tensor]:
    """Return outputs_of(states, targets, topk_ids), with at most LOGITS_AT_ONCE logits at a time.

    Each of the N states has `columns` logits. Where there are more, they are computed in pieces,
    and once more in the backward pass instead of being kept.
    """
    size = max(LOGITS_AT_ONCE // columns, 1)
    if len(states) <= size:
        return outputs_of(states, targets, topk_ids)

    # Without early stop: where ranks share the vocabulary, one that has only padding recomputes
    # fewer tensors, so it would stop sooner and leave the others waiting in their all-reduces.
    pieces = []
    with set_checkpoint_early_stop(False):
        for start in range(0, len(states), size):
            cut = slice(start, start + size)
            topk_cut = topk_ids if topk_ids is None else topk_ids[cut]
            given = (states[cut], targets[cut], topk_cut)
            pieces.append(checkpoint(outputs_of, *given, use_reentrant=False))
    return {name: torch.cat([outputs[name] for outputs in pieces]) for name in pieces[0]}


def _inputs(micro: MicroBatch, whole: bool) -> tuple[dict[str, Any], torch.Tensor, torch.Tensor]:
    """Return the trunk's arguments, and two flat indices into its tokens for each row, int64 [B].

    They are those of the prompt's last token and of the response's first one. Without `whole` the
    last token of each row is left out, of padded rows the last column.
    """
    ids = micro.ids
    prompts = micro.prompt_lengths
    if not micro.packed:
        cut = 0 if whole or ids.shape[1] == 1 else 1
        ids = ids[:, : ids.shape[1] - cut]
        starts = torch.arange(micro.rows) * ids.shape[1] + prompts
        return {"input_ids": ids}, starts - 1, starts

    # Pieces: rows and shared prompts, each once, then responses to shared prompts.
    assert micro.prompt_at is not None
    cut = 0 if whole else 1
    responses = (micro.response_lengths - cut).clamp(min=0)
    tails = micro.shared.nonzero().flatten()
    heads, head_of, owners = _firsts(micro.prompt_at)
    sizes = prompts[owners] + torch.where(micro.shared[owners], 0, responses[owners])
    tails = tails[micro.response_starts[tails].argsort()]
    tails = tails[responses[tails] > 0]

    # Every token's index among ids, and its position in its row.
    lengths = torch.cat([sizes, responses[tails]])
    firsts = torch.cat([heads, micro.response_starts[tails]])
    offsets = torch.cat([torch.zeros_like(sizes), prompts[tails]])
    pieces, at = counted(lengths)
    places = torch.stack([firsts[pieces] + at, offsets[pieces] + at])
    kept, positions = places.to(ids.device, non_blocking=True)
    pairs = zip(head_of[tails].tolist(), responses[tails].tolist(), strict=True)
    inputs = {
        "input_ids": ids[:, kept],
        "position_ids": positions[None],
        "packed_rows": PackedRows(sizes.tolist(), ids.device, list(pairs)),
    }

    # Their indices in the trunk.
    begins = lengths.cumsum(0) - lengths
    prompt_ends = begins[head_of] + prompts - 1
    starts = prompt_ends + 1
    starts[tails] = begins[len(sizes) :]
    return inputs, prompt_ends, starts


def _firsts(places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the distinct places, sorted; each row's index among them; and a row for each."""
    unique, number = places.unique(return_inverse=True)
    rows = torch.empty_like(unique)
    rows[number] = torch.arange(len(places))
    return unique, number, rows


def finished(logits: torch.Tensor, config: Any) -> torch.Tensor:
    """Return the logits that the model's own forward computes from a head's output.

    Cohere multiplies it, granite divides it, and gemma2 caps it: c tanh(logits / c).
    """
    # Most models have none of these, and their logits are large.
    if scale := getattr(config, "logit_scale", None):
        logits = logits * scale
    if divisor := getattr(config, "logits_scaling", None):
        logits = logits / divisor
    if cap := getattr(config, "final_logit_softcapping", None):
        logits = cap * torch.tanh(logits / cap)
    return logits


def token_outputs(
    logits: torch.Tensor,
    targets: torch.Tensor,
    needs: Sequence[str],
    temperature: float,
    topk_ids: torch.Tensor | None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, float32 [N, ...]) for each need.

    `logits` [N, V] predict the N response tokens `targets` [N]; `topk_ids` [N, K] are the tokens
    for the output topk_logprobs. With p = softmax(logits / temperature):
    logprobs = log p[target], entropy = -sum p log p.
    """
    logits = scaled(logits, temperature)

    # The usual case, in one call.
    if list(needs) == ["logprobs"]:
        yield "logprobs", -F.cross_entropy(logits, targets, reduction="none")
        return

    log_p = logits.log_softmax(-1)
    if "logprobs" in needs:
        yield "logprobs", log_p.gather(-1, targets[:, None])[:, 0]
    if "entropy" in needs:
        yield "entropy", _Entropy.apply(log_p)
    if "topk_logprobs" in needs:
        assert topk_ids is not None
        yield "topk_logprobs", log_p.gather(-1, topk_ids)
    # "topk:K" asks for the K most likely tokens, whichever they are.
    for need in needs:
        if need.startswith("topk:"):
            count = int(need[5:])
            values, ids = log_p.topk(min(count, log_p.shape[-1]), dim=-1)
            yield "topk_ids", ids
            yield "topk_logprobs", values


class _Entropy(torch.autograd.Function):
    """-sum p log p of log-probabilities [N, V]; for the backward pass it keeps only these."""

    @staticmethod
    def forward(ctx, log_p):
        ctx.save_for_backward(log_p)
        return -log_p.exp().mul_(log_p).sum(-1)

    @staticmethod
    def backward(ctx, grad):
        # d(p log p) / d log p = p (log p + 1)
        (log_p,) = ctx.saved_tensors
        return -(log_p + 1).mul_(log_p.exp()).mul_(grad[:, None])


def pick(hidden: torch.Tensor, places: torch.Tensor, several: bool = False) -> torch.Tensor:
    """Return the states [N, H] of hidden [B, S, H] at flat indices `places` [N].

    several: whether an index may occur more than once.
    """
    if several:
        return hidden.flatten(0, 1).index_select(0, places)
    return _Pick.apply(hidden, places)


class _Pick(torch.autograd.Function):
    """An index_select whose backward copies instead of adding up, as no index occurs twice."""

    @staticmethod
    def forward(ctx, hidden, places):
        ctx.shape = hidden.shape
        ctx.save_for_backward(places)
        return hidden.flatten(0, 1).index_select(0, places)

    @staticmethod
    def backward(ctx, grad):
        (places,) = ctx.saved_tensors
        hidden_grad = grad.new_zeros(ctx.shape)
        hidden_grad.flatten(0, 1).index_copy_(0, places, grad)
        return hidden_grad, None


def spread(
    flat: torch.Tensor, rows: torch.Tensor, at: torch.Tensor, shape: tuple[int, int]
) -> torch.Tensor:
    """Return [B, T, ...] with flat [N, ...] at the indices (rows, at), and 0 elsewhere.

    `shape` is (B, T). Gradients flow back to `flat`.
    """
    zeros = flat.new_zeros((*shape, *flat.shape[1:]))
    return zeros.index_put((rows, at), flat)
