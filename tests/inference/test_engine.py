"""One engine in this process: its weights are the model's."""

from __future__ import annotations

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from hybridflow.core.contracts.rollout import Request, SamplingParams
from hybridflow.inference.engine import started
from hybridflow.inference.job import on_one_device, resolve, with_overrides
from hybridflow.inference.models import find_model


def test_it_generates_what_transformers_does(sums, tmp_path):
    found = find_model(str(sums))
    job = resolve(with_overrides(on_one_device(found, tmp_path), [], found))
    prompt = np.array([1, 4, 5, 14])
    with started(job) as engine:
        [done] = engine.generate(
            [Request(0, prompt, SamplingParams(max_tokens=6, temperature=0.0))]
        )
    model = AutoModelForCausalLM.from_pretrained(sums / "export/actor")
    expected = model.generate(
        torch.from_numpy(prompt)[None], max_new_tokens=6, do_sample=False, eos_token_id=None
    )
    assert done.response_ids.tolist() == expected[0, len(prompt) :].tolist()


def test_an_own_step_has_other_weights(sums, tmp_path):
    logprobs = []
    for step in (2, 4):
        found = find_model(str(sums), step=step)
        job = resolve(with_overrides(on_one_device(found, tmp_path), [], found))
        request = Request(0, np.array([1, 4, 5]), SamplingParams(max_tokens=1, temperature=0.0))
        with started(job) as engine:
            logprobs.append(float(engine.generate([request])[0].logprobs[0]))
    assert logprobs[0] != logprobs[1]
