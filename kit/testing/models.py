"""Tiny Hugging Face models with weights that make mistakes visible, and what they compute, as the reference."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np
import torch

from hybridflow.core.job.models import resolve_model
from hybridflow.core.values.model import ModelConfig, ModelSpec

VOCAB = 32
SIZES = dict(
    vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    intermediate_size=48, max_position_embeddings=128, bos_token_id=None, eos_token_id=None, pad_token_id=None,
)  # fmt: skip
ARCHITECTURES = {"qwen2": dict(tie_word_embeddings=True), "llama": dict(tie_word_embeddings=False)}
"""qwen2 with tied embeddings and biases, llama without either."""


def tiny_config(architecture: str = "qwen2", width: int = 32) -> dict[str, Any]:
    """Fields of a Hugging Face config: two layers, 4 heads that share 2 keys and values, 32 tokens."""
    return {
        "model_type": architecture,
        **SIZES,
        **ARCHITECTURES[architecture],
        "hidden_size": width,
    }


@attrs.frozen(eq=False)
class Reference:
    """A Hugging Face model in float32, saved in a folder; `spec` names that folder."""

    spec: ModelSpec
    model: Any
    parameters: dict[str, torch.Tensor]
    """By canonical name: those of the folder's safetensors."""
    _folder: Any

    def logits(self, ids: torch.Tensor) -> torch.Tensor:
        """[T, V] for one sequence [T]."""
        return self.model(input_ids=ids[None], use_cache=False).logits[0].float()

    def outputs(
        self,
        prompt: torch.Tensor,
        response: torch.Tensor,
        temperature: float = 1.0,
        topk_ids: torch.Tensor | None = None,
    ) -> dict[str, torch.Tensor]:
        """Of one sequence, aligned to response tokens: logprobs, entropy [T] and topk_logprobs [T, K]; or values [T]
        and scores []. With a graph where gradients are on."""
        ids = torch.cat([prompt, response])
        before = slice(len(prompt) - 1, len(ids) - 1)
        if self.spec.kind != "policy":
            per_token = self.model.score(
                self.model.base_model(input_ids=ids[None]).last_hidden_state
            )[0, :, 0].float()
            return {"values": per_token[before], "scores": per_token[-1]}
        log_p = (self.logits(ids)[before] / temperature).log_softmax(-1)
        found = {
            "logprobs": log_p.gather(-1, response[:, None])[:, 0],
            "entropy": -(log_p.exp() * log_p).sum(-1),
            "log_softmax": log_p,
        }
        return found if topk_ids is None else found | {"topk_logprobs": log_p.gather(-1, topk_ids)}

    def greedy(self, prompt: np.ndarray, tokens: int) -> list[int]:
        """What Hugging Face's generate gives."""
        ids = torch.as_tensor(prompt)[None]
        with torch.no_grad():
            out = self.model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False
            )
        return out[0, ids.shape[1] :].tolist()


@functools.cache
def reference(
    architecture: str = "qwen2", kind: str = "policy", seed: int = 0, width: int = 32
) -> Reference:
    """Made once per process. Weights are large enough that distributions are far from uniform and every bias, norm and
    position matters."""
    from safetensors.torch import load_file
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

    fields = tiny_config(architecture, width)
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    config._attn_implementation = "eager"
    auto: Any = AutoModelForCausalLM
    if kind != "policy":
        auto, config.num_labels, config.pad_token_id = AutoModelForSequenceClassification, 1, 0
    model = auto.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(1000 + seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(
                0.3 * (32 / width) ** 0.5 * noise
                if parameter.dim() > 1
                else parameter + 0.2 * noise
            )
    folder = tempfile.TemporaryDirectory(prefix="hybridflow-reference-")
    model.save_pretrained(folder.name)
    spec = resolve_model(ModelConfig(path=folder.name), kind, "conformance")
    return Reference(spec, model, load_file(f"{folder.name}/model.safetensors"), folder)


@attrs.frozen(eq=False)
class Sequences:
    """Ragged prompts and responses, int64 tensors, one of each per row."""

    prompts: list[torch.Tensor]
    responses: list[torch.Tensor]

    @classmethod
    def random(cls, lengths: Sequence[tuple[int, int]], seed: int = 0) -> Sequences:
        """`lengths`: (prompt, response) per row."""
        generator = torch.Generator().manual_seed(seed)

        def draw(n: int) -> torch.Tensor:
            return torch.randint(0, VOCAB, (n,), generator=generator)

        return cls([draw(p) for p, _ in lengths], [draw(r) for _, r in lengths])

    def __len__(self) -> int:
        return len(self.prompts)
