"""The run's own small tokenizers, and their export."""

from __future__ import annotations

import json
import pickle

import numpy as np
import pytest
from helpers.sources import TEXTS, bpe, char
from hypothesis import given, strategies as st

from hybridflow.backends.tokenizers.small import load_small_tokenizer, train_tokenizer
from hybridflow.core.errors import DataError


def test_a_character_tokenizer_has_the_ids_of_the_recipe():
    tokenizer = char()
    assert (tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id, tokenizer.vocab_size) == (
        0,
        1,
        2,
        15,
    )
    ids = tokenizer.encode("17+05=")
    assert ids.dtype == np.int64
    assert ids.tolist() == [4, 10, 13, 3, 8, 14]


def test_decoding_leaves_special_tokens_out_unless_asked_and_ignores_ids_beyond_the_vocabulary():
    tokenizer = char()
    ids = [1, 4, 10, 2, 0, 999]
    assert tokenizer.decode(ids) == "17"
    assert tokenizer.decode(np.array(ids), skip_special=False) == "<bos>17<eos><pad>"
    assert tokenizer.decode([]) == ""


@given(st.text(alphabet="ab \n<>eos0é’🦙日本", max_size=30))
def test_any_text_of_known_characters_comes_back_one_token_each(text):
    tokenizer = char("ab \n<>eos0é’🦙日本")
    ids = tokenizer.encode(text)
    assert len(ids) == len(text)
    assert tokenizer.decode(ids) == text


def test_special_tokens_have_no_spelling_in_the_small_tokenizers():
    for tokenizer in (char("<eos>"), bpe()):
        again = pickle.loads(pickle.dumps(tokenizer))
        for each in (tokenizer, again):
            ids = each.encode("<eos>")
            assert each.eos_id not in ids
            assert each.decode(ids) == "<eos>"


def test_an_unknown_character_is_an_error_that_names_text_and_character():
    with pytest.raises(DataError, match=r"'-' .*tokenizer.characters"):
        char().encode("17-05=")


def test_a_tokenizer_trained_on_characters_knows_exactly_those_of_the_data():
    tokenizer = train_tokenizer("char", 1024, lambda: iter(["ba", "cab"]))
    assert tokenizer.characters == "abc"
    with pytest.raises(DataError, match="does not know 'd'"):
        tokenizer.encode("abcd")


def test_bpe_spells_any_text_in_fewer_tokens_than_bytes():
    tokenizer = bpe()
    assert 259 < tokenizer.vocab_size <= 320
    for text in [*TEXTS[:2], "日本 🦙 never seen", ""]:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode(TEXTS[0])) < len(TEXTS[0].encode()) / 1.5


def test_training_on_characters_says_when_there_are_none_or_too_many():
    with pytest.raises(DataError, match="no text"):
        train_tokenizer("char", 1024, lambda: [])
    with pytest.raises(DataError, match=r"5 different .* 8 tokens.* 7"):
        train_tokenizer("char", 7, lambda: ["abcde"])


@pytest.mark.parametrize("model_type", [None, "qwen2", "qwen3", "llama", "gpt2"])
@pytest.mark.parametrize(
    "make", [char, lambda: char("aé’🦙日\n <"), bpe], ids=["ascii", "unicode", "bpe"]
)
def test_an_exported_folder_loads_with_auto_tokenizer_and_spells_the_same(
    tmp_path, make, model_type
):
    from transformers import AutoTokenizer

    tokenizer = make()
    tokenizer.save(tmp_path)
    if model_type:
        (tmp_path / "config.json").write_text(
            json.dumps({"model_type": model_type, "vocab_size": 400})
        )
    hf = AutoTokenizer.from_pretrained(tmp_path)
    text = TEXTS[0] + " 日本" if tokenizer.characters is None else tokenizer.characters * 2
    ids = tokenizer.encode(text)
    assert hf(text)["input_ids"] == ids.tolist()
    assert hf.decode(ids) == text
    assert (hf.pad_token_id, hf.bos_token_id, hf.eos_token_id) == (0, 1, 2)
    assert len(hf) == tokenizer.vocab_size


def test_an_exported_folder_is_read_back_as_the_same_tokenizer(tmp_path):
    char().save(tmp_path)
    again = load_small_tokenizer(tmp_path)
    assert again is not None
    assert again.encode("1+2=").tolist() == char().encode("1+2=").tolist()
    with pytest.raises(DataError, match="does not know 'x'"):
        again.encode("x")
