"""SGLang with tensor parallelism: the first of two ranks hosts it, and the second follows."""

from pathlib import Path

import attrs
import numpy as np
import pytest
import torch

pytest.importorskip("sglang")

from helpers import sglang_jobs as jobs

from hybridflow.backends.sglang.engine import _shares
from hybridflow.kit.testing.engine_base import PROMPTS
from hybridflow.kit.testing.models import reference


@pytest.mark.parametrize(("architecture", "weights"), [("qwen2", "bucket"), ("llama", "group")])
@pytest.mark.timeout(400)
def test_two_ranks_speak_as_hugging_face_after_every_update(ranks, tmp_path, architecture, weights):
    before = {p.name for p in Path("/dev/shm").iterdir()}
    references = [reference(architecture, seed=seed, width=128) for seed in range(5)]
    spec = attrs.evolve(references[0].spec, path=None)
    found = ranks(jobs.speak, 2, spec, [ref.parameters for ref in references], weights, str(tmp_path))
    assert {p.name for p in Path("/dev/shm").iterdir() if "sem." not in p.name} <= before
    assert found[0]["holding"] and not found[1]["holding"]
    for answer in found:
        assert answer["sampled"] == found[0]["sampled"]
        for version, spoken in enumerate(answer["greedy"]):
            ref = references[version]
            for prompt, (ids, logprobs, versions) in zip(PROMPTS, spoken, strict=True):
                assert ids == ref.greedy(np.asarray(prompt), 10)
                assert versions == {version}
                expected = ref.outputs(torch.tensor(prompt), torch.tensor(ids))["logprobs"].detach()
                assert (torch.tensor(logprobs) - expected).abs().max() < 1e-4


def test_cores_are_shared_among_the_ranks():
    assert _shares([0, 1, 2, 3], 2) == "0,1|2,3"
    assert _shares([5], 2) == "5|5"
    assert _shares([0, 1, 2], 2) == "0|1"
