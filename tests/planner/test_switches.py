"""Settings beside the placement: which make a config fit, and what each is worth.

What a switch does is checked against the same config with the setting written into it.
"""

from __future__ import annotations

import itertools
import tomllib
from pathlib import Path

import pytest
from helpers.paths import matrix

from hybridflow.cli.plan import plan as print_plan, unplaced_jobs
from hybridflow.core.contracts.planner import Line
from hybridflow.planner.auto import AutoMapping
from hybridflow.planner.jobs import plan_job
from hybridflow.planner.search import NothingFitsError
from hybridflow.planner.switches import Switches, hinted
from hybridflow.settle.launch import load_config

PLANS = Path(__file__).resolve().parents[2] / "examples" / "plans"
WHOLE = ["actor.backend.activation_checkpointing=false"]
"""Keeps all activations, which is not the default on CUDA: then not all of the plans fit."""


def planned(path, cluster, overrides=()):
    """The job of a config that is planned for a cluster."""
    [job] = unplaced_jobs(path, overrides)[0]
    return plan_job(job, cluster)


def seconds_of(path, cluster, lines):
    """The step of a config with these lines; None where it fits nowhere."""
    overrides = [line.replace(" = ", "=") for line in lines]
    try:
        return planned(path, cluster, overrides).best().seconds
    except NothingFitsError:
        return None


@pytest.mark.parametrize(
    ("name", "cluster", "expected"),
    [
        # 65 GB are the least that training takes: an engine that stays has 7 GB, and is slow.
        ("7b_grpo", "h100-80gb:1x8", {"actor.generation.keep = false"}),
        # 2 x 70e9 parameters x 12 bytes / 64 are 26 GB at rest: it is the activations that lack room.
        pytest.param(
            "70b_ppo",
            "h100-80gb:8x8@3200",
            {
                "actor.backend.activation_checkpointing = true",
                "critic.backend.activation_checkpointing = true",
            },
            marks=matrix,
        ),
        (
            "30b_a3b_grpo",
            "h100-80gb:2x8@3200",
            {"actor.generation.keep = false", "actor.backend.activation_checkpointing = true"},
        ),
        ("30b_a3b_grpo", "h200-141gb:2x8@3200", {"actor.generation.keep = false"}),
        ("05b_grpo", "h200-141gb:1x1", set()),
    ],
)
def test_the_settings_that_make_a_config_fit_are_named(name, cluster, expected):
    path = PLANS / f"{name}.toml"
    switches = Switches(planned(path, cluster, WHOLE))
    trial = switches.that_fit()
    lines = switches.lines(trial.changes)
    assert set(lines) == expected

    # The config with these lines fits, as fast as it was said. Without any of them it does not, or
    # is more than a quarter slower.
    assert seconds_of(path, cluster, [*WHOLE, *lines]) == pytest.approx(trial.seconds)
    for line in lines:
        without = [other for other in lines if other != line]
        # A critic takes from the actor what its own table leaves out.
        role, _, key = line.partition(".")
        if role == "critic":
            without.append(f"critic.{key.replace('true', 'false')}")
        if role == "actor" and f"critic.{key}" in lines:
            continue
        left_out = seconds_of(path, cluster, [*WHOLE, *without])
        assert left_out is None or left_out > 1.25 * trial.seconds


def test_nothing_smaller_fits_by_brute_force(config):
    """Every subset of three switches, each written into the config."""
    cluster = "a100-40gb:1x8"
    overrides = ['rollout={ name = "vllm", dtype = "bfloat16", gpu_memory = 0.5 }']
    switches = Switches(planned(config, cluster, overrides))
    found = set(switches.lines(switches.that_fit().changes))
    tried = {
        "actor.generation.keep = false": None,
        "actor.offload = true": None,
        "critic.offload = true": None,
        "actor.backend.activation_checkpointing = true": None,
        "critic.backend.activation_checkpointing = true": None,
    }
    fit = {}
    for count in range(len(tried) + 1):
        for lines in itertools.combinations(tried, count):
            written = [*overrides, *(line.replace(" = ", "=") for line in lines)]
            # What the critic would take from the actor is written out.
            for key in ("offload", "backend.activation_checkpointing"):
                if f"actor.{key} = true" in lines and f"critic.{key} = true" not in lines:
                    written.append(f"critic.{key}=false")
            if (seconds := seconds_of(config, cluster, written)) is not None:
                fit[frozenset(lines)] = seconds
    assert frozenset(found) in fit
    most = 1.25 * switches.that_fit().seconds
    assert not any(one < found and seconds <= most for one, seconds in fit.items())


def test_a_trial_is_the_config_with_the_setting(config):
    cluster = "a100-80gb:1x8"
    engine = ['rollout={ name = "vllm", dtype = "bfloat16" }']
    switches = Switches(planned(config, cluster, engine))
    start = switches.trial({})
    seen = 0
    for key, trial in switches.one_by_one(start):
        lines = switches.lines({key: trial.values[key]})
        expected = seconds_of(config, cluster, [*engine, *lines])
        assert trial.seconds == (pytest.approx(expected) if expected else float("inf")), lines
        seen += 1
    # Four roles' offload and micro-batches, two settings of two backends, keep, and the engine's.
    assert {key for key in switches.choices if key[0] in ("rollout", "actor")} == {
        ("actor", "offload"),
        ("actor", "backend.reshard_after_forward"),
        ("actor", "backend.activation_checkpointing"),
        ("actor", "backend.precision"),
        ("actor", "micro_batch_tokens"),
        ("actor", "generation.keep"),
        ("rollout", "max_sequences"),
        ("rollout", "gpu_memory"),
        ("rollout", "dtype"),
    }
    assert seen > len(switches.choices)


def test_other_roles_keep_what_they_would_take_from_the_actor(config):
    without = ["actor.backend.activation_checkpointing=false"]
    switches = Switches(planned(config, "a100-80gb:1x8", without))
    lines = switches.lines({("actor", "offload"): True})
    assert lines[0] == "actor.offload = true"
    assert set(lines[1:]) == {"critic.offload = false", "ref.offload = false"}
    tables = switches.tables({("actor", "backend.activation_checkpointing"): True})
    assert tables["actor"]["backend"] == {"name": "fsdp", "activation_checkpointing": True}
    assert tables["critic"]["backend"] == {"name": "fsdp", "activation_checkpointing": False}


def test_the_fastest_together_is_at_least_as_fast_as_each_alone(config):
    switches = Switches(planned(config, "a100-80gb:1x8"))
    start = switches.trial({})
    best = switches.fastest(start)
    alone = min(trial.seconds for _, trial in switches.one_by_one(start))
    assert best.seconds <= alone <= start.seconds
    expected = seconds_of(config, "a100-80gb:1x8", switches.lines(best.changes))
    assert best.seconds == pytest.approx(expected)


def test_where_no_settings_help_the_error_says_so():
    plan = planned(PLANS / "70b_ppo.toml", "h100-80gb:1x8")
    assert Switches(plan).that_fit() is None
    [first, *_] = hinted(plan, NothingFitsError(["too large"])).problems
    assert first.startswith("too large; not even keep = false, offload, recomputation, bfloat16")
    with pytest.raises(NothingFitsError, match="not even"):
        AutoMapping().plan(plan.job, "h100-80gb:1x8")


def test_a_run_that_places_itself_changes_no_settings_and_names_them():
    [job] = unplaced_jobs(PLANS / "30b_a3b_grpo.toml", WHOLE)[0]
    remedy = r"It fits with actor\.backend\.activation_checkpointing = true"
    with pytest.raises(NothingFitsError, match=remedy):
        AutoMapping().plan(job, "h100-80gb:2x8@3200", alternatives=0)


def test_plan_writes_the_settings_that_make_it_fit(tmp_path):
    cluster = "h100-80gb:2x8@3200"
    source = tmp_path / "whole.toml"
    backend = 'backend = { name = "fsdp", activation_checkpointing = false }'
    text = (PLANS / "30b_a3b_grpo.toml").read_text()
    source.write_text(text.replace('backend = "fsdp"', backend))
    target = tmp_path / "fits.toml"
    print_plan(source, cluster=cluster, write=str(target))
    text = target.read_text()
    assert source.read_text().splitlines()[0] in text
    assert tomllib.loads(text)["actor"]["backend"]["activation_checkpointing"] is True
    assert seconds_of(target, cluster, []) is not None


def test_idle_memory_is_said_with_the_sequences_that_it_holds():
    """By hand: 24 layers x 2 heads x 64 x 2 (keys, values) x 2 bytes are 12,288 bytes of a token."""
    path = PLANS / "05b_grpo.toml"
    [job] = unplaced_jobs(path, ["actor.generation.keep=false"])[0]
    plan = AutoMapping().plan(job, "h200-141gb:1x1")
    lines = [block.text for block in plan.explanation if isinstance(block, Line)]
    [room] = [line for line in lines if "has room for" in line]
    # 40% of 141 GB less 0.99 GB of weights, by 1,536 tokens of 12,288 bytes.
    expected = (0.4 * 141e9 - 0.988e9) / (1536 * 12288)
    assert "1024 sequences and decodes 256 at once" in room
    found = int(room.partition("has room for ")[2].split()[0])
    assert found == pytest.approx(expected, rel=1e-3)
    [idle] = [line for line in lines if "are idle while it generates" in line]
    graphs = 1e9  # beside vLLM's share
    left = 0.9 * 141e9 - 0.494e9 * 12 - 0.4 * 141e9 - graphs
    assert float(idle.split(": ")[2].split()[0]) == pytest.approx(left / 1e9, abs=0.1)


def test_a_reward_model_computes_as_the_actor_does(config):
    [job] = load_config(config, ['actor.backend={ name = "fsdp", precision = "bf16" }'])
    assert job.models["reward"].spec.backend_config.precision == "bf16"
    [own] = load_config(
        config,
        ['actor.backend={ name = "fsdp", precision = "bf16" }', "reward.backend.precision=fp32"],
    )
    assert own.models["reward"].spec.backend_config.precision == "fp32"
    [adapted] = load_config(config, ['actor.backend={ name = "fsdp", lora = { rank = 4 } }'])
    assert adapted.models["reward"].spec.backend_config.lora is None


def test_an_engine_without_cuda_graphs_decodes_no_faster_than_the_host_launches():
    """28 layers x 300 us x 3,072 steps are 25.8 s for each turn of the sequences at once."""
    path = PLANS / "7b_grpo.toml"
    cluster = "h200-141gb:1x8"
    fits = ["actor.generation.keep=false"]
    graphs = planned(path, cluster, fits).best()
    eager = planned(path, cluster, [*fits, "rollout.eager=true"]).best()
    assert eager.stages[0] >= 28 * 300e-6 * 3072
    assert eager.seconds >= graphs.seconds
