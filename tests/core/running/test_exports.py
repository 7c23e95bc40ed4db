"""What transformers reads of an exported folder beside its weights: where texts begin, end and are padded."""

from __future__ import annotations

import json
from typing import Any

import attrs
import pytest
import torch
from helpers.sources import char
from transformers import AutoModelForCausalLM, AutoTokenizer, LogitsProcessor

from hybridflow.backends.tokenizers.small import load_small_tokenizer
from hybridflow.core.running.exports import begin_with_bos, write_special_tokens
from hybridflow.core.values.model import ModelSpec

SMALL = char()  # <pad>=0, <bos>=1, <eos>=2


def written(folder, config, generation=None, *, spec=None, tokenizer=SMALL, stops=(2,)) -> Any:
    """The fields of config.json and generation_config.json after the ids were written."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    write_special_tokens(folder, spec or ModelSpec({}, None, 0), tokenizer, stops)
    files = (folder / "config.json", folder / "generation_config.json")
    return [json.loads(file.read_text()) if file.exists() else None for file in files]


def test_a_model_from_a_config_gets_the_tokenizer_s_ids(tmp_path):
    # What transformers fills in for a llama without ids: bos 1, eos 2, of another tokenizer.
    wrong = {"model_type": "llama", "bos_token_id": 7, "eos_token_id": 8}
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    config, generation = written(tmp_path, wrong, {"_from_model_config": True, **wrong})
    assert config == {"model_type": "llama", **ids}
    assert generation == {"_from_model_config": True, "model_type": "llama", **ids}


def test_a_folder_s_own_ends_and_its_way_of_sampling_are_kept(tmp_path):
    own = {"eos_token_id": [9, 2], "temperature": 0.6, "do_sample": True}
    source = tmp_path / "source"
    source.mkdir()
    (source / "generation_config.json").write_text(json.dumps(own))
    spec = ModelSpec({}, str(source), 0)
    config, generation = written(tmp_path / "out", {"eos_token_id": [9, 2]}, spec=spec)
    assert config["eos_token_id"] == [9, 2]
    assert generation == {**own, "bos_token_id": 1, "pad_token_id": 0}


def test_tokens_that_ended_responses_in_training_end_them_in_transformers(tmp_path):
    _, generation = written(tmp_path, {}, stops=(5, 2))
    assert generation["eos_token_id"] == [2, 5]


def test_a_pad_that_is_the_eos_is_for_generation_alone(tmp_path):
    @attrs.frozen
    class Unpadded:
        bos_id: int | None = None
        eos_id: int = 4
        pad_id: int = 4

    unpadded: Any = Unpadded()
    config, generation = written(tmp_path, {}, tokenizer=unpadded, stops=(4,))
    assert config == {"eos_token_id": 4}
    assert generation == {"eos_token_id": 4, "pad_token_id": 4}


@pytest.mark.parametrize("kind", ["value", "score"])
def test_a_model_that_generates_nothing_has_no_generation_config(tmp_path, kind):
    config, generation = written(tmp_path, {}, spec=ModelSpec({}, None, 0, kind))
    assert config["eos_token_id"] == 2 and generation is None


class Ends(LogitsProcessor):
    """Makes eos certain after four tokens in all."""

    def __call__(self, ids, scores):
        forced = torch.full_like(scores, -torch.inf)
        forced[:, 2 if ids.shape[1] == 4 else 5] = 0.0
        return forced


def test_generate_of_transformers_stops_at_the_end_of_an_exported_model(tiny, tmp_path):
    tiny.session.export(tmp_path)
    folder = tmp_path / "export" / "actor"
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer("1+", add_special_tokens=False, return_tensors="pt")
    answer = model.generate(**prompt, max_new_tokens=20, logits_processor=[Ends()])
    assert answer.tolist() == [[4, 13, 5, 5, 2]]
    assert (model.config.bos_token_id, model.config.pad_token_id) == (1, 0)


def test_transformers_begins_texts_with_bos_where_the_data_did_and_we_do_not(tmp_path):
    SMALL.save(tmp_path)
    begin_with_bos(tmp_path, SMALL.bos_id)
    read = AutoTokenizer.from_pretrained(tmp_path)
    plain = SMALL.encode("12").tolist()
    assert read("12")["input_ids"] == [1, *plain]
    assert read("12", "1")["input_ids"] == [1, *plain, plain[0]]
    assert read("12", add_special_tokens=False)["input_ids"] == plain
    assert read.decode([1, *plain], skip_special_tokens=True) == "12"
    # Training puts bos there itself (data.bos).
    assert load_small_tokenizer(tmp_path).encode("12").tolist() == plain


def test_a_tokenizer_that_has_its_own_way_keeps_it(tmp_path):
    SMALL.save(tmp_path)
    file = tmp_path / "tokenizer.json"
    fields = json.loads(file.read_text())
    fields["post_processor"] = {
        "type": "ByteLevel",
        "add_prefix_space": True,
        "trim_offsets": True,
        "use_regex": True,
    }
    file.write_text(json.dumps(fields))
    begin_with_bos(tmp_path, SMALL.bos_id)
    assert json.loads(file.read_text()) == fields
    begin_with_bos(tmp_path / "none", 1)
    assert not (tmp_path / "none").exists()
