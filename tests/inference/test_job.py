"""Which settings of a run a job of inference takes, and what it puts in their place."""

from __future__ import annotations

import json
import shutil

import attrs
import pytest

from hybridflow.core.errors import ConfigError
from hybridflow.inference.job import (
    inference_tables,
    on_one_device,
    resolve,
    with_data,
    with_overrides,
)
from hybridflow.inference.models import FoundModel, find_model

TABLES = {
    "run": {"steps": 9, "seed": 5, "folder": "runs", "trackers": ["jsonl"]},
    "runtime": {"name": "ray"},
    "pools": {"main": [4], "engines": [2], "judge": [1]},
    "algorithm": {"name": "grpo"},
    "data": {"source": "jsonl", "path": "train.jsonl", "prompt": "{question}"},
    "validation": {"every": 3, "data": {"path": "test.jsonl"}},
    "sampling": {"max_tokens": 7},
    "rollout": {"name": "vllm"},
    "reward": {"model": {"path": "judge"}, "pool": "judge"},
    "critic": {"model": {"path": "critic"}},
    "actor": {
        "model": {"path": "start"},
        "optimizer": {"lr": 1.0},
        "layout": {"tp": 2},
        "backend": {"name": "fsdp", "precision": "bf16", "lora": {"rank": 4}},
        "generation": {"pool": "engines", "tp": 2},
    },
}


@pytest.fixture
def found(tmp_path) -> FoundModel:
    return FoundModel(
        "mine, step 3",
        tmp_path,
        3,
        {"path": "start"},
        tmp_path / "actor",
        "start",
        TABLES,
        precision="bf16",
    )


def test_what_generation_and_rewards_need_is_taken_and_nothing_that_trains(found, tmp_path):
    tables = inference_tables(found, tmp_path / "out", scored=True)
    assert tables["actor"] == {
        "model": {"path": "start"},
        "pool": "engines",
        "generation": {"tp": 2},
        "backend": {
            "name": "saved",
            "checkpoint": str(tmp_path / "actor"),
            "lora": {"rank": 4},
            "dtype": "bfloat16",
        },
    }
    # A reward's model has the trainer of the actor, without its adapters.
    assert tables["reward"] == {
        **TABLES["reward"],
        "backend": {"name": "fsdp", "precision": "bf16"},
    }
    assert tables["pools"] == {"engines": [2], "judge": [1]} and tables["runtime"] == {
        "name": "ray"
    }
    assert tables["run"] == {"seed": 5, "folder": str(tmp_path), "name": "out"}
    assert tables["rollout"] == {"name": "vllm"} and "critic" not in tables
    assert tables["data"] == TABLES["data"] and tables["validation"] == TABLES["validation"]
    assert TABLES["actor"]["generation"] == {
        "pool": "engines",
        "tp": 2,
    }  # the run's stay as they are


def test_without_scores_there_is_neither_reward_nor_held_out_set(found, tmp_path):
    tables = inference_tables(found, tmp_path / "out", engine="transformers")
    assert not {"reward", "validation"} & set(tables)
    assert tables["pools"] == {"engines": [2]} and tables["rollout"] == {"name": "transformers"}
    alone = on_one_device(found, tmp_path)
    assert alone["pools"] == {"main": [1]} and alone["runtime"] == {"name": "inline"}
    assert alone["actor"]["generation"] == {} and alone["actor"]["pool"] == "main"


def test_other_data_take_the_place_of_the_held_out_rows():
    jsonl = with_data(TABLES, "x/hard.jsonl")
    assert jsonl["data"] == {"source": "jsonl", "path": "x/hard.jsonl", "prompt": "{question}"}
    assert jsonl["validation"] == {"every": 3, "data": {}}

    # Options are of one source, and go with it.
    tables = {"data": {"source": "arithmetic", "options": {"split": "train"}, "limit": 3}}
    assert with_data(tables, "gsm.parquet")["data"] == {
        "source": "parquet",
        "path": "gsm.parquet",
        "limit": 3,
    }
    assert with_data(tables, "arithmetic")["data"] == {"source": "arithmetic", "limit": 3}


def test_a_folder_of_data_keeps_the_source(tmp_path):
    tables = {"data": {"source": "datasets", "options": {"split": "test"}}}
    own = with_data(tables, str(tmp_path))["data"]
    assert own == {"source": "datasets", "path": str(tmp_path), "options": {"split": "test"}}


def test_overrides_are_over_the_run_s_and_all_wrong_ones_are_named(sums, tmp_path):
    found = find_model(str(sums))
    tables = inference_tables(found, tmp_path / "out")
    job = resolve(with_overrides(tables, ["sampling.max_tokens=3", "rollout=transformers"], found))
    assert job.sampling.max_tokens == 3 and job.models["actor"].spec.engine == "transformers"
    with pytest.raises(ConfigError) as error:
        with_overrides(tables, ["a", "-b=1"], found)
    assert len(error.value.problems) == 2


@pytest.mark.parametrize(
    "file, fields, begins",
    [
        (None, {}, True),  # as exported: the run's data begin with bos
        ("tokenizer_config.json", {"add_bos_token": False}, False),
        ("tokenizer.json", {"post_processor": None}, False),
        (
            "tokenizer.json",
            {"post_processor": {"type": "Sequence", "processors": [{"type": "ByteLevel"}]}},
            False,
        ),
        (
            "tokenizer.json",
            {
                "post_processor": {
                    "type": "Sequence",
                    "processors": [
                        {"type": "ByteLevel"},
                        {
                            "type": "TemplateProcessing",
                            "single": [{"SpecialToken": {"id": "<s>"}}, {"Sequence": {"id": "A"}}],
                        },
                    ],
                }
            },
            True,
        ),
    ],
)
def test_texts_begin_as_the_tokenizer_of_a_folder_begins_them(sums, tmp_path, file, fields, begins):
    folder = shutil.copytree(sums / "export/actor", tmp_path / "folder")
    if file is not None:
        before = json.loads((folder / file).read_text()) if (folder / file).is_file() else {}
        (folder / file).write_text(json.dumps({**before, **fields}))
    found = find_model(str(folder))
    tables = on_one_device(found, tmp_path)
    assert with_overrides(tables, [], found)["data"]["bos"] is begins
    assert with_overrides(tables, ["data.bos=true"], found)["data"]["bos"] is True
    assert "bos" not in with_overrides(tables, ["data.messages=chat"], found)["data"]

    # A row's prompt may be a chat, whose template begins it.
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    assert "bos" not in with_overrides(tables, [], found)["data"]
    asked = with_overrides(tables, ["data.prompt='{question}='"], found)
    assert asked["data"]["bos"] is begins


def test_responses_of_a_folder_by_itself_fit_its_positions(sums, tmp_path):
    found = attrs.evolve(find_model(str(sums)), run=None, tables={})
    tables = inference_tables(found, tmp_path / "out")
    for override, response, prompt in ([], 16, 16), (["sampling.max_tokens=20"], 20, 12):
        merged = with_overrides(tables, override, found)
        assert merged["sampling"]["max_tokens"] == response
        assert merged["data"] == {"max_prompt_tokens": prompt, "bos": True}
        resolve(merged)


def test_rows_of_preferences_are_asked_once(found, tmp_path):
    tables = {
        **TABLES,
        "data": {"prompt": "{prompt}", "rejected": "{rejected}", "unsafe": ["a", "b"]},
        "validation": {"data": {"rejected": "{worse}", "limit": 3}},
        "reward": {"model": {"path": "stage:reward"}},
    }
    made = inference_tables(attrs.evolve(found, tables=tables), tmp_path / "out", scored=True)
    assert made["data"] == {"prompt": "{prompt}"} and made["validation"] == {"data": {"limit": 3}}
    # The reward's model of an earlier stage lies beside the run.
    assert made["reward"]["model"] == {"path": str(tmp_path.parent / "reward/export/reward")}
