"""Plugins of every seam in a stranger's package (strangers/), which our code names nowhere.

A training backend with a sharding that nobody knows, an engine with another, an algorithm with a column that only these
two understand, a tracker with settings, a command and a planner.
"""

from __future__ import annotations

import json
import math
import os
import re
import tomllib
from pathlib import Path

import numpy as np
import pytest
from helpers.packages import hybridflow, install, python
from helpers.paths import matrix

HERE = Path(__file__).parent
MODEL = {
    "model_type": "qwen2", "vocab_size": 16, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 48, "max_position_embeddings": 64, "tie_word_embeddings": False,
}  # fmt: skip
SHAPES = [(16, 32), (32,), (16, 32)] + 2 * [
    (32, 32), (32,), (16, 32), (16,), (16, 32), (16,), (32, 32), (48, 32), (48, 32), (32, 48), (32,), (32,),
]  # fmt: skip
"""Of Qwen2's parameters: embedding, last norm and head; of a layer q, k, v with biases, o, gate, up, down, two norms."""
CONFIG = f"""
algorithm = {{ name = "tinted", prompts = 4 }}
run = {{ steps = 2, trackers = ["jsonl"] }}
tokenizer.characters = "0123456789+="
data = {{ source = "arithmetic", bos = true, answer = "{{answer}}", max_prompt_tokens = 8 }}
sampling = {{ max_tokens = 4, temperature = 0.0 }}
reward.function = "strangers_reward:sum_of_ids"
[actor]
model.config = {{ {", ".join(f"{key} = {json.dumps(value)}" for key, value in MODEL.items())} }}
optimizer.lr = 1e-2
"""
THEIRS = ("actor.backend=striped", "rollout=halves")


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> str:
    """Both packages, put into a folder by pip, without the network."""
    return str(install(tmp_path_factory.mktemp("site"), HERE / "kernels", HERE / "strangers"))


@pytest.fixture
def folder(tmp_path) -> Path:
    (tmp_path / "tinted.toml").write_text(CONFIG)
    (tmp_path / "strangers_reward.py").write_text(
        "def sum_of_ids(sample):\n    return float(sample.response_ids.sum())\n"
    )
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(MODEL))
    return tmp_path


def run(installed: str, folder: Path, name: str, *overrides: str) -> list[dict]:
    done = hybridflow(installed, folder, "run", "tinted.toml", f"run.name={name}", *overrides)
    assert done.returncode == 0, done.stdout + done.stderr
    return [
        json.loads(line)
        for line in (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()
    ]


def test_our_code_names_none_of_them():
    root = HERE.parents[1]
    names = re.compile(
        r"striped|[\"']halves[\"']|tinted|ledger|strangers|strange_kernels", re.IGNORECASE
    )
    for top in ("core", "kit", "planner", "cli", "backends", "algorithms"):
        for path in (root / top).rglob("*.py"):
            assert not names.search(path.read_text()), path


def test_each_is_listed_with_its_package_and_version(installed, tmp_path):
    listed = hybridflow(installed, tmp_path, "plugins", "--capabilities").stdout
    for kind, name in (("training_backend", "striped"), ("rollout_engine", "halves"), ("algorithm", "tinted"),
                       ("tracker", "ledger"), ("command", "greet"), ("planner", "first")):  # fmt: skip
        assert re.search(rf"{kind} +{name} +strangers +0\.7 +ready", listed), listed
    assert re.search(r"rollout_engine +halves +tp; .*extras: tint", listed)


@matrix
def test_they_pass_the_suites_of_their_kinds(installed, tmp_path):
    check = HERE / "strangers" / "check_strangers.py"
    tested = python(
        installed,
        tmp_path,
        "-m",
        "pytest",
        "-c",
        os.devnull,
        "--rootdir",
        str(tmp_path),
        str(check),
    )
    assert tested.returncode == 0, tested.stdout
    assert re.search(r"[1-9]\d passed", tested.stdout) and "failed" not in tested.stdout


@matrix
def test_two_ranks_of_theirs_learn_what_one_of_ours_learns(installed, folder):
    """Planned by the stranger's planner, told by its tracker, its versions in the run's record."""
    theirs = run(
        installed, folder, "theirs", *THEIRS, "actor.generation.tp=2", "actor.sync.verify=true", "runtime.threads=1",
        'placement={ name = "auto", cluster = "2", planner = { name = "first", devices = 2 } }',
        'run.trackers=["jsonl", { name = "ledger", file = "ledger.txt", metric = "fives" }]',
    )  # fmt: skip
    ours = run(installed, folder, "ours", "runtime=inline")
    assert len(theirs) == len(ours) == 2
    for one, other in zip(theirs, ours, strict=True):
        for key in (
            "reward/scores",
            "fives",
            "actor/reinforce",
            "actor/grad_norm",
            "actor/response_length",
        ):
            assert one[key] == pytest.approx(other[key], rel=1e-4, abs=1e-6), key
        assert one["actor/mismatch_mean"] < 1e-5
        assert one["seconds/predicted"] == 30.0  # one model, 60 s over two devices
    assert theirs[1]["actor/sync_received_mb"] > 0
    record = json.loads((folder / "runs/theirs/run.json").read_text())
    assert (
        record["versions"]["strangers"] == "0.7" and record["versions"]["strange-kernels"] == "3.1"
    )
    assert record["config"]["pools"] == {"all": [2]}
    lines = (folder / "runs/theirs/ledger.txt").read_text().splitlines()
    assert lines == [f"{row['step']} {row['fives']}" for row in theirs]


@matrix
def test_a_column_of_theirs_reaches_backend_and_engine_alike(installed, folder):
    plain = run(installed, folder, "plain", *THEIRS, "runtime=inline", "sampling.temperature=1.0")
    tinted = run(
        installed, folder, "tinted", *THEIRS, "runtime=inline", "sampling.temperature=1.0", "algorithm.tint=60",
    )  # fmt: skip
    # The second to fourth row of each step have 20, 40 and 60 added to token 5's logit: all of their 4 tokens are 5.
    assert all(row["fives"] >= 12 for row in tinted) and all(row["fives"] <= 6 for row in plain)
    assert all(
        row["actor/mismatch_mean"] < 1e-4 for row in plain + tinted
    )  # trainer and engine saw the same tint
    ours = run(
        installed, folder, "ours", "runtime=inline", "sampling.temperature=1.0", "algorithm.tint=60"
    )
    assert all(
        row["fives"] <= 6 for row in ours
    )  # a backend and an engine that declare nothing do not get it


def test_their_sharding_is_resharded_to_the_last_byte(installed, folder):
    done = hybridflow(
        installed, folder, "reshard", "--model", "model", "--dtype", "float32",
        "--from", "backend=striped,dp=4,height=4", "--to", "engine=halves,tp=2", "--ranks", "--grouping", "consecutive",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    received = []
    for rank in range(4):
        lacking = 0
        for rows, *rest in SHAPES:
            at = np.arange(rows)
            has, wants = (at // 4) % 4 == rank, at * 2 // rows == rank % 2
            lacking += int((wants & ~has).sum()) * math.prod(rest) * 4
        received.append(lacking)
    [worst] = re.findall(r"planned, consecutive groups +([\d.,]+) (kB|MB|B)", done.stdout)
    assert float(worst[0]) * {"B": 1, "kB": 1e3, "MB": 1e6}[worst[1]] == pytest.approx(
        max(received), abs=6
    ), done.stdout


def test_their_sharding_is_planned_as_they_say(installed, folder):
    shapes = {"vocab_size": 32000, "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
              "num_key_value_heads": 32, "intermediate_size": 11008}  # fmt: skip
    done = hybridflow(
        installed, folder, "plan", "tinted.toml", "--cluster", "h200-141gb:1x8", *THEIRS, "algorithm.prompts=64",
        *(f"actor.model.config.{key}={value}" for key, value in shapes.items()), "rollout.at_once=8",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    layer = (
        4 * 4096 * 4096 + 3 * 4096 * 11008 + 3 * 4096 + 2 * 4096
    )  # q, k, v with biases and o, the MLP, two norms
    parameters = 32 * layer + 2 * 32000 * 4096 + 4096
    resting = (
        16 * parameters / 8 / 1e9
    )  # weights, two moments and gradients in float32, on eight ranks
    assert "dp 8" in done.stdout and "does not say" not in done.stdout
    assert f"{resting:.1f}" in done.stdout


WRONG = [
    [
        ('run.trackers=[{ name = "ledger", fil = "x" }]', "run.trackers.0.fil: unknown key; did you mean `file`?"),
        ('placement={ name = "auto", cluster = "2", planner = { name = "first", device = 1 } }', "did you mean `devices`?"),
        ("rollout.at_ones=2", "rollout.at_ones: unknown key; did you mean `at_once`?"),
    ],
    [
        ('run.trackers=["ledger"]', "run.trackers.file: required, but missing"),
        ("actor.layout.tp=2", "actor.layout.tp: is 2, and the backend striped has the axes dp; set it to 1"),
    ],
    [('placement={ name = "auto", cluster = "many", planner = "first" }', "takes a number of devices")],
]  # fmt: skip
"""Overrides that are wrong together, each with what is said of it."""


@pytest.mark.parametrize(
    "wrong", [WRONG[0], *(pytest.param(wrong, marks=matrix) for wrong in WRONG[1:])],
    ids=["unknown", "missing", "placement"],
)  # fmt: skip
def test_what_is_wrong_with_their_settings_is_told_before_anything_starts(installed, folder, wrong):
    overrides = [override for override, _ in wrong]
    done = hybridflow(
        installed, folder, "run", "tinted.toml", *THEIRS, "pools.main=[2]", *overrides
    )
    assert done.returncode == 1, done.stdout + done.stderr
    for _, said in wrong:
        assert said in done.stderr
    assert not (folder / "runs").exists()


def test_a_command_of_theirs_is_one_of_ours(installed, tmp_path):
    assert (
        hybridflow(installed, tmp_path, "greet", "--whom", "reader").stdout == "good day, reader\n"
    )
    assert "Say good day to somebody." in hybridflow(installed, tmp_path, "--help").stdout
    wrong = hybridflow(installed, tmp_path, "greet", "--who", "x")
    assert wrong.returncode == 2 and "unknown argument --who" in wrong.stderr


CARELESS = """
from hybridflow.core import Command, CommandCapabilities

def no_command():
    pass

class Half(Command):
    capabilities = CommandCapabilities(summary="Does 50% of it.")
    def add_arguments(self, parser):
        raise RuntimeError("no arguments today")
    def run(self, arguments):
        return 0

class Nothing(Command):
    capabilities = "runs"
"""


def careless(folder: Path, *points: str) -> Path:
    """A site folder with the package `careless`, which has these entry points."""
    site = folder / "site"
    info = site / "careless-1.0.dist-info"
    info.mkdir(parents=True)
    (site / "careless.py").write_text(CARELESS)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: careless\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[hybridflow]\n" + "\n".join(points) + "\n")
    return site


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("careless:no_command", "is no class derived from Command"),
        ("careless:Nothing", "Nothing lacks run of Command"),
        ("careless:Half", "does not start: RuntimeError: no arguments today"),
    ],
)
def test_a_command_that_keeps_no_contract_hurts_no_other(installed, tmp_path, target, said):
    both = os.pathsep.join((installed, str(careless(tmp_path, f"command.odd = {target}"))))
    odd = hybridflow(both, tmp_path, "odd")
    assert odd.returncode == 1 and said in odd.stderr, odd.stderr
    assert "Traceback" not in odd.stderr
    assert hybridflow(both, tmp_path, "greet").stdout == "good day, world\n"
    assert hybridflow(both, tmp_path, "--help").returncode == 0


@matrix
def test_a_transport_that_does_not_load_is_left_out_of_auto(installed, folder):
    both = os.pathsep.join((installed, str(careless(folder, "transport.gone = nowhere:Thing"))))
    assert len(run(both, folder, "left-out", "runtime=inline")) == 2


@matrix
def test_a_written_plan_keeps_the_planner(installed, folder):
    planner = (
        'placement = { name = "auto", cluster = "2", planner = { name = "first", devices = 2 } }'
    )
    text = CONFIG.replace("[actor]", '[actor]\nbackend.name = "striped"').lstrip()
    (folder / "planned.toml").write_text(f'rollout.name = "halves"\n{planner}\n{text}')
    done = hybridflow(installed, folder, "plan", "planned.toml", "--write", "w.toml")
    assert done.returncode == 0, done.stdout + done.stderr
    with open(folder / "w.toml", "rb") as file:
        placement = tomllib.load(file)["placement"]
    assert placement == {
        "name": "given",
        "cluster": "2",
        "planner": {"name": "first", "devices": 2},
    }
    shown = hybridflow(installed, folder, "show", "w.toml")
    assert shown.returncode == 0, shown.stderr


def test_broken_and_duplicate_commands_are_told_and_hurt_no_other(installed, tmp_path):
    site = careless(
        tmp_path, "command.broken = nowhere:Thing", "command.plan = strangers.greet:Greet"
    )
    both = os.pathsep.join((installed, str(site)))
    broken = hybridflow(both, tmp_path, "broken")
    assert broken.returncode == 1 and "No module named 'nowhere'" in broken.stderr
    claimed = hybridflow(both, tmp_path, "plan", "x.toml", "--cluster", "a100-80gb:1x1")
    assert claimed.returncode == 1
    assert "claimed by careless 1.0 and by hybridflow" in claimed.stderr
    assert hybridflow(both, tmp_path, "greet").stdout == "good day, world\n"
    listed = hybridflow(both, tmp_path, "plugins", "command")
    assert listed.returncode == 0 and "claimed by" in listed.stdout
    helped = hybridflow(both, tmp_path, "--help")
    assert (
        helped.returncode == 0
        and "does not load" in helped.stdout
        and "Say good day" in helped.stdout
    )
