"""Combinations of sections that cannot work, and what is said to do."""

from __future__ import annotations

import attrs
import pytest
import torch
from helpers.job_texts import BASE, MODEL, WITHOUT_ALGORITHM, WITHOUT_REWARD
from helpers.jobs import job, problem, problems

from hybridflow.backends.fsdp.config import FSDPConfig
from hybridflow.backends.transformers.config import TransformersEngineConfig
from hybridflow.backends.transformers.engine import TransformersEngine
from hybridflow.core.contracts.capabilities import EngineCapabilities
from hybridflow.core.contracts.rollout import EngineSettings
from hybridflow.core.contracts.runtime import ResourcePool
from hybridflow.core.contracts.training import TrainingSettings
from hybridflow.core.job.sections import EnvironmentSection
from hybridflow.core.plugins import Registry
from hybridflow.core.values.parallel import ParallelLayout
from hybridflow.settle.checks import cross_checks, deterministic, staleness


@pytest.mark.parametrize(
    ("overrides", "text", "key", "said"),
    [
        (
            ["run.max_staleness=5", "algorithm.correction=mask"],
            BASE,
            "run.max_staleness",
            "may be at most 4 steps ahead",
        ),
        (["pools.main=[2]"], BASE, "pools", "pools.main = [1]"),
        (["pools={main=[1], spare=[1]}"], BASE, "pools.spare", "no role uses it"),
        (["sampling.stop_tokens=[3, 16]"], BASE, "sampling.stop_tokens", "[16]"),
        (["algorithm={name='sft', batch_size=4}"], WITHOUT_ALGORITHM, "data.response", "'sft'"),
        (["algorithm.pretrain_coef=0.1"], BASE, "pretrain", "give [pretrain], as [data]"),
        (
            ["validation.data.source=jsonll", "validation.every=1"],
            BASE,
            "validation.data.source",
            "did you mean 'jsonl'?",
        ),
        (["tokenizer.name=huggingfac"], BASE, "tokenizer.name", "did you mean 'huggingface'?"),
    ],
)
def test_what_cannot_work_is_refused_by_its_key_with_what_to_do(overrides, text, key, said):
    found = problem(*overrides, text=text)
    assert found.startswith(key) and said in found


GPUS = ["run.device=cuda", "run.deterministic=true", "rollout.kv_memory_gb=2.0"]


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["rollout.kv_memory_gb=0.0"], "actor's engine transformers may vary: its cache"),
        (["rollout.own_process=true"], "actor's engine transformers may vary: its own process"),
        (["actor.backend.compile=true"], "actor's backend fsdp may vary: compile = true"),
    ],
)
def test_what_varies_on_gpus_is_refused_where_bits_must_repeat(monkeypatch, overrides, said):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert f"run.deterministic: is true, and {said}" in "\n".join(problems(*GPUS, *overrides))
    assert job(*GPUS[:1], *overrides).device == "cuda"


def test_plugins_that_do_not_say_that_their_bits_repeat_vary(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(FSDPConfig, "varies", TrainingSettings.varies)
    monkeypatch.setattr(TransformersEngineConfig, "varies", EngineSettings.varies)
    backend, engine = problems(*GPUS)
    assert backend.endswith("(TrainingSettings.varies)") and engine.endswith(
        "(EngineSettings.varies)"
    )


def test_a_run_whose_bits_repeat_is_taken_on_gpus_and_every_run_on_cpus(monkeypatch):
    assert job("run.deterministic=true", "actor.backend.compile=true").run.deterministic
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    on_gpus = job(*GPUS)
    assert on_gpus.device == "cuda"
    # The same run, with tools that answer when they do
    tools = EnvironmentSection(name="tools")
    ((key, said),) = deterministic(attrs.evolve(on_gpus, environment=tools))
    assert key == "run.deterministic" and "turns of an environment" in said


APART = ["pools={main=[1], engines=[1]}", "actor.generation.pool=engines"]
CORRECTED = "algorithm.correction=mask"


def test_engines_that_never_stop_have_a_process_for_data_and_rewards():
    never_stop = ("run.max_staleness=2", CORRECTED, *APART)
    added = job(*never_stop)
    assert added.pools["cpu"] == ResourcePool("cpu", (1,), "cpu")
    assert (added.reward_pool, added.data_pool) == ("cpu", "cpu")
    assert (
        added.carried_apart == {"actor"} and not job("run.max_staleness=2", CORRECTED).carried_apart
    )
    assert "cpu" not in job("run.max_staleness=1", CORRECTED, *APART).pools

    # One that is there is taken; a pool of that name with models is left alone.
    judges = "pools={main=[1], engines=[1], judges={devices=[1], device='cpu'}}"
    given = job(*never_stop, judges)
    assert (given.reward_pool, set(given.pools)) == ("judges", {"main", "engines", "judges"})
    engines = ("pools={main=[1], cpu=[1]}", "actor.generation.pool=cpu")
    models = job("run.max_staleness=2", CORRECTED, *engines)
    assert models.pools["cpu-2"].device == "cpu" and models.data_pool == "cpu-2"


def test_the_policy_that_generated_as_the_old_one_needs_no_correction():
    ahead = job("run.max_staleness=1", "algorithm.old_logprobs=rollout", *APART)
    assert ahead.algorithm.corrects_staleness


def test_an_old_policy_by_lag_needs_lags_and_a_correction():
    by_lag = ["algorithm.old_logprobs=interpolated", "algorithm.epochs=2"]
    assert "reads by how many steps a token lags; set 1 or more" in problem(*by_lag)
    assert "does not weigh them" in problem(*by_lag, "run.max_staleness=1", *APART)
    assert job(*by_lag, "run.max_staleness=1", CORRECTED, *APART).run.max_staleness == 1


def test_older_weights_need_a_correction():
    plain = problem("run.max_staleness=1", *APART)
    assert problem("run.max_staleness=1") == plain
    assert 'set algorithm.correction = "truncate" or "mask"' in plain
    ahead = job("run.max_staleness=1", CORRECTED, *APART)
    assert (ahead.reward_pool, ahead.data_pool) == ("engines", "engines")
    now = job(CORRECTED, *APART)
    assert (now.reward_pool, now.data_pool) == ("main", "main")
    assert now.untrained_pools == {"engines"}
    assert job("run.max_staleness=4", CORRECTED).reward_pool == "main"
    assert "sequences may be at most 4 steps ahead" in problem("run.max_staleness=5", CORRECTED)


@pytest.mark.parametrize(
    ("in_flight", "staleness", "apart", "carried"),
    [
        ("auto", 0, True, False),
        ("auto", 1, True, False),
        ("no", 1, True, False),
        ("recompute", 1, True, True),
        ("auto", 2, True, True),
        ("keep", 1, True, True),
        ("recompute", 0, True, False),
        ("auto", 1, False, True),
    ],
)
def test_responses_go_on_by_newer_weights_where_these_may_come_meanwhile(
    in_flight, staleness, apart, carried
):
    settings = [f"run.in_flight={in_flight}", f"run.max_staleness={staleness}", CORRECTED]
    made = job(*settings, *(APART if apart else ()))
    assert made.carried == ({"actor"} if carried else set())


def test_what_newer_weights_cannot_do_is_refused():
    no = problem("run.max_staleness=2", "run.in_flight=no", CORRECTED, *APART)
    assert 'run.in_flight: is "no", and run.max_staleness is 2' in no
    made = job("run.max_staleness=2", CORRECTED, *APART)
    played = attrs.evolve(made, environment=EnvironmentSection(name="tools"))
    [(key, said)] = staleness(played)
    assert key == "run.in_flight" and "turns of an environment cannot go on" in said
    repeated = ["run.deterministic=true", CORRECTED, *APART]
    job("run.max_staleness=1", *repeated)
    varies = problem("run.max_staleness=2", *repeated)
    assert "run.deterministic: is true, and which tokens are made by which weights" in varies


def test_keys_and_values_stay_where_an_engine_of_its_own_can_keep_them(monkeypatch):
    keep = ["run.max_staleness=2", "run.in_flight=keep", CORRECTED]
    assert job(*keep, *APART).models["actor"].spec.keeps_cache
    assert not job("run.max_staleness=2", CORRECTED, *APART).models["actor"].spec.keeps_cache
    here = problem(*keep)
    assert "take turns with its training, which has their cache meanwhile" in here
    monkeypatch.setattr(TransformersEngine, "inflight", False)
    other = problem(*keep, *APART)
    assert "the engine transformers takes no newer weights while sequences run; set" in other


def test_turns_of_an_environment_are_not_carried_over():
    made = job("run.max_staleness=2", CORRECTED)
    played = attrs.evolve(made, environment=EnvironmentSection(name="tools"))
    [(key, said)] = staleness(played)
    assert key == "run.max_staleness" and "turns of an environment cannot be carried" in said


def test_engines_beside_another_trained_model_cannot_run_ahead():
    critic = ["algorithm.name=ppo", "algorithm.group_size=1", "critic.pool=engines"]
    found = problem("run.max_staleness=1", CORRECTED, *APART, *critic)
    assert "pool 'engines', in which actor generates, also trains critic" in found


@pytest.mark.parametrize("name", ["sft", "dpo", "reward_model", "cost_model"])
def test_an_algorithm_that_generates_nothing_cannot_run_ahead(name):
    size = "batch_size" if name == "sft" else "pairs_per_step"
    role = {"reward_model": "reward", "cost_model": "cost"}.get(name, "actor")
    found = problems(
        "run.max_staleness=1",
        f"{role}={{model={{config={MODEL}}}}}",
        f"algorithm={{name='{name}', {size}=4}}",
        "data={source='arithmetic', response='{answer}', rejected='{answer}1', unsafe=['a', 'b']}",
        text=WITHOUT_ALGORITHM.replace('reward.function = "exact_match"\n', ""),
    )
    refused = [said for said in found if said.startswith("run.max_staleness")]
    assert refused == [
        f"run.max_staleness: is 1, and algorithm '{name}' trains no model that generates; set 0"
    ]


def test_a_run_folder_that_cannot_be_is_refused(tmp_path):
    (tmp_path / "taken").write_text("")
    assert "is a file" in problem("run.folder=taken")


def test_more_than_one_node_needs_a_cluster():
    assert "give the cluster's runtime.address" in problem("runtime=ray", "pools.main=[2, 2]")
    job("runtime={name='ray', address='auto'}", "pools.main=[2, 2]", "run.device=cpu")


def test_devices_that_this_machine_does_not_have_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "run.device: is cuda" in problem("run.device=cuda")
    job("run.device=cuda", "runtime={name='ray', address='auto'}")
    cluster = "runtime={name='ray', address='head:6379'}"
    assert "run.device: is auto, and the run is for the cluster" in problem(cluster)
    assert job(cluster, "run.device=cpu").device == "cpu"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert job(cluster).device == "cuda"
    found = problem("runtime=ray", "pools.main=[4]")
    assert "pools: have 4 devices in all, and this machine has 2 CUDA devices" in found
    assert job("runtime=ray", "pools.main=[2]").device == "cuda"
    assert job("runtime=ray", "pools.main=[4]", "run.device=cpu").device == "cpu"
    judges = "pools={main=[2], judges={devices=[4], device='cpu'}}"
    assert job("runtime=ray", judges, "reward.pool=judges").device == "cuda"  # they need no GPU


def test_an_engine_that_does_not_work_on_the_device_is_refused(monkeypatch):
    only = EngineCapabilities(devices=frozenset({"cuda"}))
    monkeypatch.setattr(Registry, "engine_capabilities", lambda self, name: only)
    assert "works on cuda, and run.device is cpu" in problem("run.device=cpu")


def test_a_step_or_a_mini_batch_smaller_than_dp_is_refused():
    eight = ("runtime=ray", "pools.main=[8]")
    assert "dp is 8, and a step has 4 sequences" in problem(*eight, "algorithm={name='grpo', prompts_per_step=2, "
        "group_size=2}", text=WITHOUT_ALGORITHM)  # fmt: skip
    found = problem(*eight, "algorithm.mini_batch_size=4")
    assert found.startswith("algorithm.mini_batch_size: is 4") and "set 8 or more" in found
    job(*eight, "algorithm.mini_batch_size=8")


def test_prompts_and_responses_must_fit_the_models_positions():
    found = problem("sampling.max_tokens=25")
    assert "exceed the model's 32 positions" in found and "data.max_prompt_tokens" in found
    longer = problem("validation.data.max_prompt_tokens=30")
    assert "validation.data.max_prompt_tokens" in longer


def test_biases_are_of_tokens_of_the_model():
    two = job('sampling.logit_bias={"3" = 1, "15" = 0.5}').sampling
    assert two.logit_bias == ((3, 1.0), (15, 0.5))
    found = problem('sampling.logit_bias={"3" = 1, "16" = 2}')
    assert found.startswith("sampling.logit_bias: [16] ") and "0 to 15" in found


def test_the_tokenizer_must_come_from_somewhere():
    text = BASE.replace('tokenizer.characters = "0123456789+="', "")
    assert problem(text=text).startswith("tokenizer: the models have no folder to take one from")
    assert problem("tokenizer.path=nowhere", text=text).startswith("tokenizer.path: ")
    assert "tokenizer: path and characters are given" in problems("tokenizer.path=nowhere")[0]


def test_validation_needs_something_to_measure():
    text = WITHOUT_REWARD.replace('"grpo", prompts_per_step = 4, group_size = 4', '"sft"')
    responses = "data.response={answer}"
    assert "needs a reward to score by" in problem(responses, "validation.every=1", text=text)
    job(responses, "validation.generate=false", text=text)
    assert "there are no responses" in problem("validation.generate=false")
    for wrong in ("validation.every=0", "validation.generate=false"):
        found = problems("validation.stop_at=0.9", wrong, "data.response='{answer}'")
        assert any("stop_at is compared with the score" in said for said in found)
    assert job("validation.stop_at=0.9", "validation.every=1").validation.stop_at == 0.9
    found = problem("validation.data.sourc=jsonl")
    assert found.startswith("validation.data.sourc: unknown key")


def test_a_model_that_generates_has_no_context_parallelism():
    made = job()
    actor = attrs.evolve(made.models["actor"], layout=ParallelLayout(cp=2))
    [found] = cross_checks(attrs.evolve(made, models={"actor": actor}), set())
    axes = "a role that generates has the axes dp, tp and pp"
    assert found == ("actor.layout", f"{axes}, got cp 2; set it to 1")


def test_a_check_is_left_out_where_a_section_that_it_reads_has_problems():
    made = job()
    stale = attrs.evolve(made, run=attrs.evolve(made.run, max_staleness=2))
    assert len(cross_checks(stale, set())) == 1
    assert cross_checks(stale, {"run"}) == [] and len(cross_checks(stale, {"data"})) == 1


def test_pairs_need_a_worse_response_and_cost_models_what_is_unsafe():
    answers, cost, text = "data.response={answer}", f"cost.model.config={MODEL}", WITHOUT_ALGORITHM
    found = problem("algorithm={name='dpo', pairs_per_step=4}", answers, text=text)
    assert found.startswith("data.rejected: algorithm 'dpo' learns from pairs")
    found = problems("algorithm={name='cost_model', pairs_per_step=4}", cost, answers, text=text)
    assert any(said.startswith("data.unsafe: algorithm 'cost_model' must know") for said in found)
