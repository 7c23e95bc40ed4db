"""SGLang against the kit, in a process of its own as always, alone; with tensor parallelism in `make matrix`."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers import engine_jobs as jobs
from helpers.installed import needs
from helpers.kept_engines import KeptOnCPU, kept_engines
from helpers.paths import matrix

from hybridflow.backends.sglang.config import SGLangConfig
from hybridflow.backends.sglang.engine import SGLangEngine, _checked, _shares
from hybridflow.backends.sglang.places import Begin
from hybridflow.core.contracts.rollout import Request, SamplingParams
from hybridflow.core.contracts.worker import RankContext
from hybridflow.core.errors import HybridFlowError, ModelError
from hybridflow.core.values.model import ModelSpec
from hybridflow.core.values.parallel import ParallelLayout
from hybridflow.kit.hosting.hosted import HostedEngine
from hybridflow.kit.testing import tiny_config

SMALL = SGLangConfig(kv_tokens=16384, max_sequences=64)
LAYERS = {0: 2 * (64 * 128 + 2 * 32 * 128 + 128 * 64 + 3 * 32 * 128 + 2 * 128) + 128}
"""Elements of the decoder that a rank of two takes, by hand: hidden size 128, 4 heads and 2 key/value heads of 32, and
48 intermediate units, of which SGLang gives 32 to the first rank on a CPU."""
LAYERS[1] = LAYERS[0] - 2 * 3 * 16 * 128
HELD = {
    # Biases of q, k and v. The vocabulary of 32 is padded to 64: the first rank has it all.
    "qwen2": [LAYERS[0] + 2 * (64 + 2 * 32) + 32 * 128, LAYERS[1] + 2 * (64 + 2 * 32)],
    "llama": [LAYERS[0] + 2 * 32 * 128, LAYERS[1]],
}


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    logs = str(tmp_path_factory.mktemp("logs"))
    with kept_engines(
        lambda spec, context: HostedEngine(SGLangEngine, spec, SMALL, context, logs)
    ) as start:
        yield start


@needs("sglang")
class TestSGLang(KeptOnCPU):
    recomputes = True
    architectures = ("qwen2",)


@matrix
@needs("sglang")
class TestSGLangWithOthers(TestSGLang):
    architectures = ("llama", "qwen3_moe")


@needs("sglang")
@matrix
@pytest.mark.parametrize("architecture", ["qwen2", "llama"])
@pytest.mark.timeout(400)
def test_the_first_of_two_ranks_hosts_it_and_each_brings_its_own_boxes(
    ranks, tmp_path, architecture
):
    before = jobs.without_semaphores()
    found = jobs.two_ranks(ranks, jobs.sglang, architecture, str(tmp_path))
    assert jobs.without_semaphores() <= before
    assert [answer["holding"] for answer in found] == HELD[architecture]
    assert [answer["reachable"] for answer in found] == [[], []]


@pytest.mark.parametrize("kind", ["value", "score"])
def test_a_model_that_is_no_policy_is_refused_before_sglang_is_imported(kind):
    context = RankContext("actor", 0, ParallelLayout(), torch.device("cpu"))
    engine = SGLangEngine(ModelSpec(tiny_config(), None, 0, kind), SMALL, context)
    with pytest.raises(
        ModelError, match=f"generates with a policy; this model is a '{kind}' model"
    ):
        engine.start()


class Told:
    """Notes what is asked of SGLang's memory: a CPU's is not released."""

    def __init__(self):
        self.said: list = []

    def release_memory_occupation(self):
        self.said.append("release")

    def resume_memory_occupation(self, tags):
        self.said.append(tags)


def test_on_a_gpu_weights_wake_before_caches():
    context = RankContext("actor", 0, ParallelLayout(), torch.device("cpu"))
    engine = SGLangEngine(ModelSpec(tiny_config(), None, 0), SMALL, context)
    engine.device, engine.engine = torch.device("cuda"), Told()
    engine.sleep()
    engine.wake(cache=False)
    with pytest.raises(HybridFlowError, match="wake it before generating"):
        engine.add(Request(0, np.array([1]), SamplingParams(max_tokens=1)))
    engine.wake()
    engine.wake()
    assert engine.engine.said == ["release", ["weights"], ["kv_cache", "cuda_graph"]]


def test_cores_are_shared_among_the_ranks():
    assert _shares([0, 1, 2, 3], 2) == "0,1|2,3"
    assert _shares([5], 2) == "5|5"
    assert _shares([0, 1, 2], 2) == "0|1"


def test_what_sglang_says_has_failed_is_an_error_with_its_reason():
    _checked("flush_cache", None)
    _checked("flush_cache", (True, "done"))
    with pytest.raises(HybridFlowError, match="SGLang's flush_cache failed: no such tensor"):
        _checked("flush_cache", (False, "no such tensor"))
    with pytest.raises(HybridFlowError, match="SGLang's flush_cache failed"):
        _checked("flush_cache", False)


# ---- an update, as it is told to SGLang ---------------------------------------------------------


class Server:
    """SGLang's sessions; the first one that is asked for fails."""

    def __init__(self):
        self.said, self.asked = [], 0

    def begin_weight_update(self):
        self.asked += 1
        self.said.append("begin")
        return self.asked > 1

    def end_weight_update(self):
        self.said.append("end")
        return True


class ToldJobs:
    def __init__(self):
        self.jobs = []

    def tell(self, jobs, flush_cache=False):
        self.jobs.append(jobs)


def bare() -> SGLangEngine:
    """An engine without SGLang."""
    context = RankContext("actor", 0, ParallelLayout(), torch.device("cpu"))
    engine = SGLangEngine(ModelSpec(tiny_config(), None, 0), SMALL, context)
    engine.engine, engine.schedulers = Server(), ToldJobs()
    return engine


def test_an_update_whose_session_did_not_open_opens_one_when_it_is_begun_again():
    engine = bare()
    with pytest.raises(HybridFlowError, match="begin_weight_update failed"):
        engine.begin_update(1)
    engine.begin_update(1)
    assert engine.engine.said == ["begin", "begin"]
    assert engine.schedulers.jobs == [[Begin(1)]]
    # One that was only not ended has its session.
    engine.begin_update(1)
    assert engine.engine.said == ["begin", "begin"]
    assert engine.schedulers.jobs[1:] == [[Begin(1)]]


def test_an_answer_without_spans_is_of_the_version_that_it_began_with():
    engine = bare()
    engine.version = 7
    request = Request(0, np.array([1]), SamplingParams(max_tokens=3))
    about = {
        "finish_reason": {"type": "length"},
        "output_token_logprobs": [(-0.5, 4, None), (-0.25, 5, None), (-1.0, 6, None)],
    }
    assert engine._read(request, {"meta_info": about}, 5).weight_version.tolist() == [5, 5, 5]
    about["weight_versions"] = [{"start": 1, "end": 3, "version": "6"}]
    assert engine._read(request, {"meta_info": about}, 5).weight_version.tolist() == [5, 6, 6]
