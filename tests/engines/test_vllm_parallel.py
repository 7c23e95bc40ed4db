"""vLLM with tensor parallelism on two ranks of a gloo group."""

import attrs
import numpy as np
import pytest
import torch

pytest.importorskip("vllm")

from helpers import vllm_jobs as jobs

from hybridflow.kit.testing.engine_base import PROMPTS
from hybridflow.kit.testing.models import reference


@pytest.mark.parametrize("architecture", ["qwen2", "llama"])
def test_two_ranks_speak_as_hugging_face_after_every_update(ranks, architecture):
    references = [reference(architecture, seed=seed, width=128) for seed in range(5)]
    spec = attrs.evolve(references[0].spec, path=None)
    found = ranks(jobs.speak, 2, spec, [ref.parameters for ref in references])
    for answer in found:
        assert answer["left"] == []
        assert answer["sampled"] == found[0]["sampled"]
        for version, spoken in enumerate(answer["greedy"]):
            ref = references[version]
            for prompt, (ids, logprobs, versions) in zip(PROMPTS, spoken, strict=True):
                assert ids == ref.greedy(np.asarray(prompt), 10)
                assert versions == {version}
                expected = ref.outputs(torch.tensor(prompt), torch.tensor(ids))["logprobs"].detach()
                assert (torch.tensor(logprobs) - expected).abs().max() < 1e-4
