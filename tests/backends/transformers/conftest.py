"""Tiny models of random weights with peaked logits, and an engine that holds the same weights."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hybridflow.backends.transformers.config import TransformersEngineConfig
from hybridflow.backends.transformers.engine import TransformersEngine
from hybridflow.core.contracts.rollout import Request, SamplingParams
from hybridflow.core.values.model import ModelSpec
from hybridflow.core.values.weights import Box

LLAMA_LIKE = dict(
    vocab_size=48,
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=96,
    max_position_embeddings=256,
    initializer_range=0.2,
    tie_word_embeddings=False,
)
GPT2 = dict(vocab_size=48, n_embd=64, n_layer=2, n_head=4, n_positions=256, initializer_range=0.2)


class Tiny:
    """`model` is Hugging Face's, `engine` ours, both with the weights of `seed`."""

    def __init__(self, model_type="qwen2", seed=0, hf=None, **config):
        base = (
            GPT2 | dict(bos_token_id=None, eos_token_id=None)
            if model_type == "gpt2"
            else LLAMA_LIKE
        )
        self.fields = {"model_type": model_type, **base, **(hf or {})}
        self.model = self.random_model(seed)
        self.config = TransformersEngineConfig(**config)
        self.engine = self.bare_engine()
        self.update(1)

    def random_model(self, seed):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**self.fields)).eval()
        for name, value in model.named_parameters():
            if value.ndim == 1:  # norms and biases that are not all ones and zeros
                torch.nn.init.normal_(
                    value, float("norm" in name or "ln_" in name) * name.endswith("weight"), 0.1
                )
        return model

    def bare_engine(self):
        spec = ModelSpec(self.fields, None, 0)
        engine = TransformersEngine(spec, self.config, SimpleNamespace(device=torch.device("cpu")))
        engine.start()
        return engine

    def update(self, version, model=None, names=None):
        weights, layout = (model or self.model).state_dict(), self.engine.layout()
        self.engine.begin_update(version)
        for name in layout.params if names is None else names:
            self.engine.receive(name, Box.full(layout.params[name].shape), weights[name])
        self.engine.end_update()

    @torch.no_grad()
    def hf_greedy(self, prompt, tokens):
        ids = torch.from_numpy(prompt)[None]
        out = self.model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        return out[0, len(prompt) :].numpy()

    @torch.no_grad()
    def hf_logprobs(self, prompt, response, temperature=1.0, model=None):
        """Teacher forced, float32 [T, V]."""
        ids = torch.from_numpy(np.concatenate([prompt, response]))[None]
        logits = (model or self.model)(ids).logits[0, len(prompt) - 1 : -1].float()
        return (logits / temperature).log_softmax(-1).numpy()


@pytest.fixture(scope="session")
def tiny():
    """tiny(model_type, ...) -> Tiny, made once for each set of arguments."""
    made = {}

    def get(model_type="qwen2", hf=None, fresh=False, **config):
        key = repr((model_type, hf, config))
        if fresh:
            return Tiny(model_type, hf=hf, **config)
        if key not in made:
            made[key] = Tiny(model_type, hf=hf, **config)
        return made[key]

    return get


@pytest.fixture
def case(tiny, request):
    """A Tiny of its own, of the model type that a test is parametrized with."""
    return tiny(request.param, fresh=True)


@pytest.fixture
def prompts():
    """Twelve prompts of 1 to 23 tokens."""
    draw = np.random.default_rng(3)
    return [draw.integers(0, 48, size=n) for n in (1, 7, 3, 23, 12, 5, 2, 9, 16, 4, 6, 11)]


@pytest.fixture
def requests_of():
    """requests_of(prompts, seeds=..., **sampling) -> one request for each prompt, ids from 0."""

    def make(prompts, seeds=None, first_id=0, **sampling):
        params = SamplingParams(**sampling)
        seeds = range(100, 100 + len(prompts)) if seeds is None else seeds
        return [
            Request(first_id + i, p, params, seed=s)
            for i, (p, s) in enumerate(zip(prompts, seeds, strict=True))
        ]

    return make
