"""What a run says of its memory before anything is built, for each answer that a planner may give."""

from __future__ import annotations

import attrs
import pytest
from helpers.jobs import job_of

import hybridflow.core.running.preflight as module
from hybridflow.core.contracts.footprint import EngineRoom
from hybridflow.core.contracts.planner import DeviceMemory, NotPlanned, PoolMemory
from hybridflow.core.errors import ConfigError
from hybridflow.core.running.preflight import devices_of, preflight, torch_allocates
from hybridflow.core.workers.device_memory import RankMemory

DEVICES = {"main": DeviceMemory(total=80e9, free=79e9)}
ROOM = EngineRoom(device=80e9, share=30e9, cache=20e9)


class Answers:
    """Stands in for a planner."""

    def __init__(self, answer):
        self.answer = answer

    def memory(self, job, devices):
        assert devices is DEVICES
        if isinstance(self.answer, Exception):
            raise self.answer
        return [self.answer]


def pool(needed, **more):
    parts = (("actor's weights", needed - 1e9), ("activations", 1e9))
    return PoolMemory(
        pool="main", needed=needed, usable=72e9, when="while actor trains", parts=parts, **more
    )


def asked(monkeypatch, tmp_path, answer, device="cuda"):
    """(the job afterwards, what was said)"""
    monkeypatch.setattr(module, "build_planner", lambda name, config: Answers(answer))
    job = attrs.evolve(job_of(tmp_path), device=device)
    said: list[str] = []
    return preflight(job, DEVICES, said.append)[0], said


def cache_of(job):
    return job.models["actor"].spec.engine_config.kv_memory_gb


def test_what_fits_is_said_and_engines_get_what_the_models_leave(monkeypatch, tmp_path):
    job, said = asked(monkeypatch, tmp_path, pool(60e9, rooms={"actor": ROOM}))
    pool_line, engine_line = said
    assert "60.00 GB per device, while actor trains, of 72.00 GB" in pool_line
    assert "actor's engine may take 30.00 GB of each device, 20.00 GB" in engine_line
    assert cache_of(job) == 20.0


@pytest.mark.parametrize(("cache", "refused"), [(19.0, False), (20.0, False), (21.0, True)])
def test_a_job_that_repeats_its_bits_has_caches_of_the_stated_size(
    monkeypatch, tmp_path, cache, refused
):
    """Which sequences are decoded together would depend on what other programs leave free."""
    answer = Answers(pool(60e9, rooms={"actor": ROOM}))
    monkeypatch.setattr(module, "build_planner", lambda name, config: answer)
    job = attrs.evolve(job_of(tmp_path, run={"deterministic": True}), device="cuda")
    actor = job.models["actor"]
    stated = attrs.evolve(actor.spec.engine_config, kv_memory_gb=cache)
    placed = attrs.evolve(actor, spec=attrs.evolve(actor.spec, engine_config=stated))
    job = attrs.evolve(job, models={"actor": placed})
    if not refused:
        assert cache_of(preflight(job, DEVICES, lambda line: None)[0]) == cache
        return
    with pytest.raises(
        ConfigError, match=r"actor's engine asks for more .* 20.00 GB for its cache"
    ):
        preflight(job, DEVICES, lambda line: None)


def test_on_cpus_engines_stay_as_they_are(monkeypatch, tmp_path):
    job, said = asked(monkeypatch, tmp_path, pool(60e9, rooms={"actor": ROOM}), device="cpu")
    assert len(said) == 1
    assert cache_of(job) == 0.0


def test_a_job_that_needs_little_more_than_there_is_is_warned_of(monkeypatch, tmp_path):
    answer = pool(80e9, remedies=("actor.offload = true",), rooms={"actor": ROOM})
    job, [said] = asked(monkeypatch, tmp_path, answer)
    assert "80.00 GB per device while actor trains (actor's weights 79.00 GB + act" in said
    assert "72.00 GB are usable: 11% too much; it fits with actor.offload = true" in said
    assert cache_of(job) == 0.0  # nothing is left to divide


def test_a_job_that_needs_far_more_than_there_is_is_refused(monkeypatch, tmp_path):
    with pytest.raises(ConfigError) as caught:
        asked(monkeypatch, tmp_path, pool(90e9))
    assert "25% too much; smaller micro_batch_tokens" in str(caught.value)
    assert 'run.preflight = "off" tries it all the same' in str(caught.value)


def test_on_cpus_it_is_only_warned_of(monkeypatch, tmp_path):
    _, [said] = asked(monkeypatch, tmp_path, pool(900e9), device="cpu")
    assert said.startswith("warning: memory: pool main: it needs 900.00 GB")


def test_that_nothing_was_checked_is_said(monkeypatch, tmp_path):
    _, said = asked(monkeypatch, tmp_path, NotPlanned("its shape is unknown"))
    assert said == ["memory: not checked: its shape is unknown"]
    _, said = asked(monkeypatch, tmp_path, ConfigError("no such cluster"))
    assert "no such cluster" in said[0]
    job = attrs.evolve(job_of(tmp_path), planner="")
    said = []
    assert preflight(job, DEVICES, said.append)[0] is job
    assert said == ["memory: not checked, as no planner is installed"]


def test_ranks_of_a_node_share_its_memory_and_the_least_counts():
    host = [RankMemory("a", 64, 48, shared=True)] * 3
    other = [RankMemory("b", 64, 16, shared=True)]
    found = {"main": [*host, *other], "rollout": [host[0]], "unknown": [None]}
    devices = devices_of(found)
    assert devices["main"] == DeviceMemory(total=16.0, free=12.0)  # of node a, four ranks
    assert devices["rollout"] == DeviceMemory(total=16.0, free=12.0)
    assert set(devices) == {"main", "rollout"}
    own = [RankMemory("a", 80, 70, shared=False), RankMemory("a", 80, 60, shared=False)]
    assert devices_of({"main": own})["main"] == DeviceMemory(total=80, free=60)


def test_memory_is_torchs_where_no_other_library_moves_it_and_no_other_process_reads_it(tmp_path):
    job = job_of(tmp_path)
    assert torch_allocates(job, "main")
    actor = job.models["actor"]
    own = attrs.evolve(actor.spec.engine_config, own_process=True)
    apart = attrs.evolve(actor, rollout_pool="rollout")
    hosted = attrs.evolve(actor, spec=attrs.evolve(actor.spec, engine_config=own))
    for placed in (apart, hosted):
        assert not torch_allocates(attrs.evolve(job, models={"actor": placed}), "main")


@attrs.frozen
class Foreign:
    """Settings of an engine that say nothing of what it takes."""

    beams: int = 5


def test_settings_that_say_nothing_of_themselves_stay(monkeypatch, tmp_path):
    monkeypatch.setattr(
        module, "build_planner", lambda name, config: Answers(pool(60e9, rooms={"actor": ROOM}))
    )
    job = attrs.evolve(job_of(tmp_path), device="cuda")
    actor = job.models["actor"]
    spec = attrs.evolve(actor.spec, engine_config=Foreign(7))
    job = attrs.evolve(job, models={"actor": attrs.evolve(actor, spec=spec)})
    after, _ = preflight(job, DEVICES, lambda line: None)
    assert after.models["actor"].spec.engine_config == Foreign(7)


def test_whatever_a_plugin_raises_ends_no_run(monkeypatch, tmp_path):
    _, said = asked(monkeypatch, tmp_path, TypeError("limits() takes 1 positional argument"))
    assert said == ["memory: not checked: TypeError: limits() takes 1 positional argument"]
