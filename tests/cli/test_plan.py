"""`hybridflow plan`: what it prints, writes and draws; clusters from files; and messages for what cannot be."""

from __future__ import annotations

import io
import json
import re
import tomllib

import pytest
from helpers.configs import CONFIG, LLAMA
from helpers.paths import ROOT
from rich.console import Console

from hybridflow.cli import written
from hybridflow.cli.main import main
from hybridflow.cli.plan import plan, read_sizes
from hybridflow.cli.written import write_config
from hybridflow.core.errors import ConfigError
from hybridflow.core.job.places import replace_places
from hybridflow.core.launch import load_config
from hybridflow.planner import NothingFitsError
from hybridflow.planner.cluster import DEVICES, Cluster, Efficiency, read_cluster


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "ppo.toml"
    path.write_text(CONFIG)
    return path


def printed(*arguments, **options) -> str:
    out = io.StringIO()
    plan(*arguments, **options, console=Console(file=out, width=200, highlight=False, markup=False))
    return out.getvalue()


def test_the_plan_names_pools_times_memory_and_the_next_best(config):
    text = printed(config, cluster="a100-80gb:1x8")
    assert "cluster: 1 x 8 a100-80gb (72.0 of 80 GB usable, tabled figures)" in text
    step = float(re.search(r"a step takes ([\d.]+) s on 8 devices", text)[1])
    stages = [float(s) for s in re.findall(r"^  (?:generation|inference|training) +([\d.]+) s", text, re.M)]
    assert len(stages) == 3 and sum(stages) == pytest.approx(step, rel=0.02)
    for role in ("actor", "critic", "ref", "reward"):
        assert re.search(rf"{role} .*pp 1 tp \d dp \d", text), role
    assert "of it weights" in text and "of it cache" in text and "% while" in text
    assert len(re.findall(r"^next: .* s \(\+[\d.]+%\): ", text, re.M)) == 3
    assert re.search(r"^as the config says it: [\d.]+ s \(\+\d+.\d%\): generation", text, re.M)


def test_what_does_not_fit_is_said_with_the_phase_and_the_numbers(config):
    large = (
        LLAMA.replace("hidden_size = 2048", "hidden_size = 8192")
        .replace("5504", "28672")
        .replace("layers = 8", "layers = 80")
    )
    large = large.replace("heads = 16", "heads = 64, num_key_value_heads = 8")
    text = printed(config, [f"actor.model.config={large}"], cluster="a100-80gb:8x8")
    assert re.search(
        r"as the config says it: does not fit: actor needs [\d.]+ GB per device while it trains, of which", text
    )
    with pytest.raises(
        NothingFitsError, match=r"actor \(69\.0 billion parameters\) fits nowhere: the least is .* GB per device"
    ):
        printed(config, [f"actor.model.config={large}"], cluster="a100-80gb:1x4")


def test_the_written_config_runs_with_those_layouts_and_keeps_the_rest(config, tmp_path):
    target = tmp_path / "planned.toml"
    text = printed(config, cluster="a100-80gb:1x8", write=str(target))
    assert f"written: {target}" in text
    written = target.read_text()
    assert "# of a reader" in written and "max_tokens = 512  # long" in written and "main = [2]" not in written
    [job] = load_config(target, [])
    devices = sum(pool.world for pool in job.pools.values())
    assert devices == 8
    again = printed(target, cluster="a100-80gb:1x8")
    assert "as the config says it: " in again and "(the same)" in again


def test_each_stage_of_a_config_gets_its_own(config, tmp_path):
    staged = CONFIG + "[stages.one]\nrun.steps = 1\n[stages.two]\nalgorithm.prompts_per_step = 512\n"
    config.write_text(staged)
    target = tmp_path / "planned.toml"
    text = printed(config, cluster="a100-80gb:1x8", write=str(target))
    assert "stage one" in text and "stage two" in text
    for job in load_config(target, []):
        assert sum(pool.world for pool in job.pools.values()) == 8


def test_other_numbers_of_devices_are_tabled(config):
    text = printed(config, cluster="h100-80gb:1x8", what_if=[1, 2, 8, 16])
    rows = [line.split() for line in text.splitlines() if re.match(r"(1|2|8|16) ", line)]
    assert [row[0] for row in rows] == ["1", "2", "8", "16"]
    assert "100%" in text
    with pytest.raises(ConfigError, match="12 devices are not whole nodes of 8"):
        printed(config, cluster="h100-80gb:1x8", what_if=[12])


@pytest.mark.parametrize("name", ["step.svg", "step.png"])
def test_a_step_is_drawn(config, tmp_path, name):
    printed(config, cluster="a100-80gb:1x8", timeline=str(tmp_path / name))
    drawn = (tmp_path / name).read_bytes()
    assert drawn.startswith(b"\x89PNG" if name.endswith("png") else b"<?xml")
    assert name.endswith("png") or (b"actor" in drawn or b"seconds of a step" in drawn)
    with pytest.raises(ConfigError, match=r"ends in \.svg or \.png"):
        printed(config, cluster="a100-80gb:1x8", timeline=str(tmp_path / "step.jpeg"))


def test_the_command_line_takes_them_all(config, capsys, tmp_path):
    assert main(["plan", str(config), "--cluster", "a100-80gb:1x8", "algorithm.prompts_per_step=512"]) == 0
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
        Descriptor, "missing", lambda self: ["megatron.core"] if self.name == "megatron" else real(self)
    )
    megatron = ['actor.backend={ name = "megatron", precision = "bf16" }']
    assert "a step takes" in printed(config, megatron, cluster="a100-80gb:1x8")
    with pytest.raises(ConfigError, match=r"needs megatron\.core, not installed here"):
        load_config(config, megatron)


FILE = """
[[nodes]]
device = "mine"
count = 2
per_node = 4
between_gbps = 100
[devices.mine]
memory_gb = 24
tflops = 100
bandwidth_gbs = 500
link_gbs = 20
[efficiency.mine]
training = 0.4
"""


def test_a_cluster_of_ones_own_devices(tmp_path):
    (tmp_path / "cluster.toml").write_text(FILE)
    [nodes] = read_cluster(str(tmp_path / "cluster.toml")).nodes
    assert (nodes.device.name, nodes.device.memory_gb, nodes.devices, nodes.between_gbs) == ("mine", 24, 8, 12.5)
    assert nodes.efficiency == Efficiency(training=0.4) and nodes.figures == "given"
    assert nodes.sizes() == [1, 2, 4, 8]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "the cluster has no device; give it [[nodes]]"),
        ('[[nodes]]\ndevice = "a100"', "nodes.0.device: no device is called 'a100'"),
        ('[[nodes]]\ndevice = "a100-80gb"\ncount = 0', "nodes.0.count: must be at least 1, got 0"),
        ('[[nodes]]\ndevice = "a100-80gb"\nbetween_gbps = 0', "between_gbps: must be above 0 and finite, got 0"),
        ('[[nodes]]\ndevice = "a100-80gb"\nbandwidth = 1', "unknown key"),
        (FILE.replace("link_gbs = 20", "link_gbs = 0"), "devices.mine.link_gbs: must be above 0 and finite, got 0"),
        (FILE.replace("memory_gb = 24", "memory_gb = inf"), "devices.mine.memory_gb: must be above 0 and finite, got inf"),
        (FILE.replace("memory_gb = 24\n", ""), "memory_gb"),
        (FILE.replace("training = 0.4", "training = 1.4"), "efficiency.mine.training: must be above 0 and at most 1, got 1.4"),
        (FILE.replace("[efficiency.mine]", "[efficiency.yours]"), "efficiency.yours: no [[nodes]] are of this device"),
        ("[[nodes", "cluster.toml:"),
    ],
    ids=["empty", "unknown", "none", "no-network", "key", "no-link", "endless", "no-memory", "share", "whose", "toml"],
)  # fmt: skip
def test_what_is_wrong_with_a_cluster_is_said(tmp_path, text, said):
    path = tmp_path / "cluster.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_cluster(str(path))
    assert said in str(caught.value)


def test_a_cluster_in_a_word():
    [nodes] = read_cluster("h100-80gb:16x8@3200").nodes
    assert (nodes.devices, nodes.between_gbs, nodes.device) == (128, 400.0, DEVICES["h100-80gb"])
    with pytest.raises(ConfigError, match=r"is no file, and not DEVICE:NODESxDEVICES"):
        read_cluster("nowhere.toml")
    with pytest.raises(ConfigError, match=r"is no file, and not DEVICE:NODESxDEVICES"):
        read_cluster("h100-80gb:1x8@1.2.3")
    with pytest.raises(ConfigError, match="no device is called 'h1000'"):
        read_cluster("h1000:1x8")
    assert read_sizes("devices=8,16") == [8, 16] and read_sizes(None) == []
    two = Cluster((nodes, nodes))
    with pytest.raises(ConfigError, match="2 kinds of nodes"):
        two.sized(8)


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
    config.write_text(source.replace("[actor]", "[actor]\ngeneration = { tp = 2 }", 1).replace("[1]", "[2]"))
    target = tmp_path / "planned.toml"
    printed(config, cluster="a100-80gb:1x2", write=str(target))
    load_config(target, [])
    load_config(config, ["placement=auto", "placement.cluster=a100-80gb:1x2"])


FOR_READERS = """# head
[pools]  # how many
main = [1]

# about the tokenizer
[tokenizer]
characters = "0"  # digits

# the cut
[actor.layout]
tp = 1  # whole

# of ref
[ref]
pool = "main"
"""
PLANNED = {
    "pools": {"actor": [8], "critic": [4]},
    "actor": {"pool": "actor", "layout": {"pp": 1, "tp": 2, "dp": 4}, "generation": {"pp": 1, "tp": 2}},
    "ref": {"pool": "critic", "layout": {"pp": 1, "tp": 1, "dp": 4}},
}


def test_comments_stay_where_they_were(tmp_path):
    source, target = tmp_path / "source.toml", tmp_path / "target.toml"
    source.write_text(FOR_READERS, newline="\r\n")
    assert write_config(source, target, {None: PLANNED}, "a100-80gb:1x8")
    text = target.read_bytes().decode()
    assert text.count("\n") == text.count("\r\n")
    text = text.replace("\r", "")
    assert "# head\n[pools]  # how many\nactor = [8]\ncritic = [4]\n\n# about the tokenizer\n[tokenizer]" in text
    assert 'characters = "0"  # digits\n\n# the cut\n' in text and "tp = 2  # whole" in text
    assert "\n\n# of ref\n[ref]\n" in text
    assert tomllib.loads(text) == PLANNED | {"tokenizer": {"characters": "0"}}


@pytest.mark.parametrize(
    "stage",
    [
        "actor.layout.tp = 1\nactor.generation.tp = 1",
        'actor.layout.tp = 1\nactor.generation.tp = 1\nactor.model.path = "x"',
        "actor.layout = { tp = 1 }\nactor.generation = { tp = 1 }",
        'pools.main = [1]\nactor.pool = "main"\nactor.generation.tp = 1',
        "[stages.c.actor.layout]\ntp = 1\n[stages.c.actor.generation]\ntp = 1\nkeep = true",
    ],
)
def test_stages_in_every_writing_are_written(tmp_path, stage):
    source, target = tmp_path / "source.toml", tmp_path / "target.toml"
    source.write_text(f"# common\n[pools]\nmain = [2]\n# of c\n[stages.c]\nalgorithm = 'grpo'  # here\n{stage}\n")
    assert write_config(source, target, {"c": PLANNED}, "a100-80gb:1x8")
    text = target.read_text()
    assert "# common\n# of c\n" in text and "# here" in text and "main" not in text
    [(name, found)] = tomllib.loads(text)["stages"].items()
    expected = tomllib.loads(source.read_text())["stages"]["c"]
    replace_places(expected, PLANNED)
    assert name == "c" and found == expected and found["actor"]["layout"] == PLANNED["actor"]["layout"]


def test_where_comments_cannot_stay_the_values_do(tmp_path, monkeypatch):
    source, target = tmp_path / "source.toml", tmp_path / "target.toml"
    source.write_text(FOR_READERS)
    monkeypatch.setattr(written, "_become", lambda document, wanted: document.clear())
    assert not write_config(source, target, {None: PLANNED}, "a100-80gb:1x8")
    assert tomllib.loads(target.read_text()) == PLANNED | {"tokenizer": {"characters": "0"}}


def test_what_cannot_be_written_or_drawn_is_said(config, tmp_path):
    nowhere = tmp_path / "nowhere"
    with pytest.raises(ConfigError, match=r"--write .*No such file or directory"):
        printed(config, cluster="a100-80gb:1x1", write=str(nowhere / "plan.toml"))
    with pytest.raises(ConfigError, match=r"--timeline .*No such file or directory"):
        printed(config, cluster="a100-80gb:1x1", timeline=str(nowhere / "step.svg"))


def test_a_runtime_of_one_rank_is_planned_on_one_device(config):
    assert "on 1 devices" in printed(config, ["runtime=inline", "pools.main=[1]"], cluster="h100-80gb:1x1")
    said = "inline runs models on one rank, and the cluster has 8 devices; plan for one .h100-80gb:1x1., or set another"
    with pytest.raises(ConfigError, match=said):
        printed(config, ["runtime=inline", "pools.main=[1]"], cluster="h100-80gb:1x8")
    with pytest.raises(ConfigError, match=said):
        load_config(config, ["runtime=inline", "placement=auto", "placement.cluster=h100-80gb:1x8"])


def test_sizes_that_auto_replaces_are_not_looked_at(config):
    auto = ["placement=auto", "placement.cluster=h100-80gb:1x4", "actor.layout.tp=3", "ref.pool=nowhere"]
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


def test_an_offloaded_model_that_does_not_fit_is_told_with_its_weights(config):
    offload = ["actor.offload=true", "actor.micro_batch_tokens=4000000", "pools.main=[1]"]
    said = re.search(
        r"actor needs ([\d.]+) GB per device while it trains, of which ([\d.]+) are weights",
        printed(config, offload, cluster="l4-24gb:1x8").replace(" GB are", " are"),
    )
    assert 5 < float(said[2]) < float(said[1]) / 2  # 0.47 billion parameters at 12 bytes


def test_what_an_engine_keeps_is_said_where_nothing_fits(config):
    keeps = ["rollout=vllm", "rollout.dtype=bfloat16", "rollout.gpu_memory=0.85"]
    with pytest.raises(
        NothingFitsError, match=r"68\.0 GB more are kept by engines: set actor\.generation\.keep = false"
    ):
        printed(config, keeps, cluster="a100-80gb:1x1")


def test_the_kinds_of_several_pools_are_said(config, tmp_path):
    kinds = "".join(
        f'[[nodes]]\ndevice = "{name}"\nper_node = 1\n[devices.{name}]\nmemory_gb = 16\ntflops = {tflops}\n'
        "bandwidth_gbs = 1000\nlink_gbs = 100\n"
        for name, tflops in (("one", 100), ("two", 60))
    )
    (tmp_path / "two.toml").write_text(kinds)
    text = printed(config, cluster=str(tmp_path / "two.toml"))
    said = re.search(
        r"^note: a config does not say which kind of device a pool gets.*: see that it is (.*)$", text, re.M
    )
    assert "actor" in said[1] and said[1].count("on one") == said[1].count("on two") == 1
    assert "which kind" not in printed(config, cluster="a100-80gb:1x8")


def test_an_engines_own_limits_count(config):
    free = printed(config, cluster="a100-80gb:1x8")
    few = printed(config, ["rollout.max_sequences=1"], cluster="a100-80gb:1x8")
    step = r"generation +([\d.]+) s"
    assert float(re.search(step, few)[1]) > 2 * float(re.search(step, free)[1])


def test_what_an_engine_keeps_is_in_the_memory_of_the_other_phases(config):
    keeps = ["rollout=vllm", "rollout.dtype=bfloat16", "rollout.gpu_memory=0.25"]
    row = r"^actor.* (\d+)% while \w+ \w+(, [\d.]+ of it the engine's)?$"
    share, told = re.search(row, printed(config, keeps, cluster="a100-80gb:1x8"), re.M).groups()
    dropped = re.search(
        row, printed(config, [*keeps, "actor.generation.keep=false"], cluster="a100-80gb:1x8"), re.M
    ).groups()
    assert told == ", 20.0 of it the engine's" and dropped[1] is None
    assert int(share) - int(dropped[0]) in (27, 28, 29)  # 20 of 72 GB


def test_offloading_takes_time(config):
    with_it = printed(config, ["actor.offload=true", "critic.offload=true"], cluster="a100-80gb:1x8")
    without = printed(config, cluster="a100-80gb:1x8")
    step = r"training +([\d.]+) s"
    assert float(re.search(step, with_it)[1]) > float(re.search(step, without)[1])
