"""`hybridflow calibrate`: the fit finds what made the times, a machine is measured, its file is read back; and messages."""

from __future__ import annotations

import builtins
import io
import json
import re

import attrs
import numpy as np
import pytest
from helpers.configs import OWN_CLUSTER as OWN
from helpers.planned import engines, laid_out, planned
from rich.console import Console

from hybridflow.cli.plan import plan
from hybridflow.core.errors import ConfigError
from hybridflow.core.launch import run
from hybridflow.kit.huggingface.shapes import llama_shape
from hybridflow.kit.testing.runs import MODEL
from hybridflow.planner import PlannedModel
from hybridflow.planner.calibration import calibrate, command
from hybridflow.planner.calibration.calibrate import START, Probed, fit, probing_job
from hybridflow.planner.calibration.probes import VERBS, Sample
from hybridflow.planner.cluster import Cluster, Device, Efficiency, Nodes, RunsOn, device_called

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
                    one = Probed(Sample(of.name, verb, *length, 1.0), of, laid_out(1, tp, 2 // tp), engines(2, 1, tp))
                    found.append(attrs.evolve(one, sample=attrs.evolve(one.sample, seconds=one.predicted(truly))))
    return found


def test_the_fit_explains_times_that_have_an_explanation():
    seen = probed([model(128, 3, 64), model(512, 2, 4096), model(256, 8, 512)], calibrate.LENGTHS["cpu"])
    start = attrs.evolve(NODES, efficiency=Efficiency(**START, link_latency_us=TRUE.link_latency_us))
    found = attrs.evolve(start, efficiency=fit(seen, start))
    off = [p.predicted(found) / p.sample.seconds - 1 for p in seen]
    assert np.abs(off).max() < 0.02
    unseen = probed([model(384, 10, 8192), model(128, 4, 16)], [(64, 8, 8), (16, 64, 64)])  # and others like them
    assert np.abs([p.predicted(found) / p.sample.seconds - 1 for p in unseen]).max() < 0.05


def test_the_fit_bears_a_disturbed_sample():
    seen = probed([model(128, 3, 64), model(512, 2, 4096), model(256, 8, 512)], calibrate.LENGTHS["cpu"])
    seen[5] = attrs.evolve(seen[5], sample=attrs.evolve(seen[5].sample, seconds=seen[5].sample.seconds * 4))
    start = attrs.evolve(NODES, efficiency=Efficiency(**START, link_latency_us=TRUE.link_latency_us))
    found = attrs.evolve(start, efficiency=fit(seen, start))
    off = np.delete([abs(p.predicted(found) / p.sample.seconds - 1) for p in seen], 5)
    assert off.mean() < 0.03 and off.max() < 0.25


def test_what_no_sample_shows_keeps_its_default():
    alone = [p for p in probed([model(128, 3, 64), model(256, 8, 512)], calibrate.LENGTHS["cpu"]) if p.layout.tp == 1]
    start = attrs.evolve(NODES, efficiency=Efficiency(**START))
    found = fit(alone, start)
    assert (found.tp_layer_us, found.decode_tp_layer_us) == (0.0, 0.0)
    assert found.update_ms == pytest.approx(TRUE.update_ms, rel=0.3)


@pytest.fixture
def quick(monkeypatch):
    """Smaller models and fewer calls."""
    monkeypatch.setitem(calibrate.SHAPES, "cpu", {"small": (128, 2, 64), "deep": (256, 2, 64)})
    monkeypatch.setitem(calibrate.LENGTHS, "cpu", ((2, 4, 4), (8, 8, 8)))


def calibrated(*arguments, **options) -> str:
    out = io.StringIO()
    command.run_calibrate(*arguments, **options, console=Console(file=out, width=200, highlight=False, markup=False))
    return out.getvalue()


@pytest.mark.usefixtures("quick")
def test_a_machine_is_measured_and_its_file_is_planned_on(tmp_path):
    target, config = tmp_path / "here.toml", tmp_path / "tiny.toml"
    text = calibrated(None, write=str(target), name="mine")
    for said in ("measuring the machine", "inference", "training", "generation", "TFLOP/s", f"written: {target}"):
        assert said in text
    cluster = Cluster.read(target)
    [nodes] = cluster.nodes
    assert (nodes.device.name, nodes.count, nodes.per_node) == ("mine", 1, 1)
    assert nodes.figures == "measured" and nodes.measured == RunsOn("fsdp", "transformers", 32)
    assert 1e-4 < nodes.device.tflops < 100 and 0.1 < nodes.device.bandwidth_gbs < 10_000
    assert nodes.efficiency.tp_layer_us == 0.0 and nodes.efficiency.call_ms > 0.0
    config.write_text(tiny(tmp_path, target))
    out = io.StringIO()
    plan(config, console=Console(file=out, width=200, highlight=False, markup=False))
    assert "measured figures" in out.getvalue() and "was measured with" not in out.getvalue()
    plan(config, ["rollout=vllm"], console=Console(file=(out := io.StringIO()), width=200, markup=False))
    assert "actor runs on vllm, and mine was measured with transformers: calibrate with vllm" in out.getvalue()


@pytest.mark.usefixtures("quick", "ray_cluster")
def test_two_devices_are_measured_with_their_link_and_tensor_parallelism(tmp_path):
    found = calibrate.calibrate({"run": {"device": "cpu"}}, 2)
    assert {(p.layout.pp, p.layout.tp, p.layout.dp) for p in found.probed} == {(1, 1, 2), (1, 2, 1)}
    assert {(p.engines.pp, p.engines.tp) for p in found.probed} == {(1, 1), (1, 2)}
    assert {p.sample.verb for p in found.probed} == set(VERBS)
    assert found.nodes.efficiency.link_latency_us > 1.0 and found.nodes.device.link_gbs > 0.01
    assert all(0 < p.sample.seconds < 60 for p in found.probed)


def tiny(folder, cluster) -> str:
    model = json.dumps(MODEL).replace('":', '" =')
    return f"""
algorithm = {{ name = "grpo", prompts_per_step = 4, group_size = 2 }}
runtime = "inline"
placement = {{ name = "given", cluster = "{cluster}" }}
reward = "exact_match"
run = {{ folder = "{folder / "runs"}", steps = 3, trackers = ["jsonl"], device = "cpu" }}
tokenizer.characters = "0123456789+="
data = {{ source = "arithmetic", max_prompt_tokens = 8, answer = "{{answer}}" }}
sampling.max_tokens = 3
actor.model.config = {model}
"""


def test_a_run_that_knows_its_cluster_says_what_was_predicted(tmp_path, capsys):
    (tmp_path / "cluster.toml").write_text(OWN)
    (tmp_path / "tiny.toml").write_text(tiny(tmp_path, tmp_path / "cluster.toml"))
    assert run(tmp_path / "tiny.toml").step == 3
    text = capsys.readouterr().out
    assert re.search(r"^a step took [\d.]+ m?s \(median\), [\d.]+ m?s were predicted \([+-]\d+%\)$", text, re.M)
    for work in ("generation", "training"):
        assert re.search(rf"^  actor {work}: [\d.]+ m?s, predicted [\d.]+ m?s \([+-]\d+%\)$", text, re.M), text
    lines = (tmp_path / "runs" / "tiny" / "metrics.jsonl").read_text().splitlines()
    predicted = {json.loads(line)["seconds/predicted"] for line in lines}
    assert len(lines) == 3 and len(predicted) == 1 and predicted.pop() > 0


def test_every_cut_has_models_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setattr(calibrate, "_cuts", lambda *_: [(1, 1), (1, 2)])  # a backend without tp, an engine with it
    models = probing_job({"run": {"device": "cpu"}}, 2, str(tmp_path)).models
    assert len(models) == 6 and {m.generation.tp for m in models.values()} == {1, 2}


def test_a_measured_section_without_efficiencies_is_told(tmp_path):
    (tmp_path / "odd.toml").write_text(OWN + '[measured.laptop]\nbackend = "fsdp"\nengine = "vllm"\n')
    with pytest.raises(ConfigError, match=r"measured\.laptop: there is no \[efficiency\.laptop\]"):
        Cluster.read(tmp_path / "odd.toml")


def test_the_models_are_cut_as_the_backend_and_the_engine_can(tmp_path):
    every = probing_job({"run": {"device": "cpu"}}, 2, str(tmp_path))
    assert {(m.layout.tp, m.generation.tp) for m in every.models.values()} == {(1, 1), (2, 2)}
    bf16 = probing_job(
        {"run": {"device": "cpu"}, "actor": {"backend": {"name": "fsdp", "precision": "bf16"}}}, 2, str(tmp_path)
    )
    assert all(m.spec.backend_config.precision == "bf16" for m in bf16.models.values())
    assert {len(probing_job({"run": {"device": "cpu"}}, n, str(tmp_path)).models) for n in (1, 3)} == {3}


@pytest.mark.parametrize(
    ("said", "known"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA A100-PCIE-40GB", "a100-40gb"),
        ("NVIDIA H100 80GB HBM3", "h100-80gb"),
        ("NVIDIA H200", "h200-141gb"),
        ("NVIDIA H20", "h20-96gb"),
        ("NVIDIA GeForce RTX 4090", "rtx4090-24gb"),
        ("NVIDIA L40S", "l40s-48gb"),
        ("NVIDIA L4", "l4-24gb"),
        ("Tesla V100-SXM2-32GB", "v100-32gb"),
        ("AMD Instinct MI300X", "mi300x-192gb"),
        ("NVIDIA GeForce RTX 3060", None),
    ],
)
def test_drivers_names_of_known_devices(said, known):
    found = device_called(said)
    assert (found and found.name) == known


def test_what_cannot_be_measured_is_said_before_anything_starts(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=r"--devices 0: calibrate at least one device"):
        calibrated(None, devices=0)
    with pytest.raises(ConfigError, match="there is no folder"):
        calibrated(None, devices=1, write=str(tmp_path / "no" / "here.toml"))
    with pytest.raises(ConfigError, match=r"overrides are of a config, and none is given: calibrate CONFIG actor\.x=1"):
        calibrated(None, ["actor.x=1"])
    (tmp_path / "odd.toml").write_text('rollout = "none"\nactor.backend = "fsdp"\n')
    with pytest.raises(ConfigError, match="none"):
        calibrated(tmp_path / "odd.toml")
    with pytest.raises(ConfigError, match=r"precision"):
        calibrated(tmp_path / "odd.toml", ["rollout=transformers", "actor.backend.precision=fp7"])
    real = builtins.__import__

    def without_scipy(name, *rest, **more):
        if name == "hybridflow.planner.calibration.calibrate":
            raise ImportError("No module named 'scipy'")
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without_scipy)
    with pytest.raises(ConfigError, match=r"needs scipy .*pip install 'hybridflow\[calibrate\]'"):
        calibrated(None)
