"""`placement = "auto"`, and configs that say what there is and do not fit there."""

from __future__ import annotations

import pytest
from helpers.configs import CONFIG, OWN_CLUSTER as OWN, ppo_config, tiny_run

from hybridflow.cli.show import show
from hybridflow.core.errors import ConfigError
from hybridflow.settle.launch import load_config, run


@pytest.fixture
def config(tmp_path):
    return ppo_config(tmp_path)


def test_auto_takes_the_planners_pools_and_layouts(config, capsys):
    given = ["placement=auto", "placement.cluster=a100-80gb:1x4"]
    [job] = load_config(config, given)
    assert sum(pool.world for pool in job.pools.values()) == 4
    for role, placed in job.models.items():
        assert placed.layout.world == job.pools[placed.pool].world, role
    show(config, given)
    shown = capsys.readouterr().out
    assert 'placement.name     "auto"' in shown
    assert any(
        line.split()[0] == "actor.layout.tp" and line.endswith("placement")
        for line in shown.splitlines()
        if line.strip()
    )


def test_auto_places_every_stage(config):
    config.write_text(
        CONFIG + "[stages.one]\nrun.steps = 1\n[stages.two]\nalgorithm.prompts_per_step = 512\n"
    )
    jobs = load_config(config, ["placement=auto", "placement.cluster=a100-80gb:1x8"])
    assert [sum(pool.world for pool in job.pools.values()) for job in jobs] == [8, 8]


def test_auto_needs_to_know_what_there_is(config):
    with pytest.raises(ConfigError, match=r"placement: auto needs placement\.cluster"):
        load_config(config, ["placement=auto"])


def test_a_config_that_does_not_fit_its_cluster_is_refused_with_what_does(config):
    fits = ["placement.cluster=a100-80gb:1x2"]
    load_config(config, fits)
    too_large = [
        "actor.micro_batch_tokens=2000000",
        "algorithm.prompts_per_step=8192",
        "algorithm.mini_batch_size=8192",
    ]
    with pytest.raises(ConfigError) as caught:
        load_config(
            config,
            [
                *fits,
                *too_large,
                "reward.micro_batch_tokens=4096",
                "placement.cluster=a100-80gb:4x8",
            ],
        )
    said = str(caught.value)
    assert "per device while actor trains (" in said
    assert "this fits: " in said or "nothing fits: " in said
    with pytest.raises(ConfigError, match=r"asks for 2 devices, and there are 1"):
        load_config(config, ["placement.cluster=a100-80gb:1x1"])


def test_a_run_that_places_itself_runs(tmp_path):
    (tmp_path / "cluster.toml").write_text(OWN)
    config = tiny_run(tmp_path, tmp_path / "cluster.toml")
    (tmp_path / "tiny.toml").write_text(config.replace('"given"', '"auto"'))
    assert run(tmp_path / "tiny.toml").step == 3


def test_only_what_is_known_not_to_fit_is_refused(config):
    apart = [
        "pools.rollout=[2]",
        "actor.generation={pool='rollout'}",
        "placement.cluster=a100-80gb:1x8",
    ]
    load_config(config, apart)  # engines in a pool of their own are not planned
    kinds = config.parent / "two.toml"
    kinds.write_text(
        '[[nodes]]\ndevice = "l4-24gb"\nper_node = 1\n[[nodes]]\ndevice = "a100-80gb"\nper_node = 8\n'
    )
    load_config(
        config, [f"placement.cluster={kinds}"]
    )  # two devices: there are only of the second kind


def test_auto_keeps_what_is_not_a_size_and_needs_no_sizes(config):
    given = ["placement=auto", "placement.cluster=a100-80gb:1x8"]
    odd = [
        "actor.layout.tp=4",
        "actor.layout.order='dp-tp-cp-pp'",
        "actor.generation={tp=3, grouping='consecutive', keep=false}",
    ]
    [job] = load_config(config, [*given, *odd])
    section = job.models["actor"].section
    assert (section.layout.order, section.generation.grouping, section.generation.keep) == (
        "dp-tp-cp-pp",
        "consecutive",
        False,
    )
    assert job.models["actor"].layout.world == job.pools["main"].world


def test_auto_in_a_stage_leaves_the_others_as_they_are(config):
    config.write_text(
        CONFIG.replace("main = [2]", "main = [2]\nextra = [1]")
        + "[stages.one]\nplacement = { name = 'auto', cluster = 'a100-80gb:1x8' }\n[stages.two.critic]\npool = 'extra'\n"
    )
    one, two = load_config(config, [])
    assert sum(pool.world for pool in one.pools.values()) == 8
    assert {n: p.world for n, p in two.pools.items()} == {"main": 2, "extra": 1} and two.models[
        "critic"
    ].pool == "extra"


@pytest.mark.parametrize(
    ("extra", "tp"),
    [
        (["actor.backend.lora={rank=8}"], {1}),
        (["actor.model.config.num_key_value_heads=2"], {1, 2}),
        (["actor.backend.replicas=4"], {1, 2}),
    ],
    ids=["lora", "kv-heads", "replicas"],
)  # fmt: skip
def test_layouts_are_those_that_the_backend_takes(config, extra, tp):
    steps = ["algorithm.prompts_per_step=8", "algorithm.mini_batch_size=8"]
    given = ["placement=auto", "placement.cluster=a100-80gb:1x8", *steps]
    [job] = load_config(config, [*given, *extra])
    layout = job.models["actor"].layout
    assert layout.tp in tp
    assert "replicas" not in extra[0] or layout.dp % 4 == 0


def test_planning_leaves_the_algorithm_as_it_was(config):
    given = [
        "algorithm={name='safe_rlhf', prompts_per_step=256}",
        "cost=exact_match",
        "placement.cluster=a100-80gb:1x8",
    ]
    [job] = load_config(config, given)
    assert not job.algorithm.multiplier.costs


def test_an_override_that_every_stage_replaces_is_told_under_auto_too(config):
    config.write_text(CONFIG + "[stages.one]\nrun.steps = 1\n[stages.two]\nrun.steps = 2\n")
    with pytest.raises(ConfigError, match=r"run\.steps: given on the command line"):
        load_config(config, ["placement=auto", "placement.cluster=a100-80gb:1x8", "run.steps=9"])
