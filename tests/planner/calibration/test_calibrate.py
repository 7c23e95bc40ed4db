"""The fit finds what made the times, and two devices are measured with their link."""

from __future__ import annotations

import attrs
import numpy as np
import pytest
from helpers.paths import matrix
from helpers.planned import engines, laid_out, planned

from hybridflow.kit.huggingface.shapes import llama_shape
from hybridflow.planner import PlannedModel
from hybridflow.planner.calibration import calibrate
from hybridflow.planner.calibration.calibrate import START, Probed, fit, probing_job
from hybridflow.planner.calibration.machine import MachineFigures
from hybridflow.planner.calibration.probes import VERBS, Sample
from hybridflow.planner.cluster import DEVICES, Device, Efficiency, Nodes

NODES = Nodes(Device(12, 0.16, 12, 1.4, name="laptop"), 1, 2, 25.0)
TRUE = Efficiency(
    training=0.7, inference=0.6, memory=0.45, optimizer=0.3, link=0.35, link_latency_us=200.0, decode_layer_us=90.0,
    decode_step_us=700.0, decode_tp_layer_us=900.0, sequence_us=40.0, micro_batch_us=1100.0, tp_layer_us=4000.0,
    activation_passes=25.0, logit_passes=6.0, update_ms=9.0, call_ms=7.0, sync_ms=12.0,
)  # fmt: skip
"""What made the times of the tests."""


def model(hidden: int, layers: int, vocab: int) -> PlannedModel:
    shape = llama_shape(hidden, layers, hidden // 64, 2, 64, hidden * 3, vocab)
    return planned(
        f"h{hidden}", shape, trained=True, sharding="fsdp", weight_bytes=4, optimizer_bytes=8, compute_bytes=4, rollout_bytes=4,
        micro_batch_tokens=512, whole_below=10_000_000,
    )  # fmt: skip


def probed(models, lengths) -> list[Probed]:
    """Samples whose times the simulators themselves made, with TRUE."""
    truly, found = attrs.evolve(NODES, efficiency=TRUE), []
    for tp in (1, 2):
        for of in models:
            for verb in VERBS:
                for length in lengths:
                    one = Probed(
                        Sample(of.name, verb, *length, 1.0),
                        of,
                        laid_out(1, tp, 2 // tp),
                        engines(2, 1, tp),
                    )
                    found.append(
                        attrs.evolve(
                            one, sample=attrs.evolve(one.sample, seconds=one.predicted(truly))
                        )
                    )
    return found


def test_the_fit_explains_times_that_have_an_explanation():
    seen = probed(
        [model(128, 3, 64), model(512, 2, 4096), model(256, 8, 512)], calibrate.LENGTHS["cpu"]
    )
    start = attrs.evolve(
        NODES, efficiency=Efficiency(**START, link_latency_us=TRUE.link_latency_us)
    )
    found = attrs.evolve(start, efficiency=fit(seen, start))
    off = [p.predicted(found) / p.sample.seconds - 1 for p in seen]
    assert np.abs(off).max() < 0.02
    unseen = probed(
        [model(384, 10, 8192), model(128, 4, 16)], [(64, 8, 8), (16, 64, 64)]
    )  # and others like them
    assert np.abs([p.predicted(found) / p.sample.seconds - 1 for p in unseen]).max() < 0.05


def test_the_fit_bears_a_disturbed_sample():
    seen = probed(
        [model(128, 3, 64), model(512, 2, 4096), model(256, 8, 512)], calibrate.LENGTHS["cpu"]
    )
    seen[5] = attrs.evolve(
        seen[5], sample=attrs.evolve(seen[5].sample, seconds=seen[5].sample.seconds * 4)
    )
    start = attrs.evolve(
        NODES, efficiency=Efficiency(**START, link_latency_us=TRUE.link_latency_us)
    )
    found = attrs.evolve(start, efficiency=fit(seen, start))
    off = np.delete([abs(p.predicted(found) / p.sample.seconds - 1) for p in seen], 5)
    assert off.mean() < 0.03 and off.max() < 0.25


def test_what_no_sample_shows_keeps_its_default():
    alone = [
        p
        for p in probed([model(128, 3, 64), model(256, 8, 512)], calibrate.LENGTHS["cpu"])
        if p.layout.tp == 1
    ]
    start = attrs.evolve(NODES, efficiency=Efficiency(**START))
    found = fit(alone, start)
    assert (found.tp_layer_us, found.decode_tp_layer_us) == (0.0, 0.0)
    assert found.update_ms == pytest.approx(TRUE.update_ms, rel=0.3)


@matrix
@pytest.mark.usefixtures("quick", "ray_cluster")
def test_two_devices_are_measured_with_their_link_and_tensor_parallelism(tmp_path):
    found = calibrate.calibrate({"run": {"device": "cpu"}}, 2)
    assert {(p.layout.pp, p.layout.tp, p.layout.dp) for p in found.probed} == {(1, 1, 2), (1, 2, 1)}
    assert {(p.engines.pp, p.engines.tp) for p in found.probed} == {(1, 1), (1, 2)}
    assert {p.sample.verb for p in found.probed} == set(VERBS)
    assert found.nodes.efficiency.link_latency_us > 1.0 and found.nodes.device.link_gbs > 0.01
    assert all(0 < p.sample.seconds < 60 for p in found.probed)


def test_every_cut_has_models_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setattr(
        calibrate, "_cuts", lambda *_: [(1, 1), (1, 2)]
    )  # a backend without tp, an engine with it
    models = probing_job({"run": {"device": "cpu"}}, 2, str(tmp_path)).models
    assert len(models) == 6 and {m.generation.tp for m in models.values()} == {1, 2}


def test_the_models_are_cut_as_the_backend_and_the_engine_can(tmp_path):
    every = probing_job({"run": {"device": "cpu"}}, 2, str(tmp_path))
    assert {(m.layout.tp, m.generation.tp) for m in every.models.values()} == {(1, 1), (2, 2)}
    bf16 = probing_job(
        {"run": {"device": "cpu"}, "actor": {"backend": {"name": "fsdp", "precision": "bf16"}}},
        2,
        str(tmp_path),
    )
    assert all(m.spec.backend_config.precision == "bf16" for m in bf16.models.values())
    assert {
        len(probing_job({"run": {"device": "cpu"}}, n, str(tmp_path)).models) for n in (1, 3)
    } == {3}


def test_an_unknown_device_is_described_by_its_slowest_rank():
    fast = MachineFigures("Some CPU @ 3GHz", 16e9, 2e11, 3e10, link_rate=4e9)
    slow = MachineFigures("Some CPU @ 3GHz", 12e9, 1e11, 2e10, link_rate=5e9)
    expected = Device(12, 0.1, 20, 4, host_gbs=20, name="some-cpu-3ghz")
    assert calibrate.described([fast, slow], "cpu", None) == expected
    alone = attrs.evolve(slow, link_rate=None)  # its own memory stands for the link
    assert calibrate.described([alone], "cpu", "mine") == attrs.evolve(
        expected, link_gbs=20, name="mine"
    )


def test_a_known_device_keeps_its_data_sheet_and_the_memory_that_is_there():
    known = MachineFigures("NVIDIA A100-SXM4-80GB", 79e9, 2e14, 1.5e12, link_rate=1e11)
    assert calibrate.described([known], "cuda", None) == attrs.evolve(
        DEVICES["a100-80gb"], memory_gb=79
    )
