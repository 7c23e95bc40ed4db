"""Tokenizers: the run's own small ones, Hugging Face folders, export and the fit with a model."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridflow.core.data.build_tokenizer import HFTokenizer, build_tokenizer, load_tokenizer
from hybridflow.core.data.tokenizer import TokenizerConfig
from hybridflow.core.errors import ConfigError, DataError, ModelError

DIGITS = "0123456789+="
TEXTS = [
    "Natalia sold 48/2 = 24 clips in May.\n\nIt's 1,000!",
    "Weng earns $12 an hour; she'd worked 50 minutes.\n",
] * 20


def never():
    raise AssertionError("only a trained tokenizer reads the data")


def char(characters=DIGITS):
    return build_tokenizer(TokenizerConfig(characters=characters), None, never)


def bpe(vocab_size=320):
    return build_tokenizer(TokenizerConfig(train="bpe", vocab_size=vocab_size), None, lambda: TEXTS)


@pytest.fixture
def hf_folder(tmp_path):
    """A folder as a stranger's: a tokenizer with a chat template and without our mark."""
    from transformers import PreTrainedTokenizerFast

    hf = PreTrainedTokenizerFast(
        tokenizer_object=bpe().fast, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>", unk_token=None
    )
    hf.chat_template = (
        "{% for m in messages %}<bos>{{ m['role'] }}: {{ m['content'] }}<eos>{% endfor %}"
        "{% if add_generation_prompt %}<bos>assistant: {% endif %}"
    )
    hf.save_pretrained(tmp_path / "hf")
    return str(tmp_path / "hf")


def test_a_character_tokenizer_has_the_ids_of_the_recipe():
    tokenizer = char()
    assert (tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id, tokenizer.vocab_size) == (0, 1, 2, 15)
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
    with pytest.raises(DataError, match=r"does not know '-' \(character 2 of '17-05='\).*tokenizer.characters"):
        char().encode("17-05=")


def test_a_tokenizer_trained_on_characters_knows_exactly_those_of_the_data():
    tokenizer = build_tokenizer(TokenizerConfig(train="char"), None, lambda: iter(["ba", "cab"]))
    assert tokenizer.characters == "abc"
    with pytest.raises(DataError, match="does not know 'd'"):
        tokenizer.encode("abcd")


def test_bpe_spells_any_text_in_fewer_tokens_than_bytes():
    tokenizer = bpe()
    assert 259 < tokenizer.vocab_size <= 320
    for text in [*TEXTS[:2], "日本 🦙 never seen", ""]:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode(TEXTS[0])) < len(TEXTS[0].encode()) / 1.5


@pytest.mark.parametrize(
    "config, words",
    [
        (TokenizerConfig(path="a", characters="b"), "path and characters are given; keep one"),
        (TokenizerConfig(characters=""), "characters is empty"),
        (TokenizerConfig(characters="aba"), "'a' more than once"),
        (TokenizerConfig(train="word"), 'must be "char" or "bpe"'),
        (TokenizerConfig(train="bpe", vocab_size=100), "at least 259"),
        (TokenizerConfig(), "give tokenizer.path, tokenizer.characters or tokenizer.train"),
    ],
)
def test_contradicting_settings_say_what_to_change(config, words):
    with pytest.raises(ConfigError, match=words):
        build_tokenizer(config, None, lambda: TEXTS)


def test_training_on_characters_says_when_there_are_none_or_too_many():
    with pytest.raises(DataError, match="no text"):
        build_tokenizer(TokenizerConfig(train="char"), None, lambda: [])
    with pytest.raises(DataError, match=r"5 different characters, which take 8 tokens.*vocab_size is 7"):
        build_tokenizer(TokenizerConfig(train="char", vocab_size=7), None, lambda: ["abcde"])


@pytest.mark.parametrize("model_type", [None, "qwen2", "qwen3", "llama", "gpt2"])
@pytest.mark.parametrize("make", [char, lambda: char("aé’🦙日\n <"), bpe], ids=["ascii", "unicode", "bpe"])
def test_an_exported_folder_loads_with_auto_tokenizer_and_spells_the_same(tmp_path, make, model_type):
    from transformers import AutoTokenizer

    tokenizer = make()
    tokenizer.save(tmp_path)
    if model_type:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, "vocab_size": 400}))
    hf = AutoTokenizer.from_pretrained(tmp_path)
    text = TEXTS[0] + " 日本" if tokenizer.characters is None else tokenizer.characters * 2
    ids = tokenizer.encode(text)
    assert hf(text)["input_ids"] == ids.tolist()
    assert hf.decode(ids) == text
    assert (hf.pad_token_id, hf.bos_token_id, hf.eos_token_id) == (0, 1, 2)
    assert len(hf) == tokenizer.vocab_size


def test_an_exported_folder_is_read_back_as_the_same_tokenizer(tmp_path):
    char().save(tmp_path)
    again = build_tokenizer(TokenizerConfig(), str(tmp_path), never)
    assert again.encode("1+2=").tolist() == char().encode("1+2=").tolist()
    with pytest.raises(DataError, match="does not know 'x'"):
        again.encode("x")


def test_a_hugging_face_folder_encodes_without_adding_tokens_and_reads_spelled_special_tokens(hf_folder, tmp_path):
    tokenizer = build_tokenizer(TokenizerConfig(path=hf_folder), None, never)
    assert isinstance(tokenizer, HFTokenizer)
    ids = tokenizer.encode(TEXTS[0])
    assert ids.tolist() == bpe().encode(TEXTS[0]).tolist()
    assert tokenizer.decode([*ids, tokenizer.eos_id, 100_000]) == TEXTS[0]
    assert tokenizer.encode("<bos>").tolist() == [tokenizer.bos_id]
    tokenizer.save(tmp_path / "again")
    assert load_tokenizer(str(tmp_path / "again")).encode(TEXTS[1]).tolist() == tokenizer.encode(TEXTS[1]).tolist()


def test_a_chat_template_ends_with_the_opening_of_the_assistants_turn(hf_folder):
    tokenizer = load_tokenizer(hf_folder)
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}])
    assert ids.dtype == np.int64
    assert tokenizer.decode(ids, skip_special=False) == "<bos>user: Hi<eos><bos>assistant: "


def test_a_tokenizer_without_chat_template_says_so(hf_folder, tmp_path):
    with pytest.raises(DataError, match=r"chat template.*use data.prompt"):
        char().apply_chat_template([{"role": "user", "content": "1"}])
    tokenizer = load_tokenizer(hf_folder)
    tokenizer.hf.chat_template = None
    with pytest.raises(DataError, match=r"needs a chat template.*has none"):
        tokenizer.apply_chat_template([{"role": "user", "content": "1"}])


def test_a_folder_without_a_tokenizer_or_with_a_broken_one_is_named(tmp_path):
    with pytest.raises(ModelError, match=r"tokenizer.path: there is no folder"):
        build_tokenizer(TokenizerConfig(path=str(tmp_path / "no")), None, never)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"actor's model.path.*no tokenizer.json \(it has config.json\)"):
        build_tokenizer(TokenizerConfig(), str(tmp_path), never)
    (tmp_path / "tokenizer_config.json").write_text("{broken")
    with pytest.raises(ModelError, match="cannot be read"):
        load_tokenizer(str(tmp_path))


def test_a_tokenizer_that_exceeds_the_models_vocabulary_is_refused():
    char().check(15)
    with pytest.raises(ModelError, match=r"largest id is 14, but the model has only 14.*vocab_size = 15"):
        char().check(14)


def test_core_tokenizers_import_neither_transformers_nor_datasets():
    code = (
        "import sys, hybridflow.core.data.tokenizer, hybridflow.core.data.small_tokenizer, hybridflow.core.data\n"
        "bad = {'transformers', 'datasets', 'pyarrow', 'tokenizers', 'torch'} & set(sys.modules)\n"
        "sys.exit(str(bad) if bad else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
