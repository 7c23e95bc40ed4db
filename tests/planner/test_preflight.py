"""The memory of whole jobs on devices of 80 GB, as a run asks for it."""

from __future__ import annotations

from pathlib import Path

import attrs
import pytest

from hybridflow.cli.plan import unplaced_jobs
from hybridflow.core.contracts.planner import DeviceMemory, NotPlanned
from hybridflow.core.errors import ConfigError
from hybridflow.core.running.preflight import preflight
from hybridflow.planner.preflight import job_memory
from hybridflow.settle.launch import load_config

GPU_GRPO = Path(__file__).resolve().parents[2] / "examples" / "gpu_grpo.toml"
WIDE = ["actor.backend.precision=fp32", "rollout.dtype=float32"]
WHOLE = ["actor.backend.activation_checkpointing=false"]
H100 = {"main": DeviceMemory(total=80e9, free=79e9)}


def gpu_grpo(*overrides):
    [[job], _] = unplaced_jobs(GPU_GRPO, list(overrides))
    return job


def test_float32_without_recomputation_is_refused_with_the_remedy():
    """28 layers keep 195 kB a token of 16,384 tokens, 89.2 GB: measured, in findings of its source."""
    said: list[str] = []
    with pytest.raises(ConfigError, match=r"and 72\.00 GB are usable") as caught:
        preflight(gpu_grpo(*WIDE, *WHOLE), H100, said.append)
    [memory] = job_memory(gpu_grpo(*WIDE, *WHOLE), H100)
    parts = dict(memory.parts)
    assert parts["activations and logits"] == pytest.approx(28 * 195e3 * 16384, rel=0.02)
    assert parts["actor's weights and optimizer"] == pytest.approx(1.544e9 * 12, rel=0.01)
    assert memory.refused and memory.remedies

    # With its remedy it runs.
    assert ", ".join(memory.remedies) in str(caught.value)
    lines = [line.replace(" = ", "=") for line in memory.remedies]
    [mended] = job_memory(gpu_grpo(*WIDE, *WHOLE, *lines), H100)
    assert mended.fits


def test_bfloat16_without_recomputation_is_warned_of_with_the_sum():
    """103 kB a token and layer are 47.3 GB."""
    said: list[str] = []
    job = gpu_grpo(*WHOLE)
    assert preflight(job, H100, said.append) is not None
    [line] = said
    assert line.startswith("warning: memory: pool main: it needs 7")
    [memory] = job_memory(job, H100)
    kept = dict(memory.parts)["activations and logits"]
    assert kept == pytest.approx(28 * 103e3 * 16384, rel=0.05)
    assert not memory.fits and not memory.refused


def test_as_it_is_it_is_accepted_and_the_cache_gets_what_training_leaves():
    said: list[str] = []
    job = gpu_grpo()
    within, _ = preflight(job, H100, said.append)
    assert said[0].startswith("memory: pool main holds at most ")
    [memory] = job_memory(job, H100)
    option = memory.rooms["actor"]
    cache = within.models["actor"].spec.engine_config.kv_memory_gb
    assert cache == pytest.approx(option.cache / 1e9)

    # What is there while it trains, with a cache that large, is what is usable.
    [full] = job_memory(within, H100)
    training = 72e9 - option.share
    weights = option.share - option.cache
    assert full.fits and training + weights + option.cache == pytest.approx(72e9)
    assert 30 < cache < 45


def test_what_others_have_taken_is_not_usable():
    half = {"main": DeviceMemory(total=80e9, free=31e9)}
    [memory] = job_memory(gpu_grpo(), half)
    assert memory.usable == 31e9 and not memory.fits
    lines = [line.replace(" = ", "=") for line in memory.remedies]
    [mended] = job_memory(gpu_grpo(*lines), half)
    assert lines and mended.fits


def test_a_device_without_anything_free_is_too_small_and_no_error():
    full = {"main": DeviceMemory(total=80e9, free=0.0)}
    [memory] = job_memory(gpu_grpo(), full)
    assert memory.refused and memory.usable < 1e6


def test_a_pool_is_mended_on_its_own_devices(tmp_path):
    """The actor lacks memory, and the reference's pool has plenty of it."""
    apart = ["pools={ main = [1], side = [1] }", "ref.pool=side", "algorithm.kl_coef=0.1"]
    [[job], _] = unplaced_jobs(GPU_GRPO, [*apart, "runtime=ray"])
    devices = {
        "main": DeviceMemory(total=80e9, free=31e9),
        "side": DeviceMemory(total=80e9, free=79e9),
    }
    actor, reference = job_memory(job, devices)
    assert reference.fits and not actor.fits
    lines = [line.replace(" = ", "=") for line in actor.remedies]
    [[job], _] = unplaced_jobs(GPU_GRPO, [*apart, "runtime=ray", *lines])
    assert lines and all(memory.fits for memory in job_memory(job, devices))


def test_engines_in_a_pool_of_their_own_are_summed_there(tmp_path):
    apart = [
        "pools={ main = [1], rollout = [1] }",
        "actor.generation.pool=rollout",
        "runtime=ray",
        "run.device=cpu",
    ]
    [job] = load_config(GPU_GRPO, apart)
    devices = dict.fromkeys(("main", "rollout"), DeviceMemory(total=80e9, free=79e9))
    trains, generates = job_memory(job, devices)
    assert (trains.when, generates.when) == ("while actor trains", "while actor generates")
    assert "engines" not in dict(trains.parts)
    assert dict(generates.parts)["the engine's weights"] == pytest.approx(1.544e9 * 2, rel=0.01)
    assert trains.rooms == {} and set(generates.rooms) == {"actor"}

    # Beside another model the engine stays: nothing puts it to sleep there.
    [job] = load_config(GPU_GRPO, [*apart, "algorithm.kl_coef=0.1", "ref.pool=rollout"])
    _, shared = job_memory(job, devices)
    reads = shared.phases["while ref reads"] - shared.phases["at rest"]
    assert shared.phases["at rest"] > dict(generates.parts)["the engine's weights"]
    assert reads > 0


def test_context_parallelism_is_not_planned():
    job = gpu_grpo()
    layout = job.models["actor"].layout
    cut = attrs.evolve(layout, cp=2)
    job.models["actor"] = attrs.evolve(job.models["actor"], layout=cut)
    with pytest.raises(NotPlanned, match="context and expert parallelism"):
        job_memory(job, H100)


def test_an_engines_context_on_a_gpu_is_that_of_the_longest_prompt_and_response():
    [[job], _] = unplaced_jobs(GPU_GRPO.parent / "plans" / "7b_grpo.toml", [])
    assert job.models["actor"].spec.engine_config.max_length == 1024 + 3072
    endless = ["data.max_prompt_tokens=0"]
    [[job], _] = unplaced_jobs(GPU_GRPO.parent / "plans" / "7b_grpo.toml", endless)
    assert job.models["actor"].spec.engine_config.max_length == 0
    longer = ["validation.data.max_prompt_tokens=2000"]
    [[job], _] = unplaced_jobs(GPU_GRPO.parent / "plans" / "7b_grpo.toml", longer)
    assert job.models["actor"].spec.engine_config.max_length == 2000 + 3072
