"""From a job to what the planner asks of it, and back; and why a job does not fit."""

from __future__ import annotations

import re
from typing import Any

import attrs
import pytest
from helpers.configs import CONFIG, LLAMA, printed
from helpers.planned import engines, laid_out, planned

from hybridflow.core.contracts.planner import NotPlanned
from hybridflow.core.contracts.training import TrainingSettings
from hybridflow.core.errors import ConfigError
from hybridflow.core.job.job import PlacedModel
from hybridflow.kit.huggingface.shapes import llama_shape, shape_of
from hybridflow.planner import Cluster, Mapping, NothingFitsError, Task
from hybridflow.planner.auto import AutoMapping
from hybridflow.planner.cluster import RunsOn
from hybridflow.planner.jobs import Misfit, plan_job, plannable, planned_model, settings_of
from hybridflow.planner.memory import Bytes
from hybridflow.planner.pools import FilledPool, LayoutChoice, Option
from hybridflow.planner.search import PlannedPool
from hybridflow.settle.launch import load_config


def test_a_job_is_the_work_of_its_step_and_the_models_that_do_it(config):
    [job] = load_config(config, ["actor.offload=true", "critic.micro_batch_tokens=999"])
    found = plannable(job)
    assert (found.workload.prompt_tokens, found.workload.response_tokens) == (512, 512)
    assert Task("actor", "generate", 256) in found.workload.tasks
    assert Task("critic", "train", 64, 4) in found.workload.tasks  # mini-batches of 64
    models = {model.name: model for model in found.models}
    assert set(models) == {"actor", "critic", "ref", "reward"}
    assert (models["actor"].trained, models["actor"].offload, models["reward"].trained) == (
        True,
        True,
        False,
    )
    assert (models["actor"].size.head, models["critic"].size.head) == ("policy", "value")
    assert models["critic"].micro_batch_tokens == 999
    assert found.runs_on["actor"] == RunsOn("fsdp", "transformers", 16)
    assert found.runs_on["critic"] == RunsOn("fsdp", None, 16)


def test_engines_that_take_turns_with_the_training_have_later_steps_open(config):
    ahead = ["run.max_staleness=1", "algorithm.correction=mask"]
    [job] = load_config(config, ahead)
    assert plannable(job).workload.open_steps == 2
    apart = ["pools={main=[1], engines=[1]}", "actor.generation.pool=engines"]
    [job] = load_config(config, ahead + apart)
    assert plannable(job).workload.open_steps == 1


def test_what_is_not_accounted_for_is_remarked(config):
    start = CONFIG.index("[reward]")
    config.write_text(CONFIG[:start] + "[reward]\nfunction = 'exact_match'\n")
    [job] = load_config(config)
    assert plannable(job).remarks == ("reward functions take no time here: reward",)
    sft = CONFIG.replace(
        '"ppo", prompts_per_step = 256, mini_batch_size = 64', '"sft", batch_size = 8'
    )
    config.write_text(sft)
    [job] = load_config(config, ["data.response={answer}"])
    said = "the lengths of given responses are not known: sampling.max_tokens stands for them"
    assert plannable(job).remarks == (said,)


class Silent(TrainingSettings):
    """Of a backend that says the shapes of its models, and nothing of what they take."""

    def model_shape(self, hf_config):
        return shape_of(hf_config)


def with_settings(placed: PlacedModel, settings: Any) -> PlacedModel:
    """The same model with other settings of its backend."""
    return attrs.evolve(placed, spec=attrs.evolve(placed.spec, backend_config=settings))


def test_a_backend_that_does_not_say_what_a_model_takes_is_remarked(config):
    [job] = load_config(config)
    remarks: list[str] = []
    planned_model("critic", with_settings(job.models["critic"], Silent()), remarks)
    said = "critic: the backend fsdp does not say how it spreads a model; planned as whole per rank"
    assert said in remarks


def test_a_model_whose_shape_is_not_known_is_not_planned(config):
    [job] = load_config(config)
    models = job.models | {"critic": with_settings(job.models["critic"], None)}
    with pytest.raises(NotPlanned, match=r"^critic\.model: "):
        plannable(attrs.evolve(job, models=models))


def test_what_does_not_fit_is_said_with_the_phase_and_the_numbers(config):
    large = (
        LLAMA.replace("hidden_size = 2048", "hidden_size = 8192")
        .replace("5504", "28672")
        .replace("layers = 8", "layers = 80")
    )
    large = large.replace("heads = 16", "heads = 64, num_key_value_heads = 8")
    text = printed(config, [f"actor.model.config={large}"], cluster="a100-80gb:8x8")
    assert re.search(
        r"as the config says it: does not fit: it needs [\d.]+ TB per device while actor trains "
        r"\(actor's weights and optimizer [\d.]+ GB \+ .* \+ activations and logits ",
        text,
    )
    with pytest.raises(
        NothingFitsError,
        match=r"actor \(69\.0 billion",
    ):
        printed(config, [f"actor.model.config={large}"], cluster="a100-80gb:1x4")


def test_an_offloaded_model_that_does_not_fit_is_told_with_its_weights(config):
    wide = ["actor.backend.precision=fp32", "actor.backend.activation_checkpointing=false"]
    offload = ["actor.offload=true", "actor.micro_batch_tokens=4000000", "pools.main=[2]", *wide]
    said = re.search(
        r"it needs ([\d.]+) GB per device while actor trains \(.*actor's weights and optimizer "
        r"([\d.]+) GB",
        printed(config, offload, cluster="l4-24gb:1x8"),
    )
    # 0.47 billion parameters at 12 bytes, on two devices
    assert 5 / 2 < float(said[2]) < float(said[1]) / 2


def test_what_the_planner_has_no_figures_of_is_not_planned(config):
    apart = ["pools.rollout=[2]", "actor.generation={ pool = 'rollout' }"]
    [job] = load_config(config, apart)
    with pytest.raises(NotPlanned, match="its engines are in a pool of their own"):
        plan_job(job, "a100-80gb:1x8").written()


def test_more_devices_than_there_are_do_not_fit(config):
    [job] = load_config(config, ["pools.main=[4]"])
    with pytest.raises(Misfit, match="it asks for 4 devices, and there are 2"):
        plan_job(job, "a100-80gb:1x2").written()
    assert AutoMapping().problems(job, "a100-80gb:1x4") == []
    [said] = AutoMapping().problems(job, "a100-80gb:1x2")
    assert "it asks for 4 devices, and there are 2; this fits: " in said


def test_pools_are_put_on_the_kinds_of_nodes_where_a_step_is_fastest(config, tmp_path):
    kinds = "".join(
        f'[[nodes]]\ndevice = "{name}"\nper_node = 2\n' for name in ("l40s-48gb", "h100-80gb")
    )
    (tmp_path / "two.toml").write_text(kinds)
    [job] = load_config(config)
    both = plan_job(job, str(tmp_path / "two.toml")).written()
    each = [plan_job(job, f"{name}:1x2").written() for name in ("l40s-48gb", "h100-80gb")]
    assert [pool.kind for pool in both.pools] == [1]
    assert both.seconds == min(mapping.seconds for mapping in each) == each[1].seconds


def test_a_mapping_as_settings_has_a_table_for_each_pool_and_role():
    shape = llama_shape(64, 4, 4, 2, 16, 128, 64)

    def pool(devices: int, layout, *names: str, engine=None) -> PlannedPool:
        options = [Option(planned(name, shape), layout, 1.0, 1.0, Bytes(1.0)) for name in names]
        cuts = [engine] + [None] * (len(names) - 1)
        return PlannedPool(
            FilledPool(devices, (1.0, 1.0, 1.0), tuple(map(LayoutChoice, options, cuts))), 0
        )

    cluster = Cluster.of("a100-80gb", 3, 8)
    large = pool(16, laid_out(2, 2, 4), "actor", "ref", engine=engines(16, 1, 4))
    small = pool(4, laid_out(1, 1, 4), "critic")
    layout = {"pp": 2, "tp": 2, "dp": 4}
    assert settings_of(Mapping((large, small), 3.0, (1.0, 1.0, 1.0)), cluster) == {
        "pools": {"actor": [8, 8], "critic": [4]},
        "actor": {"pool": "actor", "layout": layout, "generation": {"pp": 1, "tp": 4}},
        "ref": {"pool": "actor", "layout": layout},
        "critic": {"pool": "critic", "layout": {"pp": 1, "tp": 1, "dp": 4}},
    }
    alone = settings_of(Mapping((small,), 3.0, (1.0, 1.0, 1.0)), cluster)
    assert alone["pools"] == {"main": [4]} and alone["critic"]["pool"] == "main"


def test_an_engines_own_limits_count(config):
    free = printed(config, cluster="a100-80gb:1x8")
    few = printed(config, ["rollout.max_sequences=1"], cluster="a100-80gb:1x8")
    step = r"generation +([\d.]+) s"
    assert float(re.search(step, few)[1]) > 2 * float(re.search(step, free)[1])


def test_a_runtime_of_one_rank_is_planned_on_one_device(config):
    assert "on 1 devices" in printed(
        config, ["runtime=inline", "pools.main=[1]"], cluster="h100-80gb:1x1"
    )
    said = "inline runs models on one rank, and the cluster has 8 devices; plan for one .h100-80gb:1x1., or set another"
    with pytest.raises(ConfigError, match=said):
        printed(config, ["runtime=inline", "pools.main=[1]"], cluster="h100-80gb:1x8")
    with pytest.raises(ConfigError, match=said):
        load_config(config, ["runtime=inline", "placement=auto", "placement.cluster=h100-80gb:1x8"])
