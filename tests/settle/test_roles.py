"""Roles: what they inherit from the actor, which model or reward they are, and where they go."""

from __future__ import annotations

import math

import pytest
from helpers.job_texts import ALGORITHM, BASE, MODEL, STAGES, WITHOUT_ALGORITHM, WITHOUT_REWARD
from helpers.jobs import job, jobs, model_folder, problem, problems

from hybridflow.algorithms.grpo import GRPO
from hybridflow.core.contracts.capabilities import EngineCapabilities
from hybridflow.core.contracts.role import Role
from hybridflow.core.plugins import Registry
from hybridflow.settle.roles import role_table

EXPERTS = "actor.model.config={model_type='qwen3_moe', num_experts=4, num_experts_per_tok=2}"


def test_ref_and_critic_inherit_what_they_do_not_give_from_the_actor():
    made = job("algorithm={name='ppo', prompts_per_step=4}", "actor.optimizer.lr=0.5", "critic.optimizer.lr=0.25",
               "actor.backend.precision=bf16", "critic.micro_batch_tokens=99", text=WITHOUT_ALGORITHM)  # fmt: skip
    actor, critic, ref = (made.models[name] for name in ("actor", "critic", "ref"))
    assert (
        critic.spec.model.hf_config == actor.spec.model.hf_config
        and critic.spec.model.kind == "value"
    )
    assert (actor.spec.optimizer.lr, critic.spec.optimizer.lr, ref.spec.optimizer) == (
        0.5,
        0.25,
        None,
    )
    assert critic.spec.backend_config.precision == ref.spec.backend_config.precision == "bf16"
    assert critic.spec.micro_batch_tokens == 99 and ref.spec.engine is None


@pytest.mark.parametrize(
    ("settings", "nats"),
    [
        ([], 1e-3),
        (["rollout.dtype=bfloat16"], 0.05),
        (["actor.backend.precision=bf16"], 0.05),
        (["actor.backend.precision=bf16", EXPERTS], 0.1),
        ([EXPERTS], 1e-3),
        (["actor.backend.precision=bf16", "run.mismatch_stop=0.3"], 0.3),
        (["run.mismatch_stop=inf"], math.inf),
    ],
)
def test_an_engine_may_differ_by_what_the_coarser_precision_rounds(settings, nats):
    made = job("algorithm.kl_coef=0.1", *settings)
    assert made.models["actor"].spec.mismatch_stop == nats
    assert made.models["ref"].spec.mismatch_stop == math.inf  # it has no engine


def test_another_model_is_not_mixed_with_the_actors(tmp_path):
    model_folder(tmp_path / "other", vocab_size=20)
    made = job("algorithm.kl_coef=0.1", "ref.model.path=other")
    assert made.models["ref"].spec.model.vocab_size == 20
    assert made.models["ref"].section.model.config is None


def test_a_problem_of_the_actor_is_not_repeated_for_the_roles_that_inherit_it():
    found = problems("algorithm.kl_coef=0.1", "actor.optimizer.lr=-1", "actor.model.path=nowhere")
    assert len(found) == 2 and all(p.startswith("actor.") for p in found)


def test_a_reward_is_a_function_or_several_parts_or_a_model(tmp_path):
    model_folder(tmp_path / "judge")
    parts = "reward={parts=[{name='right', function='exact_match', weight=2.0}, {name='m', function='math'}]}"
    made = job(parts, text=WITHOUT_REWARD)
    assert [(p.name, p.weight) for p in made.rewards] == [("right", 2.0), ("m", 1.0)]
    made = job("reward.model.path=judge", text=WITHOUT_REWARD)
    assert made.models["reward"].spec.model.kind == "score" and not made.scorers
    assert made.models["reward"].spec.optimizer is None


def test_a_model_and_a_function_contradict_each_other(tmp_path):
    model_folder(tmp_path / "judge")
    assert "reward.function: contradicts reward.model" in problem("reward.model.path=judge")
    found = problem("actor.function=exact_match")
    assert found == "actor.function: is for rewards, and actor is a policy model; remove it"


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ["algorithm.kl_coef=0.1", "actor.backend.precision=bf16", "ref.backend=nope"],
            "ref.backend: unknown training_backend 'nope'",
        ),
        (["reward.function=exact_mtch"], "did you mean 'exact_match'?"),
        (["reward.function=no_such_module:reward"], "does not load"),
        (["reward.options={colour='red'}"], "do not fit reward 'exact_match'"),
        (["runtime=ray", "pools.main=[2]", "actor.layout.pp=2"], "the axes dp, tp; set it to 1"),
        (["runtime=ray", "pools.main=[8]", "actor.layout.tp=8"], "the model's 4 attention heads"),
        (["runtime=ray", "pools.main=[4]", "actor.layout.pp=4"], "has 2 layers; make it smaller"),
        (["actor.pool=mian"], "did you mean 'main'?"),
        (["pools.main=[0]"], "expected devices per node"),
        (["actor.sync.transport={folder='/tmp'}"], "actor.sync.transport.folder: "),
    ],
)
def test_what_a_role_cannot_have_is_refused_with_what_it_can(overrides, said):
    assert any(said in found for found in problems(*overrides))


def test_a_reward_needs_something_to_score_by():
    assert "reward: give one of `function`" in problem(text=WITHOUT_REWARD)
    assert "contradicts reward.function" in problem("reward.parts=[{name='a', function='math'}]")
    twice = "reward={parts=[{name='a', function='math'}, {name='a', function='exact_match'}]}"
    assert "two parts are called 'a'" in problem(twice, text=WITHOUT_REWARD)


def test_several_roles_may_score_by_functions(tmp_path):
    roles = "Role('actor', trained=True), Role('reward', 'reward'), Role('cost', 'reward')"
    (tmp_path / "safe.py").write_text(ALGORITHM.format(body="", roles=roles))
    made = job("algorithm=safe:Mine", "cost.function=math", text=WITHOUT_ALGORITHM)
    assert {n: s.parts[0].function for n, s in made.scorers.items()} == {
        "reward": "exact_match",
        "cost": "math",
    }
    assert made.rewards[0].function == "exact_match"


def test_a_stage_may_start_from_a_stage_that_has_not_run_yet():
    first, second = jobs(text=STAGES)
    spec = second.models["actor"].spec.model
    assert spec.hf_config == first.models["actor"].spec.model.hf_config and spec.path is None


def test_an_unknown_stage_and_one_that_does_not_train_the_role_are_named():
    assert "did you mean 'first'?" in problem(
        "stages.second.actor.model.path=stage:frist", text=STAGES
    )
    assert "trains actor, not 'critic'" in problem(
        "stages.second.actor.model.path=stage:first/critic", text=STAGES
    )
    assert "earlier stages: none" in problem("stages.first.actor.model={path='stage:second'}", "stages.second.actor={}",
        f"actor.model.config={MODEL}", text=STAGES.replace(f"actor.model.config = {MODEL}", ""))  # fmt: skip
    assert "no earlier stage 'x'" in problem(
        text=BASE.replace(f"config = {MODEL}", 'path = "stage:x"')
    )


def test_a_model_config_needs_its_type_and_its_vocabulary():
    assert "needs model_type" in problem(
        "actor.model={config={vocab_size=16}}", text=BASE.replace(MODEL, "{}")
    )
    text = BASE.replace("vocab_size = 16, ", "")
    assert "needs vocab_size" in problem(text=text)


def test_a_layout_that_does_not_fit_its_pool_says_how_to_fix_it():
    found = problem("runtime=ray", "pools.main=[4]", "actor.layout.tp=3")
    assert "tp x pp x cp must divide 4 (1, 2, 4)" in found and "pools.main = [6]" in found
    found = problem("runtime=ray", "pools.main=[4]", "actor.layout={dp=3, tp=2}")
    assert "leave out actor.layout.dp (it is then 2), or set pools.main = [6]" in found
    assert "ep must divide dp" in problem("runtime=ray", "pools.main=[4]", "actor.layout.ep=3")
    assert "order must name each of" in problem("actor.layout.order=tp-dp")


def test_replicas_for_generation_must_fit_their_pool_and_their_engine(tmp_path):
    assert "tp 2" in problem("actor.generation.tp=2")
    found = problem("runtime=ray", "pools.main=[3]", "actor.generation.tp=2")
    assert found.startswith("actor.generation: ") and "choose a tp and pp that divide them" in found
    found = problem("runtime=ray", "pools.main=[2]", "actor.generation.pp=2")
    assert found.startswith("actor.generation.pp: is 2") and "set it to 1" in found
    assert "4 attention heads" in problem("runtime=ray", "pools.main=[3]", "actor.generation.tp=3")
    found = problem("actor.generation.pool=mian")
    assert found.startswith("actor.generation.pool: there is no pool 'mian'; did you mean 'main'?")
    apart = job(
        "runtime=ray",
        "pools.main=[1]",
        "pools.engines=[2]",
        "actor.generation.pool=engines",
        "actor.generation.tp=2",
    )
    assert apart.models["actor"].generation.tp == 2


def test_a_transport_must_exist_and_reach_the_engines():
    assert problem("actor.sync.transport=colective").startswith("actor.sync.transport: ")
    assert problem("actor.sync.transport=disk").startswith("actor.sync.transport.folder: ")
    found = problem("actor.sync.transport=store")
    assert found.startswith("actor.sync.transport: store moves weights to engines in a pool of")
    on_disk = (
        job("actor.sync.transport={name='disk', folder='/tmp'}").models["actor"].spec.transport
    )
    assert on_disk.name == "disk" and on_disk.config.folder == "/tmp"
    apart = ("runtime=ray", "pools.main=[1]", "pools.engines=[1]", "actor.generation.pool=engines")
    found = problem(*apart, "actor.sync.transport=collective")
    assert found.startswith("actor.sync.transport: collective moves weights inside one pool")
    job(*apart, "actor.sync.transport=shared_memory")


def test_a_table_lies_over_the_actors_where_the_role_inherits():
    model = {"path": "x", "init_seed": 1}
    actor = {"pool": "a", "layout": {"tp": 2, "pp": 1}, "model": model, "offload": True}
    tables = {"actor": actor, "critic": {"layout": {"tp": 1}}, "reward": {"pool": "b"}}
    assert role_table(tables, Role("critic", "value")) == {**actor, "layout": {"tp": 1, "pp": 1}}
    assert role_table(tables, Role("ref")) == actor
    assert role_table(tables, Role("reward", "reward")) == {"pool": "b"}
    tables["ref"] = {"model": {"path": "y"}}
    assert role_table(tables, Role("ref")) == {**actor, "model": {"path": "y"}}


def test_what_is_of_models_is_not_of_functions_and_parts_have_their_own_options():
    found = problem("reward.layout.tp=1")
    assert found.startswith("reward.layout: is for models, and reward is a function")
    parts = "reward={parts=[{name='a', function='math'}], options={x=1}}"
    found = problem(parts, text=WITHOUT_REWARD)
    assert found == "reward.options: belongs to one function; with parts each has its own"


JUDGES = ("pools={main=[1], judges={devices=[2], device='cpu'}}", "runtime=ray", "run.device=cpu")


def test_a_function_may_have_a_pool_and_then_the_data_are_there_too():
    made = job(*JUDGES, "reward.pool=judges")
    assert made.pools["judges"].device == "cpu" and made.scorers["reward"].pool == "judges"
    assert (made.main_pool, made.data_pool) == ("main", "judges")
    plain = job()
    assert (plain.scorers["reward"].pool, plain.data_pool) == (None, "main")


@pytest.mark.parametrize("role", ["reward", "actor", "actor.generation"])
def test_what_is_no_name_of_a_pool_is_said_to_be_none(role):
    assert problem(f"{role}.pool=[1]") == f"{role}.pool: expected a string, got [1] (list)"


def test_a_pool_on_cpus_has_no_models_and_is_not_left_empty():
    said = "pool 'judges' is on CPUs, for reward functions; choose one for models"
    found = problem(*JUDGES, "reward.pool=judges", "algorithm.kl_coef=0.1", "ref.pool=judges")
    assert found == f"ref.pool: {said}"
    found = problem(*JUDGES, "reward.pool=judges", "actor.generation.pool=judges")
    assert found == f"actor.generation.pool: {said}"
    assert problem(*JUDGES) == (
        "pools.judges: no role uses it; remove it, or place a role in it with pool = 'judges'"
    )
    assert "reward.pool: there is no pool 'judge'; did you mean 'judges'?" in problem(
        *JUDGES, "reward.pool=judge"
    )


def test_an_engine_that_gives_no_view_of_its_weights_cannot_be_compared(monkeypatch):
    assert job("actor.sync.verify=true").models["actor"].spec.sync.verify
    blind = EngineCapabilities(views=False)
    monkeypatch.setattr(Registry, "engine_capabilities", lambda self, name: blind)
    found = problem("actor.sync.verify=true")
    assert found.startswith("actor.sync.verify: the engine transformers gives no view")


def test_an_engine_that_forms_its_groups_itself_gets_neighbours(monkeypatch):
    four = ("runtime=ray", "pools.main=[4]", "actor.layout.tp=4", "actor.generation.tp=2",
            "actor.model.config.num_key_value_heads=4")  # fmt: skip
    assert job(*four).models["actor"].generation.groups("tp") == [[0, 2], [1, 3]]
    able = EngineCapabilities(tp=True, grouping="consecutive")
    monkeypatch.setattr(Registry, "engine_capabilities", lambda self, name: able)
    assert job(*four).models["actor"].generation.groups("tp") == [[0, 1], [2, 3]]


def test_a_schedule_is_as_long_as_the_run_unless_it_says_otherwise(monkeypatch):
    # Two mini-batches of 8 of the 16 sequences of a step, in each of 100 steps
    linear = "actor.optimizer={schedule='linear'}"
    optimizer = job(linear, "algorithm.mini_batch_size=8").models["actor"].spec.optimizer
    assert optimizer.total_steps == 200
    optimizer = job(linear, "actor.optimizer.total_steps=7").models["actor"].spec.optimizer
    assert optimizer.total_steps == 7

    found = problem(linear, "actor.optimizer.warmup_steps=100")
    assert found.startswith("actor.optimizer: schedule 'linear' needs total_steps > warmup_steps")
    monkeypatch.setattr(GRPO, "updates_per_step", lambda self: None)
    found = problem(linear)
    assert found.startswith("actor.optimizer: schedule 'linear' needs total_steps: set it")
