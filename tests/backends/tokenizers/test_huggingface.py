"""Tokenizers of Hugging Face folders."""

from __future__ import annotations

import numpy as np
import pytest
from helpers.sources import TEXTS, bpe, char
from helpers.templates import with_template

from hybridflow.backends.tokenizers.huggingface import (
    HFTokenizer,
    HuggingFaceTokenizers,
    load_tokenizer,
)
from hybridflow.core.errors import DataError, ModelError
from hybridflow.kit.testing import TokenizerConformance


@pytest.fixture
def hf_folder(tmp_path):
    """A folder as a stranger's: a tokenizer with a chat template and without our mark."""
    hf = with_template(
        "{% for m in messages %}<bos>{{ m['role'] }}: {{ m['content'] }}<eos>{% endfor %}"
        "{% if add_generation_prompt %}<bos>assistant: {% endif %}"
    )
    hf.save_pretrained(tmp_path / "hf")
    return str(tmp_path / "hf")


def test_a_hugging_face_folder_encodes_without_adding_tokens_and_reads_spelled_special_tokens(
    hf_folder, tmp_path
):
    tokenizer = load_tokenizer(hf_folder)
    assert isinstance(tokenizer, HFTokenizer)
    ids = tokenizer.encode(TEXTS[0])
    assert ids.tolist() == bpe().encode(TEXTS[0]).tolist()
    assert tokenizer.decode([*ids, tokenizer.eos_id, 100_000]) == TEXTS[0]
    assert tokenizer.encode("<bos>").tolist() == [tokenizer.bos_id]
    tokenizer.save(tmp_path / "again")
    assert (
        load_tokenizer(str(tmp_path / "again")).encode(TEXTS[1]).tolist()
        == tokenizer.encode(TEXTS[1]).tolist()
    )


def test_a_chat_template_ends_with_the_opening_of_the_assistants_turn(hf_folder):
    tokenizer = load_tokenizer(hf_folder)
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}])
    assert ids.dtype == np.int64
    assert tokenizer.decode(ids, skip_special=False) == "<bos>user: Hi<eos><bos>assistant: "


def test_a_chat_template_gets_tools_and_options_and_may_be_complete(hf_folder):
    tokenizer = load_tokenizer(hf_folder)
    tokenizer.hf.chat_template = (
        "{{ tools | length if tools else 0 }}{{ mood }}{% for m in messages %}{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}>{% endif %}"
    )
    chat = [{"role": "user", "content": "Hi"}]
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    assert tokenizer.decode(tokenizer.apply_chat_template(chat)) == "0Hi>"
    ids = tokenizer.apply_chat_template(chat, tools, {"mood": "!"}, complete=True)
    assert tokenizer.decode(ids) == "1!Hi"


def test_a_tokenizer_without_chat_template_says_so(hf_folder, tmp_path):
    with pytest.raises(DataError, match=r"chat template.*use data.prompt"):
        char().apply_chat_template([{"role": "user", "content": "1"}])
    tokenizer = load_tokenizer(hf_folder)
    tokenizer.hf.chat_template = None
    with pytest.raises(DataError, match=r"needs a chat template.*has none"):
        tokenizer.apply_chat_template([{"role": "user", "content": "1"}])


def test_a_folder_without_a_tokenizer_or_with_a_broken_one_is_named(tmp_path):
    with pytest.raises(ModelError, match=r"tokenizer.path: there is no folder"):
        load_tokenizer(str(tmp_path / "no"), "tokenizer.path")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"actor's model.path"):
        load_tokenizer(str(tmp_path), "the actor's model.path")
    (tmp_path / "tokenizer_config.json").write_text("{broken")
    with pytest.raises(ModelError, match="cannot be read"):
        load_tokenizer(str(tmp_path))


class TestOurs(TokenizerConformance):
    @pytest.fixture
    def plugin(self):
        return HuggingFaceTokenizers()
