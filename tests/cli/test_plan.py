"""`hybridflow plan`: its arguments, what it writes, and messages for what cannot be."""

from __future__ import annotations

import json
import tomllib

import pytest
from helpers.configs import CONFIG, LLAMA, printed
from helpers.paths import ROOT

from hybridflow.cli.main import main
from hybridflow.cli.plan import read_sizes
from hybridflow.core.errors import ConfigError
from hybridflow.settle.launch import load_config


def test_the_written_config_runs_with_those_layouts_and_keeps_the_rest(config, tmp_path):
    target = tmp_path / "planned.toml"
    text = printed(config, cluster="a100-80gb:1x8", write=str(target))
    assert f"written: {target}" in text
    written = target.read_text()
    assert (
        "# of a reader" in written
        and "max_tokens = 512  # long" in written
        and "main = [2]" not in written
    )
    [job] = load_config(target, [])
    devices = sum(pool.world for pool in job.pools.values())
    assert devices == 8
    again = printed(target, cluster="a100-80gb:1x8")
    assert "as the config says it: " in again and "(the same)" in again


def test_each_stage_of_a_config_gets_its_own(config, tmp_path):
    staged = (
        CONFIG + "[stages.one]\nrun.steps = 1\n[stages.two]\nalgorithm.prompts_per_step = 512\n"
    )
    config.write_text(staged)
    target = tmp_path / "planned.toml"
    text = printed(config, cluster="a100-80gb:1x8", write=str(target))
    assert "stage one" in text and "stage two" in text
    for job in load_config(target, []):
        assert sum(pool.world for pool in job.pools.values()) == 8


def test_the_command_line_takes_them_all(config, capsys, tmp_path):
    assert (
        main(["plan", str(config), "--cluster", "a100-80gb:1x8", "algorithm.prompts_per_step=512"])
        == 0
    )
    assert "a step takes" in capsys.readouterr().out
    assert main(["plan", str(config)]) == 1
    assert "which cluster? Give --cluster, or placement.cluster" in capsys.readouterr().err
    assert main(["plan", str(config), "placement.cluster=h100-80gb:1x2"]) == 0
    assert "on 2 devices" in capsys.readouterr().out
    assert main(["plan", str(config), "--cluster", "a100-80gb:1x8", "--what-if", "nodes=3"]) == 1
    assert "write devices=64,128,256" in capsys.readouterr().err


def test_a_backend_that_is_not_installed_here_can_be_planned_for(config, monkeypatch):
    from hybridflow.core.plugins.descriptor import Descriptor

    real = Descriptor.missing
    monkeypatch.setattr(
        Descriptor,
        "missing",
        lambda self: ["megatron.core"] if self.name == "megatron" else real(self),
    )
    megatron = ['actor.backend={ name = "megatron", precision = "bf16" }']
    assert "a step takes" in printed(config, megatron, cluster="a100-80gb:1x8")
    with pytest.raises(ConfigError, match=r"needs megatron\.core, not installed here"):
        load_config(config, megatron)


def test_write_says_given_and_takes_no_overrides(config, tmp_path):
    config.write_text('placement = { name = "auto", cluster = "a100-80gb:1x4" }\n' + CONFIG)
    target = tmp_path / "planned.toml"
    printed(config, cluster="a100-80gb:1x8", write=str(target))
    [job] = load_config(target, [])
    assert job.placement.name == "given" and sum(pool.world for pool in job.pools.values()) == 8
    with pytest.raises(ConfigError, match="put the overrides into it first"):
        printed(config, ["run.steps=2"], cluster="a100-80gb:1x8", write=str(target))
    with pytest.raises(ConfigError, match="--what-if tables many plans"):
        printed(config, cluster="a100-80gb:1x8", write=str(target), what_if=[8])


def test_common_sizes_do_not_stay_under_planned_stages(config, tmp_path):
    source = (ROOT / "examples/arithmetic.toml").read_text()
    assert "main = [1]" in source
    config.write_text(
        source.replace("[actor]", "[actor]\ngeneration = { tp = 2 }", 1).replace("[1]", "[2]")
    )
    target = tmp_path / "planned.toml"
    printed(config, cluster="a100-80gb:1x2", write=str(target))
    load_config(target, [])
    load_config(config, ["placement=auto", "placement.cluster=a100-80gb:1x2"])


def test_sizes_that_auto_replaces_are_not_looked_at(config):
    auto = [
        "placement=auto",
        "placement.cluster=h100-80gb:1x4",
        "actor.layout.tp=3",
        "ref.pool=nowhere",
    ]
    assert "as the config says it: the same (placement = auto)" in printed(config, auto)
    load_config(config, auto)


def test_a_model_is_planned_without_its_weights(config, tmp_path):
    folder = tmp_path / "llama"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(tomllib.loads(f"model = {LLAMA}")["model"]))
    config.write_text(CONFIG.replace(f"model.config = {LLAMA}", f"model.path = '{folder}'"))
    digits = ["tokenizer.characters=0123456789+="]
    assert "a step takes" in printed(config, digits, cluster="a100-80gb:1x8")
    with pytest.raises(ConfigError, match=r"has no \*\.safetensors weights"):
        load_config(config, digits)


def test_sizes_of_what_if_are_numbers_of_devices():
    assert read_sizes("devices=8,16") == [8, 16] and read_sizes(None) == []
    for wrong in ("nodes=8", "devices=", "devices=8,,16", "devices=0", "devices=eight", "8"):
        with pytest.raises(ConfigError, match="write devices=64,128,256"):
            read_sizes(wrong)


def test_what_if_is_told_stage_by_stage(config):
    config.write_text(CONFIG + "[stages.one]\nrun.steps = 1\n[stages.two]\nrun.steps = 1\n")
    lines = printed(config, cluster="a100-80gb:1x8", what_if=[4, 8]).splitlines()
    assert [line for line in lines if line.startswith("stage")] == ["stage one", "stage two"]
    assert [line.split()[0] for line in lines if line[:1].isdigit()] == ["4", "8"] * 2
