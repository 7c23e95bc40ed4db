"""`hybridflow calibrate`: its file is planned on; and what it says before anything starts."""

from __future__ import annotations

import builtins
import tomllib

import attrs
import pytest
from helpers.configs import console, printed, tiny_run
from helpers.paths import matrix
from helpers.planned import engines, laid_out, planned

from hybridflow.core.errors import ConfigError
from hybridflow.kit.huggingface.shapes import llama_shape
from hybridflow.planner.calibration.calibrate import Calibration, Probed
from hybridflow.planner.calibration.command import cluster_toml, run_calibrate
from hybridflow.planner.calibration.probes import Sample
from hybridflow.planner.cluster import DEVICES, Cluster, Device, Efficiency, Nodes, RunsOn


def calibrated(*arguments, **options) -> str:
    """What the command prints."""
    to, out = console(width=200)
    run_calibrate(*arguments, **options, console=to)
    return out.getvalue()


def found_on(device: Device) -> Calibration:
    """One sample, which took twice as long as it is predicted to."""
    nodes = Nodes(
        device,
        1,
        2,
        25.0,
        Efficiency(training=0.123456789, call_ms=1e-9),
        True,
        RunsOn("fsdp", "transformers", 32),
    )
    model = planned("actor", llama_shape(64, 2, 4, 2, 16, 128, 64), trained=True)
    probed = Probed(Sample("actor", "train", 4, 8, 8, 1.0), model, laid_out(dp=2), engines(2))
    slow = attrs.evolve(probed.sample, seconds=2 * probed.predicted(nodes))
    return Calibration(nodes, (attrs.evolve(probed, sample=slow),))


def test_the_file_says_what_was_found_to_four_digits():
    text = cluster_toml(found_on(Device(12.34567, 0.16, 12, 1.4, name="laptop")))
    [nodes] = Cluster.from_tables(tomllib.loads(text)).nodes
    assert (nodes.device.name, nodes.device.memory_gb, nodes.per_node) == ("laptop", 12.35, 2)
    assert (nodes.efficiency.training, nodes.efficiency.call_ms) == (0.1235, 0.0)
    assert nodes.measured == RunsOn("fsdp", "transformers", 32)
    measured = tomllib.loads(text)["measured"]["laptop"]
    assert measured["error"] == 0.5 and "2 devices of" in measured["on"]


def test_a_known_device_is_not_described_again():
    known = cluster_toml(found_on(DEVICES["l4-24gb"]))
    assert "devices" not in tomllib.loads(known) and Cluster.from_tables(tomllib.loads(known))
    smaller = cluster_toml(found_on(attrs.evolve(DEVICES["l4-24gb"], memory_gb=23.0)))
    assert tomllib.loads(smaller)["devices"]["l4-24gb"]["memory_gb"] == 23.0


@matrix
@pytest.mark.usefixtures("quick")
def test_a_machine_is_measured_and_its_file_is_planned_on(tmp_path):
    target, config = tmp_path / "here.toml", tmp_path / "tiny.toml"
    text = calibrated(None, write=str(target), name="mine")
    for said in (
        "measuring the machine",
        "inference",
        "training",
        "generation",
        "TFLOP/s",
        f"written: {target}",
    ):
        assert said in text
    cluster = Cluster.read(target)
    [nodes] = cluster.nodes
    assert (nodes.device.name, nodes.count, nodes.per_node) == ("mine", 1, 1)
    assert nodes.figures == "measured" and nodes.measured == RunsOn("fsdp", "transformers", 32)
    assert 1e-4 < nodes.device.tflops < 100 and 0.1 < nodes.device.bandwidth_gbs < 10_000
    assert nodes.efficiency.tp_layer_us == 0.0 and nodes.efficiency.call_ms > 0.0
    config.write_text(tiny_run(tmp_path, target))
    planned = printed(config)
    assert "measured figures" in planned and "was measured with" not in planned
    other = printed(config, ["rollout=vllm"])
    assert "mine was measured with transformers: calibrate with vllm" in other


def test_what_cannot_be_measured_is_said_before_anything_starts(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=r"--devices 0: calibrate at least one device"):
        calibrated(None, devices=0)
    with pytest.raises(ConfigError, match="there is no folder"):
        calibrated(None, devices=1, write=str(tmp_path / "no" / "here.toml"))
    with pytest.raises(
        ConfigError,
        match=r"calibrate CONFIG actor\.x=1",
    ):
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
