"""A stage is the tables of the file with its own on top; what its own excludes is dropped."""

from __future__ import annotations

import pytest
from helpers.job_texts import MODEL, STAGES
from helpers.jobs import jobs

from hybridflow.core.errors import ConfigError
from hybridflow.core.values.sealed import write_sealed
from hybridflow.settle.config.load import COMMAND_LINE, Provenance, read_config
from hybridflow.settle.placement import resolve_placed
from hybridflow.settle.stages import (
    located_model,
    overlay,
    shadowed_overrides,
    stage_tables,
    tokenizer_folder,
)


def test_what_a_stage_gives_drops_what_excludes_it_in_the_common_tables():
    text = STAGES.replace("[stages.first]", f"actor.model.config = {MODEL}\n[stages.first]")
    second = jobs(
        "stages.second.reward.parts=[{name='a', function='math'}]", "reward.options={}", text=text
    )[1]
    assert second.models["actor"].section.model.config is None
    assert [p.name for p in second.rewards] == ["a"]
    other = jobs("stages.first.tokenizer.characters=0123456789+=", text=text)[0]
    assert other.tokenizer.train is None


def test_an_override_that_every_stage_replaces_is_refused(tmp_path):
    (tmp_path / "two.toml").write_text(STAGES)
    tables, provenance = read_config("two.toml", ["algorithm=ppo", "run.steps=3"])
    with pytest.raises(ConfigError, match=r"algorithm.name: given on the command line") as e:
        resolve_placed(tables, "two", provenance)
    assert len(e.value.problems) == 1


def test_without_stages_the_tables_are_the_only_ones():
    tables = {"algorithm": "grpo", "run": {"steps": 3}}
    alone = {"algorithm": {"name": "grpo"}, "run": {"steps": 3}}
    assert stage_tables(tables) == {None: alone}


def test_each_stage_is_the_common_tables_under_its_own_in_the_order_of_the_file():
    stages = {"b": {"run": {"steps": 4}}, "a": {"algorithm": "sft"}}
    found = stage_tables({"run": {"steps": 3, "seed": 1}, "stages": stages})
    assert list(found) == ["b", "a"]
    assert found["b"] == {"run": {"steps": 4, "seed": 1}}
    assert found["a"] == {"run": {"steps": 3, "seed": 1}, "algorithm": {"name": "sft"}}


@pytest.mark.parametrize("stages", [3, False, "", ["warm-up"], {"warm-up": 3}], ids=repr)
def test_stages_that_are_no_tables_are_refused(stages):
    with pytest.raises(ConfigError, match=r"stages: write one table .* \[stages\.warm-up\]"):
        stage_tables({"stages": stages})


A, B = {"a": 1}, {"b": 2}


@pytest.mark.parametrize(
    "common, own, found",
    [
        (
            {"model": {"config": A, "init_seed": 2}},
            {"model": {"path": "x"}},
            {"model": {"path": "x", "init_seed": 2}},
        ),
        ({"model": {"path": "x"}}, {"model": {"config": A}}, {"model": {"config": A}}),
        ({"model": {"config": A}}, {"model": {"config": B}}, {"model": {"config": A | B}}),
        ({"function": "math", "options": A}, {"parts": []}, {"parts": []}),
        ({"parts": []}, {"function": "f", "options": A}, {"function": "f", "options": A}),
        ({"function": "f", "options": A}, {"options": B}, {"function": "f", "options": A | B}),
    ],
)
def test_of_two_that_exclude_each_other_the_stages_counts(common, own, found):
    assert overlay({"reward": common}, {"reward": own}) == {"reward": found}


def test_a_section_of_the_file_excludes_nothing_but_the_tokenizers_ways():
    path = {"path": "x"}
    assert overlay({"tokenizer": {"train": "char", "name": "n"}}, {"tokenizer": path}) == {
        "tokenizer": {"path": "x", "name": "n"}
    }
    assert overlay({"data": {"options": {"a": 1}, "function": 1}}, {"data": path}) == {
        "data": {"options": {"a": 1}, "function": 1, "path": "x"}
    }


def test_an_override_counts_while_one_stage_takes_it():
    provenance = Provenance()
    common = {"run": {"steps": 9}, "sampling": {"top_k": 1}}
    provenance.record(common, COMMAND_LINE)
    stages = {"one": {"run": {"steps": 1}}, "two": {"run": {"steps": 2}, "sampling": {"top_k": 2}}}
    [problem] = shadowed_overrides({**common, "stages": stages}, provenance)
    assert problem.startswith("run.steps: given on the command line")
    assert problem.endswith("give stages.one.run.steps or stages.two.run.steps")
    assert shadowed_overrides({"run": {"steps": 1}}, provenance) == []


def test_an_override_of_what_a_stages_model_displaces_counts_for_nothing():
    """As the demo: one stage has a config of its own, the other the first one's model."""
    common = {"actor": {"model": {"config": {"hidden_size": 256}}}}
    provenance = Provenance()
    provenance.record(common, COMMAND_LINE)
    own = {"one": {"config": {"hidden_size": 128}}, "two": {"path": "stage:one"}}
    stages = {name: {"actor": {"model": model}} for name, model in own.items()}
    [problem] = shadowed_overrides({**common, "stages": stages}, provenance)
    assert problem.startswith("actor.model.config.hidden_size: given on the command line")
    assert not shadowed_overrides({**common, "stages": {**stages, "three": {}}}, provenance)


def test_the_tokenizer_is_in_the_actors_folder_before_others():
    ref = {"model": {"path": "ref"}}
    judge, actor = {"model": {"path": "judge"}}, {"model": {"path": "start"}}
    tables = {"ref": ref, "reward": judge, "actor": actor}
    assert tokenizer_folder(tables, {}) == ("start", False)
    assert tokenizer_folder({**tables, "actor": {}}, {}) == ("judge", False)
    assert tokenizer_folder({"ref": ref, "reward": "math"}, {}) == ("ref", False)
    none = {"actor": {"model": {"config": {}}}, "reward": "math"}
    assert tokenizer_folder(none, {}) == (None, False)


def test_the_tokenizer_of_a_run_is_in_its_export(tmp_path):
    run = tmp_path / "sums"
    (run / "export/actor").mkdir(parents=True)
    (run / "run.json").write_text("{}")
    write_sealed(run / "done.json", {"exported": True})
    tables = {"actor": {"model": {"path": str(run)}}}
    assert tokenizer_folder(tables, {}) == (str(run / "export/actor"), False)
    assert located_model({"path": str(run)}, tmp_path / "other", "actor") == {
        "path": str(run / "export/actor")
    }


def test_the_tokenizer_of_an_earlier_stage_is_in_its_run_folder():
    first, _ = jobs(text=STAGES)
    follows = {"actor": {"model": {"path": "stage:first/actor"}}}
    assert tokenizer_folder(follows, {"first": first}) == ("runs/tiny/first/tokenizer", True)
    assert tokenizer_folder(follows, {"first": None}) == (None, True)  # its own problems are said


def test_the_model_of_an_earlier_stage_lies_beside_the_stage(tmp_path):
    grpo = tmp_path / "grpo"
    assert located_model({"config": {}}, grpo, "actor") == {"config": {}}
    assert located_model({"path": "models/a"}, grpo, "actor") == {"path": "models/a"}
    for role in ("actor", "critic"):
        (tmp_path / "warm-up/export" / role).mkdir(parents=True)
    exports = tmp_path / "warm-up/export"
    for path, role, expected in (
        ("stage:warm-up", "critic", "critic"),
        ("stage:warm-up", "ref", "actor"),  # no role of the same name
        ("stage:warm-up/critic", "actor", "critic"),
    ):
        assert located_model({"path": path}, grpo, role) == {"path": str(exports / expected)}
