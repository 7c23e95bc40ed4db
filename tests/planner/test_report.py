"""A plan in words and as bars: pools, times, memory, the next best; other numbers of devices."""

from __future__ import annotations

import re

import pytest
from helpers.configs import LLAMA, printed
from helpers.planned import engines, laid_out, planned

from hybridflow.core.contracts.planner import Bar
from hybridflow.kit.huggingface.shapes import llama_shape
from hybridflow.planner import Cluster, Mapping
from hybridflow.planner.memory import Bytes
from hybridflow.planner.pools import FilledPool, LayoutChoice, Option
from hybridflow.planner.report import bars, kinds_of
from hybridflow.planner.search import PlannedPool


def choice(name: str, infer: float, train: float, generate: float = 0.0) -> LayoutChoice:
    """A model on two devices, with these seconds."""
    model = planned(name, llama_shape(64, 2, 4, 2, 16, 128, 64))
    option = Option(model, laid_out(dp=2), infer, train, Bytes(1e9))
    return LayoutChoice(option, engines(2) if generate else None, 0.0, generate)


def test_a_cluster_in_a_line():
    two = Cluster((*Cluster.of("a100-80gb", 2, 8).nodes, *Cluster.of("l4-24gb", 1, 4).nodes))
    said = kinds_of(two)
    assert "2 x 8 a100-80gb (72.0 of 80 GB" in said and "1 x 4 l4-24gb (21.6 of 24 GB" in said


def test_models_of_a_pool_work_one_after_the_other_and_stages_begin_together():
    shared = FilledPool(
        2, (5.0, 3.0, 4.0), (choice("actor", 1.0, 4.0, 5.0), choice("ref", 2.0, 0.0))
    )
    alone = FilledPool(2, (0.0, 2.5, 6.0), (choice("critic", 2.5, 6.0),))
    mapping = Mapping((PlannedPool(shared, 0), PlannedPool(alone, 0)), 14.0, (5.0, 3.0, 6.0))
    both, one = "actor+ref\non 2", "critic\non 2"
    assert [bar for bar in bars(mapping) if bar.seconds] == [
        Bar(both, "actor", 0.0, 5.0),
        Bar(both, "actor", 5.0, 1.0),
        Bar(both, "ref", 6.0, 2.0),
        Bar(both, "actor", 8.0, 4.0),
        Bar(one, "critic", 5.0, 2.5),
        Bar(one, "critic", 8.0, 6.0),
    ]


def test_the_plan_names_pools_times_memory_and_the_next_best(config):
    text = printed(config, cluster="a100-80gb:1x8")
    assert "cluster: 1 x 8 a100-80gb (72.0 of 80 GB usable, tabled figures)" in text
    step = float(re.search(r"a step takes ([\d.]+) s on 8 devices", text)[1])
    stages = [
        float(s)
        for s in re.findall(r"^  (?:generation|inference|training) +([\d.]+) s", text, re.M)
    ]
    assert len(stages) == 3 and sum(stages) == pytest.approx(step, rel=0.02)
    assert re.search(r"[\d,]+ tokens/s, [\d,]+ per device; limited by ", text)
    assert len(re.findall(r"\d+% of the peak \(MFU\); limited by ", text)) == 2
    assert "assumed of a100-80gb: matrix products 312 TFLOP/s (19.5 in float32) x 0.5" in text
    assert "network" not in text.split("assumed")[1]
    for role in ("actor", "critic", "ref", "reward"):
        assert re.search(rf"{role} .*pp 1 tp \d dp \d", text), role
    assert "of it weights" in text and "of it cache" in text and "% while" in text
    assert len(re.findall(r"^next: .* s \(\+[\d.]+%\): ", text, re.M)) == 3
    assert re.search(r"^as the config says it: [\d.]+ s \(\+\d+.\d%\): generation", text, re.M)


def test_a_number_of_devices_that_is_too_small_is_told_with_what_lacks(config):
    large = (
        LLAMA.replace("2048", "8192").replace("5504", "28672").replace("layers = 8", "layers = 40")
    )
    # 40 layers of 4 x 8192 x 8192 and 3 x 8192 x 28672, and 2 x 32000 x 8192: 39.4 billion
    text = printed(
        config, [f"actor.model.config={large}"], cluster="a100-80gb:1x8", what_if=[1, 8, 32]
    )
    rows = {line.split()[0]: line for line in text.splitlines() if line[:1].isdigit()}
    assert "does not fit" in rows["1"] and "actor (39.4 billion parameters)" in rows["1"]
    first = next(number for number, row in rows.items() if "does not fit" not in row)
    assert "  100%  " in rows[first]  # of the first that fits


def test_the_kinds_of_several_pools_are_said(config, tmp_path):
    kinds = "".join(
        f'[[nodes]]\ndevice = "{name}"\nper_node = 1\n[devices.{name}]\nmemory_gb = 16\ntflops = {tflops}\n'
        "bandwidth_gbs = 1000\nlink_gbs = 100\n"
        for name, tflops in (("one", 100), ("two", 60))
    )
    (tmp_path / "two.toml").write_text(kinds)
    text = printed(config, cluster=str(tmp_path / "two.toml"))
    said = re.search(
        r"^note: a config does not say which kind of device a pool gets.*: see that it is (.*)$",
        text,
        re.M,
    )
    assert "actor" in said[1] and said[1].count("on one") == said[1].count("on two") == 1
    assert "which kind" not in printed(config, cluster="a100-80gb:1x8")


def test_what_an_engine_keeps_is_in_the_memory_of_the_other_phases(config):
    # A quarter of 80 GB, and CUDA graphs beside it
    keeps = ["rollout=vllm", "rollout.dtype=bfloat16", "rollout.gpu_memory=0.25"]
    row = r"^actor.* (\d+)% while \w+ \w+(, [\d.]+ of it the engine's)?$"
    share, told = re.search(row, printed(config, keeps, cluster="a100-80gb:1x8"), re.M).groups()
    dropped = re.search(
        row, printed(config, [*keeps, "actor.generation.keep=false"], cluster="a100-80gb:1x8"), re.M
    ).groups()
    assert told == ", 21.0 of it the engine's" and dropped[1] is None
    assert int(share) - int(dropped[0]) in (27, 28, 29)  # 20 of 72 GB
