"""Configurations become jobs; what cannot work is said, all of it, before anything starts."""

from __future__ import annotations

import json
import textwrap
import tomllib
from pathlib import Path

import pytest
import torch

from hybridflow.core.config import Provenance, merge, nest, parse_override, read_config
from hybridflow.core.contracts.capabilities import EngineCapabilities
from hybridflow.core.contracts.tokenizer import TokenizerConfig
from hybridflow.core.errors import ConfigError, ModelError
from hybridflow.core.job.job import Job
from hybridflow.core.job.models import with_exports
from hybridflow.core.job.placement import resolve_placed
from hybridflow.core.job.resolve import resolve_jobs
from hybridflow.core.job.schema import SHORTHAND
from hybridflow.core.plugins import Registry

MODEL = """{ model_type = "qwen2", vocab_size = 16, hidden_size = 64, num_hidden_layers = 2, num_attention_heads = 4,
num_key_value_heads = 2, intermediate_size = 128, max_position_embeddings = 32 }""".replace("\n", " ")
BASE = f"""
algorithm = {{ name = "grpo", prompts_per_step = 4, group_size = 4 }}
runtime = "inline"
tokenizer.characters = "0123456789+="
data = {{ source = "arithmetic", bos = true, answer = "{{answer}}", max_prompt_tokens = 8 }}
sampling.max_tokens = 4
reward.function = "exact_match"
actor.model.config = {MODEL}
"""
STAGES = f"""
runtime = "inline"
tokenizer.train = "char"
data = {{ source = "arithmetic", max_prompt_tokens = 8 }}
sampling.max_tokens = 4
reward.function = "exact_match"
[stages.first]
algorithm = {{ name = "sft", batch_size = 4 }}
data.response = "{{answer}}"
actor.model.config = {MODEL}
[stages.second]
algorithm = {{ name = "grpo", prompts_per_step = 4, group_size = 4 }}
actor.model.path = "stage:first"
"""


@pytest.fixture(autouse=True)
def somewhere(tmp_path, monkeypatch):
    """Runs would be written below the current folder, and paths to code are found there."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))


def jobs(*overrides: str, text: str = BASE) -> list[Job]:
    tables = tomllib.loads(text)
    for override in overrides:
        tables = merge(tables, nest(*parse_override(override)), SHORTHAND)
    return resolve_jobs(tables, "tiny", SHORTHAND)


def job(*overrides: str, text: str = BASE) -> Job:
    [found] = jobs(*overrides, text=text)
    return found


def problems(*overrides: str, text: str = BASE) -> list[str]:
    """What is wrong with the base config after these overrides; fails when nothing is."""
    with pytest.raises(ConfigError) as error:
        jobs(*overrides, text=text)
    return error.value.problems


def problem(*overrides: str, text: str = BASE) -> str:
    found = problems(*overrides, text=text)
    assert len(found) == 1, found
    return found[0]


# --- what a config becomes ---


def test_a_small_config_becomes_a_job():
    made = job()
    assert made.algorithm_name == "grpo" and made.runtime == "inline" and made.main_pool == "main"
    assert list(made.models) == ["actor"] and list(made.scorers) == ["reward"]
    actor = made.models["actor"]
    assert actor.spec.engine == "transformers" and actor.spec.optimizer is not None and actor.layout.world == 1
    assert made.rewards[0].function == "exact_match" and made.folder == Path("runs/tiny")


def test_a_stage_is_the_common_tables_with_its_own_on_top():
    first, second = jobs(text=STAGES)
    assert (first.algorithm_name, second.algorithm_name) == ("sft", "grpo")
    assert first.data.response == "{answer}" and second.data.response is None
    assert first.folder == Path("runs/tiny/first") and second.folder == Path("runs/tiny/second")


def test_a_stage_may_start_from_a_stage_that_has_not_run_yet():
    first, second = jobs(text=STAGES)
    spec = second.models["actor"].spec.model
    assert spec.hf_config == first.models["actor"].spec.model.hf_config and spec.path is None


def test_a_stage_starts_from_the_export_once_it_is_there():
    second = jobs(text=STAGES)[1]
    folder = Path("runs/tiny/first/export/actor")
    assert second.models["actor"].spec.model.export == str(folder)
    with pytest.raises(ModelError, match="there is no folder"):
        with_exports(second)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen2", "vocab_size": 99}))
    (folder / "model.safetensors").write_bytes(b"")
    bound = with_exports(second)
    assert bound.models["actor"].spec.model.path == str(folder)
    assert bound.models["actor"].spec.model.vocab_size == 99


def test_a_stage_is_exported_where_a_later_one_begins_with_it():
    first, second = jobs(text=STAGES)
    assert second.follows_stage(first) and not first.follows_stage(second)


def test_a_model_of_an_earlier_stage_brings_its_tokenizer_whatever_the_tokenizer_table_says():
    first, second = jobs(text=STAGES)
    assert first.tokenizer.train == "char" and first.tokenizer_path is None
    assert second.tokenizer == TokenizerConfig() and second.tokenizer_path == "runs/tiny/first/tokenizer"


def test_what_a_stage_gives_drops_what_excludes_it_in_the_common_tables():
    text = STAGES.replace("[stages.first]", f"actor.model.config = {MODEL}\n[stages.first]")
    second = jobs("stages.second.reward.parts=[{name='a', function='math'}]", "reward.options={}", text=text)[1]
    assert second.models["actor"].section.model.config is None
    assert [p.name for p in second.rewards] == ["a"]
    other = jobs("stages.first.tokenizer.characters=0123456789+=", text=text)[0]
    assert other.tokenizer.train is None


def test_sub_tables_of_a_plugin_count_only_when_it_is_named():
    text = BASE + "[algorithm.ppo]\nprompts_per_step = 32\n[algorithm.grpo]\ngroup_size = 2\n"
    text = text.replace('algorithm = { name = "grpo", prompts_per_step = 4, group_size = 4 }', "")
    text += "[algorithm]\nname = 'grpo'\nepochs = 3\n[rollout]\nname = 'transformers'\ntransformers.max_sequences = 7\n"
    grpo, ppo = job(text=text), job("algorithm=ppo", text=text)
    assert (grpo.algorithm.config.group_size, grpo.algorithm.config.epochs) == (2, 3)
    assert (ppo.algorithm.config.prompts_per_step, ppo.algorithm.config.epochs) == (32, 3)
    assert grpo.models["actor"].spec.engine_config.max_sequences == 7


def test_ref_and_critic_inherit_what_they_do_not_give_from_the_actor():
    made = job("algorithm={name='ppo', prompts_per_step=4}", "actor.optimizer.lr=0.5", "critic.optimizer.lr=0.25",
               "actor.backend.precision=bf16", "critic.micro_batch_tokens=99", text=_without_algorithm())  # fmt: skip
    actor, critic, ref = (made.models[name] for name in ("actor", "critic", "ref"))
    assert critic.spec.model.hf_config == actor.spec.model.hf_config and critic.spec.model.kind == "value"
    assert (actor.spec.optimizer.lr, critic.spec.optimizer.lr, ref.spec.optimizer) == (0.5, 0.25, None)
    assert critic.spec.backend_config.precision == ref.spec.backend_config.precision == "bf16"
    assert critic.spec.micro_batch_tokens == 99 and ref.spec.engine is None


def _without_algorithm() -> str:
    return "\n".join(line for line in BASE.splitlines() if not line.startswith("algorithm"))


def test_another_model_is_not_mixed_with_the_actors(tmp_path):
    _model_folder(tmp_path / "other", vocab_size=20)
    made = job("algorithm.kl_coef=0.1", "ref.model.path=other")
    assert made.models["ref"].spec.model.vocab_size == 20
    assert made.models["ref"].section.model.config is None


def test_another_backend_does_not_inherit_the_settings_of_the_actors():
    found = problem("algorithm.kl_coef=0.1", "actor.backend.precision=bf16", "ref.backend=nope")
    assert found.startswith("ref.backend: unknown training_backend 'nope'")


def _model_folder(folder: Path, **fields) -> None:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen2", "vocab_size": 16, **fields}))
    (folder / "model.safetensors").write_bytes(b"")


def test_a_reward_is_a_function_or_several_parts_or_a_model(tmp_path):
    _model_folder(tmp_path / "judge")
    parts = "reward={parts=[{name='right', function='exact_match', weight=2.0}, {name='m', function='math'}]}"
    base = BASE.replace('reward.function = "exact_match"', "")
    made = job(parts, text=base)
    assert [(p.name, p.weight) for p in made.rewards] == [("right", 2.0), ("m", 1.0)]
    made = job("reward.model.path=judge", text=base)
    assert made.models["reward"].spec.model.kind == "score" and not made.scorers
    assert made.models["reward"].spec.optimizer is None


def test_a_reward_may_be_given_by_its_name_alone():
    base = BASE.replace('reward.function = "exact_match"', "")
    assert job("reward=math", text=base).rewards[0].function == "math"


def test_the_model_folder_brings_the_tokenizer_where_none_is_configured(tmp_path):
    _model_folder(tmp_path / "model")
    text = BASE.replace(f"actor.model.config = {MODEL}", 'actor.model.path = "model"')
    assert job(text=text).tokenizer_path is None  # tokenizer.characters is given
    assert job(text=text.replace('tokenizer.characters = "0123456789+="', "")).tokenizer_path == "model"


def test_a_role_whose_table_this_algorithm_does_not_need_is_unused():
    assert job("critic.optimizer.lr=0.1", "teacher.pool=main").unused == ("critic", "teacher")


# --- everything at once ---


def test_all_problems_of_a_config_are_reported_at_once():
    found = problems(
        "steps=3", "run.stepz=3", "sampling.top_p=1.5", "data.limit=-1", "tokenizer.train=word", "pools.main=[1]",
        "pools.spare=[]", "algorithm.group_siz=2", "algorithm.kl_coef=0.1", "actor.layout.tp=3", "actor.colour=red",
        "ref.model.path=/no/such/folder", "critc.pool=x", "critic.optimizer.lrr=1", "reward.function=exact_mach",
        "reward.pool=main", "runtime.threadz=1",
    )  # fmt: skip
    for said in (
        "steps: unknown key; did you mean `run.steps`?", "run.stepz: unknown key; did you mean `steps`?",
        "sampling.top_p: must be above 0", "data.limit: must be 0 or more", 'tokenizer.train: expected one of "char", "bpe"',
        "algorithm.group_siz: unknown key; did you mean `group_size`?", "actor.layout: tp 3",
        "actor.colour: unknown key", "ref.model.path: there is no folder", "critc: unknown key; did you mean `critic`?",
        "critic.optimizer.lrr: unknown key", "reward.pool: is for models", "pools.spare: expected devices per node",
        "runtime.threadz: unknown key",
    ):  # fmt: skip
        assert any(p.startswith(said) for p in found), (said, found)


def test_the_problems_of_all_stages_are_reported_with_the_stage_and_common_ones_once():
    found = problems(
        "actor.optimizer.lr=-1",
        "stages.first.algorithm.batch_size=0",
        "stages.second.reward.function=nope",
        text=STAGES,
    )
    assert len([p for p in found if "actor.optimizer.lr" in p]) == 1
    assert any(p.startswith("stage first: algorithm.batch_size: must be at least 1") for p in found)
    assert any(p.startswith("stage second: reward: unknown reward 'nope'") for p in found)


def test_a_problem_of_the_actor_is_not_repeated_for_the_roles_that_inherit_it():
    found = problems("algorithm.kl_coef=0.1", "actor.optimizer.lr=-1", "actor.model.path=nowhere")
    assert len(found) == 2 and all(p.startswith("actor.") for p in found)


def test_a_stage_that_follows_a_broken_one_is_not_blamed():
    assert problem("stages.first.algorithm.batch_size=0", text=STAGES).startswith("stage first: ")


def test_what_hangs_on_a_section_that_has_problems_is_not_looked_at():
    assert problem("algorithm={name='sft'}", "data.respons={answer}", text=_without_algorithm()).startswith(
        "data.respons:"
    )


@pytest.mark.parametrize(
    "name", ["run", "runtime", "pools", "algorithm", "data", "tokenizer", "sampling", "rollout", "validation", "actor"]
)
def test_a_value_in_place_of_a_table_is_a_problem_and_no_crash(name):
    found = problems(f"{name}=3")
    assert any(p.startswith(f"{name}: expected a table, got 3") for p in found), found
    assert problems("stages=3")


# --- names ---


def test_a_misspelt_role_table_names_the_nearest():
    assert "did you mean `actor`?" in problem("actro.micro_batch_tokens=1")
    assert "did you mean `critic`?" in problem("critics.pool=main")  # a usual role, though grpo has none


def test_a_role_of_one_stage_may_stand_among_the_common_tables(tmp_path):
    (tmp_path / "panel.py").write_text(ALGORITHM.format(body="", roles="Role('actor', trained=True), Role('juror')"))
    text = STAGES.replace('{ name = "grpo", prompts_per_step = 4, group_size = 4 }', '"panel:Mine"')
    second = jobs("juror.micro_batch_tokens=9", text=text)[1]
    assert second.models["juror"].spec.micro_batch_tokens == 9
    assert "juror2: unknown key; did you mean `juror`?" in problem("juror2.micro_batch_tokens=9", text=text)


def test_unknown_plugins_name_the_nearest():
    assert "did you mean 'grpo'?" in problem("algorithm.name=grop")
    assert "did you mean 'inline'?" in problem("runtime=inlien")
    assert "did you mean 'fsdp'?" in problem("actor.backend=fdsp")
    assert "did you mean 'transformers'?" in problem("rollout=transformer")
    assert "did you mean 'jsonl'?" in problem("data.source=json")
    assert "did you mean 'jsonl'?" in problem("run.trackers=['json']")


def test_a_setting_of_another_plugin_says_where_it_belongs():
    assert "goes into [algorithm.NAME]" in problem("algorithm.lam=0.9")


def test_no_algorithm_says_which_there_are():
    found = problem(text=_without_algorithm())
    assert found.startswith("algorithm: which one?") and "grpo" in found


def test_an_unknown_stage_and_one_that_does_not_train_the_role_are_named():
    assert "did you mean 'first'?" in problem("stages.second.actor.model.path=stage:frist", text=STAGES)
    assert "trains actor, not 'critic'" in problem("stages.second.actor.model.path=stage:first/critic", text=STAGES)
    assert "earlier stages: none" in problem("stages.first.actor.model={path='stage:second'}", "stages.second.actor={}",
        f"actor.model.config={MODEL}", text=STAGES.replace(f"actor.model.config = {MODEL}", ""))  # fmt: skip
    assert "no earlier stage 'x'" in problem(text=BASE.replace(f"config = {MODEL}", 'path = "stage:x"'))


def test_an_override_that_every_stage_replaces_is_refused(tmp_path):
    (tmp_path / "two.toml").write_text(STAGES)
    tables, provenance = read_config("two.toml", ["algorithm=ppo", "run.steps=3"], SHORTHAND)
    with pytest.raises(
        ConfigError, match=r"algorithm.name: given on the command line, and every stage has its own"
    ) as e:
        resolve_placed(tables, "two", SHORTHAND, provenance)
    assert len(e.value.problems) == 1
    assert isinstance(provenance, Provenance)


# --- roles ---


def test_a_model_and_a_function_contradict_each_other(tmp_path):
    _model_folder(tmp_path / "judge")
    assert "reward.function: contradicts reward.model" in problem("reward.model.path=judge")
    found = problem("actor.function=exact_match")
    assert found == "actor.function: is for rewards, and actor is a policy model; remove it"


def test_a_reward_function_that_does_not_exist_or_does_not_take_its_options_is_refused():
    assert "did you mean 'exact_match'?" in problem("reward.function=exact_mtch")
    assert "does not load" in problem("reward.function=no_such_module:reward")
    assert "do not fit reward 'exact_match'" in problem("reward.options={colour='red'}")


def test_a_reward_needs_something_to_score_by():
    base = BASE.replace('reward.function = "exact_match"', "")
    assert "reward: give one of `function`" in problem(text=base)
    assert "contradicts reward.function" in problem("reward.parts=[{name='a', function='math'}]")
    twice = "reward={parts=[{name='a', function='math'}, {name='a', function='exact_match'}]}"
    assert "two parts are called 'a'" in problem(twice, text=base)


def test_several_roles_may_score_by_functions(tmp_path):
    roles = "Role('actor', trained=True), Role('reward', 'reward'), Role('cost', 'reward')"
    (tmp_path / "safe.py").write_text(ALGORITHM.format(body="", roles=roles))
    made = job("algorithm=safe:Mine", "cost.function=math", text=_without_algorithm())
    assert {n: s.parts[0].function for n, s in made.scorers.items()} == {"reward": "exact_match", "cost": "math"}
    assert made.rewards[0].function == "exact_match"


def test_a_missing_model_folder_and_one_without_a_config_are_named(tmp_path):
    text = BASE.replace(f"actor.model.config = {MODEL}", "")
    assert "needs exactly one of `path`" in problem(text=text)
    assert "there is no folder 'nowhere'" in problem("actor.model.path=nowhere", text=text)
    (tmp_path / "empty").mkdir()
    assert "has no config.json (it has nothing)" in problem("actor.model.path=empty", text=text)
    assert "got both" in problem("actor.model.path=empty")


def test_a_model_config_needs_its_type_and_its_vocabulary():
    assert "needs model_type" in problem("actor.model={config={vocab_size=16}}", text=BASE.replace(MODEL, "{}"))
    text = BASE.replace("vocab_size = 16, ", "")
    assert "needs vocab_size" in problem(text=text)


# --- devices and layouts ---


def test_a_layout_that_does_not_fit_its_pool_says_how_to_fix_it():
    found = problem("runtime=ray", "pools.main=[4]", "actor.layout.tp=3")
    assert "tp x pp x cp must divide 4 (1, 2, 4)" in found and "pools.main = [6]" in found
    found = problem("runtime=ray", "pools.main=[4]", "actor.layout={dp=3, tp=2}")
    assert "leave out actor.layout.dp (it is then 2), or set pools.main = [6]" in found
    assert "ep must divide dp" in problem("runtime=ray", "pools.main=[4]", "actor.layout.ep=3")
    assert "order must name each of" in problem("actor.layout.order=tp-dp")


def test_an_axis_that_the_backend_or_the_model_has_not_is_refused():
    assert "has the axes dp, tp; set it to 1" in problems("runtime=ray", "pools.main=[2]", "actor.layout.pp=2")[0]
    found = problems("runtime=ray", "pools.main=[8]", "actor.layout.tp=8")
    assert any("8 does not divide the model's 4 attention heads" in p for p in found)


def test_an_unknown_pool_and_an_unused_one_are_named():
    assert "there is no pool 'mian'; did you mean 'main'?" in problem("actor.pool=mian")
    assert problem("pools={main=[1], spare=[1]}").startswith("pools.spare: no role uses it")
    assert "expected devices per node" in problem("pools.main=[0]")


def test_replicas_for_generation_must_fit_their_pool_and_their_engine(tmp_path):
    assert "tp 2" in problem("actor.generation.tp=2")
    found = problem("runtime=ray", "pools.main=[3]", "actor.generation.tp=2")
    assert found.startswith("actor.generation: ") and "choose a tp and pp that divide them" in found
    found = problem("runtime=ray", "pools.main=[2]", "actor.generation.pp=2")
    assert found == "actor.generation.pp: is 2, and the engine transformers runs on one rank; set it to 1"
    assert "4 attention heads" in problem("runtime=ray", "pools.main=[3]", "actor.generation.tp=3")
    found = problem("actor.generation.pool=mian")
    assert found.startswith("actor.generation.pool: there is no pool 'mian'; did you mean 'main'?")
    apart = job(
        "runtime=ray", "pools.main=[1]", "pools.engines=[2]", "actor.generation.pool=engines", "actor.generation.tp=2"
    )
    assert apart.models["actor"].generation.tp == 2


def test_a_transport_must_exist_and_reach_the_engines():
    assert problem("actor.sync.transport=colective").startswith("actor.sync.transport: ")
    assert problem("actor.sync.transport=disk").startswith("actor.sync.transport.folder: ")
    on_disk = job("actor.sync.transport={name='disk', folder='/tmp'}").models["actor"].spec.sync
    assert on_disk.transport == "disk" and on_disk.transport_config.folder == "/tmp"
    apart = ("runtime=ray", "pools.main=[1]", "pools.engines=[1]", "actor.generation.pool=engines")
    found = problem(*apart, "actor.sync.transport=collective")
    assert found.startswith("actor.sync.transport: collective moves weights inside one pool")
    job(*apart, "actor.sync.transport=shared_memory")


def test_the_inline_runtime_takes_pools_of_one_device():
    found = problem("pools.main=[2]")
    assert "runtime inline runs models on one rank" in found and "pools.main = [1]" in found and "ray" in found


def test_more_than_one_node_needs_a_cluster():
    assert "give the cluster's runtime.address" in problem("runtime=ray", "pools.main=[2, 2]")
    job("runtime={name='ray', address='auto'}", "pools.main=[2, 2]")


def test_devices_that_this_machine_does_not_have_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "run.device: is cuda" in problem("run.device=cuda")
    job("run.device=cuda", "runtime={name='ray', address='auto'}")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    found = problem("runtime=ray", "pools.main=[4]")
    assert "pools: have 4 devices in all, and this machine has 2 CUDA devices" in found
    assert job("runtime=ray", "pools.main=[2]").device == "cuda"
    assert job("runtime=ray", "pools.main=[4]", "run.device=cpu").device == "cpu"


def test_an_engine_that_does_not_work_on_the_device_is_refused(monkeypatch):
    only = EngineCapabilities(devices=frozenset({"cuda"}))
    monkeypatch.setattr(Registry, "engine_capabilities", lambda self, name: only)
    assert "works on cuda, and run.device is cpu" in problem("run.device=cpu")


# --- sizes ---


def test_a_step_or_a_mini_batch_smaller_than_dp_is_refused():
    eight = ("runtime=ray", "pools.main=[8]")
    assert "dp is 8, and a step has 4 sequences" in problem(*eight, "algorithm={name='grpo', prompts_per_step=2, "
        "group_size=2}", text=_without_algorithm())  # fmt: skip
    found = problem(*eight, "algorithm.mini_batch_size=4")
    assert "algorithm.mini_batch_size: is 4, and actor has dp 8" in found and "set 8 or more" in found
    job(*eight, "algorithm.mini_batch_size=8")


def test_a_mini_batch_larger_than_the_step_is_refused():
    assert "mini_batch_size 99 is larger than the 16 sequences" in problem("algorithm.mini_batch_size=99")


def test_an_algorithm_whose_own_parts_refuse_a_value_is_a_problem_and_no_crash():
    text = _without_algorithm()
    found = problem("algorithm={name='ppo', prompts_per_step=4, kl_coef=0.0, kl_target=0.1}", text=text)
    assert found.startswith("algorithm: ") and "kl" in found.lower()


def test_prompts_and_responses_must_fit_the_models_positions():
    found = problem("sampling.max_tokens=25")
    assert "exceed the model's 32 positions" in found and "data.max_prompt_tokens" in found
    longer = problem("validation.data.max_prompt_tokens=30")
    assert "validation.data.max_prompt_tokens" in longer


def test_only_synchronous_training_is_accepted_so_far():
    assert problem("run.max_staleness=1").startswith("run.max_staleness: is 1; 0 (synchronous)")


def test_stop_tokens_are_ids_of_the_model():
    assert "sampling.stop_tokens: [16]" in problem("sampling.stop_tokens=[3, 16]")


def test_biases_are_of_tokens_of_the_model():
    assert job("sampling.logit_bias.3=-100", "sampling.min_p=0.1").sampling.logit_bias == ((3, -100.0),)
    assert job('sampling.logit_bias={"3" = 1, "15" = 0.5}').sampling.logit_bias == ((3, 1.0), (15, 0.5))
    found = problem('sampling.logit_bias={"3" = 1, "16" = 2}')
    assert found.startswith("sampling.logit_bias: [16] are no ids of actor's model, which has 0 to 15"), found


# --- data and text ---


def test_supervised_training_needs_responses():
    found = problem("algorithm={name='sft', batch_size=4}", text=_without_algorithm())
    assert found.startswith("data.response: algorithm 'sft' trains on responses")


def test_the_tokenizer_must_come_from_somewhere():
    text = BASE.replace('tokenizer.characters = "0123456789+="', "")
    assert problem(text=text).startswith("tokenizer: the models have no folder to take one from")
    assert "tokenizer.path: there is no folder 'nowhere'" in problem("tokenizer.path=nowhere", text=text)
    assert "tokenizer: path and characters are given" in problems("tokenizer.path=nowhere")[0]


def test_validation_needs_something_to_measure():
    text = BASE.replace('reward.function = "exact_match"', "").replace(
        '"grpo", prompts_per_step = 4, group_size = 4', '"sft"'
    )
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


def test_a_run_folder_that_cannot_be_is_refused(tmp_path):
    (tmp_path / "taken").write_text("")
    assert "is a file" in problem("run.folder=taken")


# --- algorithms of others ---

ALGORITHM = textwrap.dedent("""
    import attrs
    from hybridflow.core.contracts.algorithm import Algorithm
    from hybridflow.core.contracts.role import Role
    class Mine(Algorithm):
        {body}
        def roles(self):
            return ({roles},)
        def step(self, ctx):
            pass
""").replace("class Mine", "@attrs.frozen\nclass Config:\n    size: int = 4\n\nclass Mine")


def test_an_algorithm_by_path_with_a_config_and_one_without(tmp_path):
    roles = "Role('actor', trained=True)"
    (tmp_path / "with_config.py").write_text(ALGORITHM.format(body="Config = Config", roles=roles))
    (tmp_path / "without.py").write_text(ALGORITHM.format(body="", roles=roles))
    text = _without_algorithm()
    assert job("algorithm={name='with_config:Mine', size=7}", text=text).algorithm.config.size == 7
    assert job("algorithm=without:Mine", text=text).algorithm.config is None
    found = problem("algorithm={name='without:Mine', size=7}", text=text)
    assert found == "algorithm.size: unknown key; algorithm 'without:Mine' has no settings"


def test_an_object_that_is_no_algorithm_is_refused(tmp_path):
    (tmp_path / "nothing.py").write_text("thing = 3\n")
    assert "must be a class derived from" in problem("algorithm=nothing:thing", text=_without_algorithm())
