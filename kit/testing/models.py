"""Tiny Hugging Face models, and what they compute, as the reference of backends and engines.

Their weights are drawn so large that a mistake in any layer shows in the outputs.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import torch

from hybridflow.core.values.model import ModelConfig, ModelSpec
from hybridflow.kit.huggingface.saved import SavedForm
from hybridflow.settle.models import resolve_model

VOCAB = 32
SIZES: dict[str, Any] = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=48,
    max_position_embeddings=128,
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=None,
)
"""Fields of the config that every architecture has."""
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "qwen2": dict(tie_word_embeddings=True),
    "llama": dict(tie_word_embeddings=False),
    "qwen3_moe": dict(
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        tie_word_embeddings=False,
    ),
}
"""Further fields by model type: qwen2 has tied embeddings and biases, llama neither. qwen3_moe has
experts, which transformers stores in one tensor and saves one by one."""


def tiny_config(architecture: str = "qwen2", width: int = 32) -> dict[str, Any]:
    """Return the fields of a Hugging Face config with hidden size `width`.

    It has two layers, 4 heads that share 2 keys and values, and a vocabulary of 32 tokens.
    """
    return {
        "model_type": architecture,
        **SIZES,
        **ARCHITECTURES[architecture],
        "hidden_size": width,
        "head_dim": width // SIZES["num_attention_heads"],
    }


@attrs.frozen(eq=False)
class Reference:
    """A Hugging Face model in float32 that is saved in a folder, which `spec` names."""

    spec: ModelSpec
    model: Any
    """The transformers model, in eval mode."""
    parameters: dict[str, torch.Tensor]
    """The folder's parameters by canonical name, as its safetensors file has them."""
    _folder: Any
    """The temporary folder, which lives as long as this object."""

    def logits(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the logits [T, V] of one sequence [T]."""
        return self.model(input_ids=ids[None], use_cache=False).logits[0].float()

    def outputs(
        self,
        prompt: torch.Tensor,
        response: torch.Tensor,
        temperature: float = 1.0,
        topk_ids: torch.Tensor | None = None,
    ) -> dict[str, torch.Tensor]:
        """Return the outputs of one sequence, aligned to the T response tokens.

        A policy has logprobs and entropy [T], log_softmax [T, V], and topk_logprobs [T, K] at
        `topk_ids`; other kinds have values [T] and scores []. They have a graph where gradients
        are on.
        """
        # The state before a token predicts it.
        ids = torch.cat([prompt, response])
        before = slice(len(prompt) - 1, len(ids) - 1)
        if self.spec.kind != "policy":
            hidden = self.model.base_model(input_ids=ids[None]).last_hidden_state
            per_token = self.model.score(hidden)[0, :, 0].float()

            # A score is read at the sequence's last token.
            return {"values": per_token[before], "scores": per_token[-1]}

        log_p = (self.logits(ids)[before] / temperature).log_softmax(-1)
        outputs = {
            "logprobs": log_p.gather(-1, response[:, None])[:, 0],
            "entropy": -(log_p.exp() * log_p).sum(-1),
            "log_softmax": log_p,
        }
        if topk_ids is not None:
            outputs["topk_logprobs"] = log_p.gather(-1, topk_ids)
        return outputs

    def saved(self, stored: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return values of the model's own parameters by canonical name, each once."""
        whole = dict(SavedForm.of(self.model).whole(stored.items()))

        # Tied parameters have one of their names in `parameters`.
        return {name: whole[name] for name in self.parameters}

    def greedy(self, prompt: np.ndarray, tokens: int) -> list[int]:
        """Return the response that Hugging Face's generate gives at temperature 0."""
        ids = torch.as_tensor(prompt)[None]
        mask = torch.ones_like(ids)
        with torch.no_grad():
            sequences = self.model.generate(
                ids, attention_mask=mask, max_new_tokens=tokens, do_sample=False
            )
        return sequences[0, ids.shape[1] :].tolist()


@functools.cache
def reference(
    architecture: str = "qwen2", kind: str = "policy", seed: int = 0, width: int = 32
) -> Reference:
    """Return a reference model, which is built once per process.

    Weights are large enough that distributions are far from uniform, and that every bias, norm and
    position matters.
    """
    from safetensors.torch import load_file
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

    fields = tiny_config(architecture, width)
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    config._attn_implementation = "eager"  # plain matrix products, without a fused kernel
    auto: Any = AutoModelForCausalLM

    # Values and scores come from a classifier with one label, which needs a padding token.
    if kind != "policy":
        auto = AutoModelForSequenceClassification
        config.num_labels = 1
        config.pad_token_id = 0
    model = auto.from_config(config, dtype=torch.float32).eval()

    # Matrices get a standard deviation of 0.3 at width 32, and outputs of the same size at others.
    # Vectors (norms, biases) keep their usual values and get noise.
    generator = torch.Generator().manual_seed(1000 + seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() > 1:
                parameter.copy_(0.3 * (32 / width) ** 0.5 * noise)
            else:
                parameter.copy_(parameter + 0.2 * noise)

    # Backends and engines read the weights from here.
    folder = tempfile.TemporaryDirectory(prefix="hybridflow-reference-")
    model.save_pretrained(folder.name)
    spec = resolve_model(ModelConfig(path=folder.name), kind, "conformance")
    parameters = load_file(f"{folder.name}/model.safetensors")
    return Reference(spec, model, parameters, folder)


@attrs.frozen(eq=False)
class Sequences:
    """Ragged prompts and responses, one int64 tensor of each per row."""

    prompts: list[torch.Tensor]
    responses: list[torch.Tensor]

    @classmethod
    def random(cls, lengths: Sequence[tuple[int, int]], seed: int = 0) -> Sequences:
        """Return random tokens; `lengths` has (prompt, response) per row."""
        generator = torch.Generator().manual_seed(seed)

        def draw(length: int) -> torch.Tensor:
            return torch.randint(0, VOCAB, (length,), generator=generator)

        # All prompts are drawn before the first response.
        prompts = [draw(prompt) for prompt, _ in lengths]
        responses = [draw(response) for _, response in lengths]
        return cls(prompts, responses)

    @classmethod
    def with_equal_prompts(cls, seed: int = 0) -> Sequences:
        """Return random tokens, where two prompts have several responses and two have one.

        Token 0 is left out: it pads values and scores, and Hugging Face gives it no gradient.
        """
        distinct = cls.random([(4, 0), (2, 0), (4, 0), (7, 0)], seed)
        responses = cls.random([(1, n) for n in (3, 5, 3, 2, 1, 0, 6, 3, 4)], seed + 1).responses
        owners = (0, 1, 0, 2, 0, 0, 2, 2, 3)
        prompts = [distinct.prompts[owner].clamp(min=1) for owner in owners]
        return cls(prompts, [response.clamp(min=1) for response in responses])

    def __len__(self) -> int:
        return len(self.prompts)
