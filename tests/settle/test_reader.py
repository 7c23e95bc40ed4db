"""A stage's tables, read section by section: plugins with their settings, and every problem."""

from __future__ import annotations

import attrs
import pytest
import torch
from helpers.job_texts import ALGORITHM, BASE, WITHOUT_ALGORITHM
from helpers.jobs import job, problem, problems

import hybridflow.settle.reader as reader_module
from hybridflow.core.contracts.runtime import ResourcePool
from hybridflow.core.job.sections import RunSection
from hybridflow.core.plugins import Descriptor, Registry, registry
from hybridflow.settle.reader import Reader, device_defaults

SETTINGS = "hybridflow.backends.inline.runtime:InlineConfig"


def test_sub_tables_of_a_plugin_count_only_when_it_is_named():
    text = BASE + "[algorithm.ppo]\nprompts_per_step = 32\n[algorithm.grpo]\ngroup_size = 2\n"
    text = text.replace('algorithm = { name = "grpo", prompts_per_step = 4, group_size = 4 }', "")
    text += "[algorithm]\nname = 'grpo'\nepochs = 3\n[rollout]\nname = 'transformers'\ntransformers.max_sequences = 7\n"
    grpo, ppo = job(text=text), job("algorithm=ppo", text=text)
    assert (grpo.algorithm.config.group_size, grpo.algorithm.config.epochs) == (2, 3)
    assert (ppo.algorithm.config.prompts_per_step, ppo.algorithm.config.epochs) == (32, 3)
    assert grpo.models["actor"].spec.engine_config.max_sequences == 7


def test_a_role_whose_table_this_algorithm_does_not_need_is_unused():
    assert job("critic.optimizer.lr=0.1", "teacher.pool=main").unused == ("critic", "teacher")


@pytest.mark.parametrize(
    "name",
    [
        "run",
        "runtime",
        "pools",
        "algorithm",
        "data",
        "tokenizer",
        "sampling",
        "rollout",
        "validation",
        "actor",
    ],
)
def test_a_value_in_place_of_a_table_is_a_problem_and_no_crash(name):
    found = problems(f"{name}=3")
    assert any(p.startswith(f"{name}: expected a table, got 3") for p in found), found
    assert problems("stages=3")


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("actro.micro_batch_tokens=1", "did you mean `actor`?"),
        ("critics.pool=main", "did you mean `critic`?"),  # a usual role, though grpo has none
        ("algorithm.name=grop", "did you mean 'grpo'?"),
        ("runtime=inlien", "did you mean 'inline'?"),
        ("actor.backend=fdsp", "did you mean 'fsdp'?"),
        ("rollout=transformer", "did you mean 'transformers'?"),
        ("data.source=json", "did you mean 'jsonl'?"),
        ("run.trackers=['json']", "did you mean 'jsonl'?"),
        ("algorithm.lam=0.9", "goes into [algorithm.NAME]"),
        ("algorithm.mini_batch_size=99", "99 is larger than the 16 sequences"),
        ("pools={}", "give one, for example main = [1]"),
    ],
)
def test_a_name_or_value_that_cannot_be_is_told_with_one_that_can(override, said):
    assert any(said in found for found in problems(override))


def test_no_algorithm_says_which_there_are():
    assert "grpo" in problem(text=WITHOUT_ALGORITHM)


def test_an_algorithm_whose_own_parts_refuse_a_value_is_a_problem_and_no_crash():
    text = WITHOUT_ALGORITHM
    found = problem(
        "algorithm={name='ppo', prompts_per_step=4, kl_coef=0.0, kl_target=0.1}", text=text
    )
    assert found.startswith("algorithm: ") and "kl" in found.lower()


def test_an_algorithm_by_path_with_a_config_and_one_without(tmp_path):
    roles = "Role('actor', trained=True)"
    (tmp_path / "with_config.py").write_text(ALGORITHM.format(body="Config = Config", roles=roles))
    (tmp_path / "without.py").write_text(ALGORITHM.format(body="", roles=roles))
    text = WITHOUT_ALGORITHM
    assert job("algorithm={name='with_config:Mine', size=7}", text=text).algorithm.config.size == 7
    assert job("algorithm=without:Mine", text=text).algorithm.config is None
    found = problem("algorithm={name='without:Mine', size=7}", text=text)
    assert found == "algorithm.size: unknown key; algorithm 'without:Mine' has no settings"


def test_an_object_that_is_no_algorithm_is_refused(tmp_path):
    (tmp_path / "nothing.py").write_text("thing = 3\n")
    found = problem("algorithm=nothing:thing", text=WITHOUT_ALGORITHM)
    assert "must be a class derived from" in found


def test_a_section_with_problems_is_read_without_what_is_wrong():
    reader = Reader({"run": {"stepz": 1, "steps": 3, "seed": -1}})
    assert reader.section("run", RunSection) == RunSection(steps=3)
    assert reader.failed == {"run"}
    assert sorted(problem.key for problem in reader.problems) == ["run.seed", "run.stepz"]


def test_pools_are_devices_per_node():
    reader = Reader({"pools": {"main": 2, "wide": [4, 4]}})
    assert reader.pools() == {
        "main": ResourcePool("main", (2,)),
        "wide": ResourcePool("wide", (4, 4)),
    }
    assert Reader({}).pools() == {"main": ResourcePool("main", (1,))}
    assert not reader.problems


def test_a_pool_of_reward_functions_is_on_cpus_and_models_have_one_beside_it():
    judges = {"devices": 4, "device": "cpu"}
    found = ResourcePool("judges", (4,), "cpu")
    assert Reader({"pools": {"judges": judges, "main": {"devices": [2]}}}).pools() == {
        "judges": found,
        "main": ResourcePool("main", (2,)),
    }
    made = Reader({"pools": {"judges": judges}}).pools()
    assert list(made.items()) == [("main", ResourcePool("main", (1,))), ("judges", found)]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"devices": [1], "device": "cuda"}, "device is 'cuda'; give \"cpu\" for a pool of reward"),
        ({"devices": [1], "cores": 4}, "has no key 'cores'; it takes devices and device"),
    ],
)
def test_a_pool_has_no_other_settings(given, said):
    reader = Reader({"pools": {"judges": given}})
    reader.pools()
    [(key, text)] = reader.problems
    assert key == "pools.judges" and said in text


@pytest.mark.parametrize(
    "given", [0, True, [], [1, -1], [1.5], "8", {}, {"device": "cpu"}], ids=repr
)
def test_pools_that_are_no_numbers_of_devices_are_refused(given):
    reader = Reader({"pools": {"main": given}})
    assert reader.pools() == {} and reader.failed == {"pools"}
    [(key, text)] = reader.problems
    assert key == "pools.main" and text.startswith("expected devices per node, for example [8, 8]")
    assert text.endswith(f"got {given!r}")


def test_an_engine_that_is_not_named_is_that_of_the_device(monkeypatch):
    mine = Registry().load()
    for name in ("vllm", "sglang"):  # as if they were installed
        descriptor = mine.descriptor("rollout_engine", name)
        factory = mine.descriptor("rollout_engine", "transformers").factory
        mine.add(attrs.evolve(descriptor, name=f"{name}-here", factory=factory, requires=()))
    monkeypatch.setattr(reader_module, "registry", lambda: mine)
    on_gpu = Reader({"run": {"device": "cuda"}}).plugin("rollout_engine", {}, "rollout")
    on_cpu = Reader({"run": {"device": "cpu"}}).plugin("rollout_engine", {}, "rollout")
    assert (on_gpu.name, on_cpu.name) == ("vllm-here", "transformers")


def test_a_plugin_is_the_named_one_or_the_default_with_its_settings():
    reader = Reader({})
    named = reader.plugin("runtime", {"name": "inline", "threads": 3}, "runtime")
    assert (named.name, named.config.threads, named.good) == ("inline", 3, True)
    default = reader.plugin("training_backend", {}, "actor.backend")
    assert default.name == registry().default("training_backend")
    wrong = reader.plugin("runtime", {"name": "inline", "threads": "many"}, "runtime")
    assert (wrong.config.threads, wrong.good) == (0, False)  # the default stands in
    assert [problem.key for problem in reader.problems] == ["runtime.threads"]


def test_a_name_that_is_no_text_is_refused_with_the_names_there_are():
    reader = Reader({})
    assert reader.plugin("runtime", {"name": ["inline"]}, "runtime") is None
    [(key, text)] = reader.problems
    assert key == "runtime.name" and text.startswith("give the name of a runtime plugin (")
    assert text.endswith("got ['inline']")


def test_what_a_plugin_needs_may_lack_where_the_run_is_meant_for_elsewhere(monkeypatch):
    ours = Registry().load()
    needs = "no_such_module"
    ours.add(Descriptor("tracker", "far", f"{needs}:Far", requires=needs, config=SETTINGS))
    monkeypatch.setattr("hybridflow.settle.reader.registry", lambda: ours)
    there, here = Reader({}, elsewhere=True), Reader({})
    choice = there.plugin("tracker", {"name": "far", "threads": 2}, "run.trackers.0")
    assert (choice.found, choice.config.threads) == (None, 2) and not there.problems
    assert here.plugin("tracker", {"name": "far"}, "run.trackers.0") is None
    assert "needs no_such_module, not installed here" in here.problems[0].text


# --- defaults that follow the device ---


@pytest.mark.parametrize(
    ("given", "here", "elsewhere", "device"),
    [
        ({}, False, False, "cpu"),
        ({}, True, False, "cuda"),
        ({"device": "auto"}, False, True, "cuda"),
        ({"device": "cpu"}, True, True, "cpu"),
        ({"device": "cuda"}, False, False, "cuda"),
        ({"device": "gpu"}, False, False, "cpu"),  # a problem of its own
    ],
)
def test_the_device_is_the_runs_this_machines_or_cuda_elsewhere(
    monkeypatch, given, here, elsewhere, device
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: here)
    assert Reader({"run": given}, elsewhere).device == device


def test_on_cuda_models_compute_in_bfloat16_unless_the_config_says_otherwise(monkeypatch):
    spec = job().models["actor"].spec
    assert (spec.backend_config.precision, spec.engine_config.dtype) == ("fp32", "float32")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    spec = job().models["actor"].spec
    assert (spec.backend_config.precision, spec.engine_config.dtype) == ("bf16", "bfloat16")
    # The model of these tests is small.
    assert not spec.backend_config.activation_checkpointing
    assert spec.mismatch_stop == 0.05
    given = job("actor.backend.precision=fp32", "rollout.dtype=float32").models["actor"].spec
    assert (given.backend_config.precision, given.engine_config.dtype) == ("fp32", "float32")


@attrs.frozen
class Own:
    """Settings of a stranger's backend, who knows of no precision."""

    dtype: str = "float32"

    @classmethod
    def defaults_on(cls, device, hf_config):
        return {"dtype": hf_config["model_type"], "precision": "bf16"} if device == "cuda" else {}


def test_of_a_plugins_device_defaults_those_count_that_it_has():
    fields = {"model_type": "qwen2"}
    assert device_defaults(Own, "cuda", fields) == {"dtype": "qwen2"}
    assert device_defaults(Own, "cpu", fields) == {}
    assert device_defaults(RunSection, "cuda", fields) == {}


def test_settings_of_an_engine_that_is_not_named_say_which_one_it_is(monkeypatch):
    mine = Registry().load()
    usual = mine.descriptor("rollout_engine", "transformers")
    config = "hybridflow.backends.vllm.config:VLLMConfig"
    other = attrs.evolve(usual, name="other", config=config, default=False, default_on={"cuda": 1})
    mine.add(other)
    monkeypatch.setattr(reader_module, "registry", lambda: mine)
    reader = Reader({"run": {"device": "cuda"}})
    reader.plugin("rollout_engine", {"sync_every": 4}, "rollout")
    [problem] = reader.problems
    assert problem.key == "rollout.sync_every" and problem.text.startswith("unknown key")
    assert "other is the default on cuda: for another set rollout.name" in problem.text
