"""Every invariant of TokenizerConformance notices the fault that it is for."""

from __future__ import annotations

import inspect
from pathlib import Path

import numpy as np
import pytest
from helpers.expect import caught, each_fault

from hybridflow.core.contracts.tokenizer import Tokenizer, Tokenizers
from hybridflow.core.errors import DataError, ModelError
from hybridflow.kit.testing.tokenizers import TokenizerConformance


class Letters(Tokenizer):
    """One token a letter, after the end and the padding."""

    eos_id = 0
    pad_id = 1
    bos_id = None

    def __init__(self, letters):
        self.letters = letters
        self.vocab_size = len(letters) + 2

    def encode(self, text):
        return np.array([self.letters.index(letter) + 2 for letter in text], dtype=np.int64)

    def decode(self, ids, skip_special=True):
        special = ["", ""] if skip_special else ["<eos>", "<pad>"]
        return "".join([*special, *self.letters][i] for i in ids)

    def apply_chat_template(self, messages, tools=(), options=None, complete=False):
        raise DataError("no template")

    def save(self, folder):
        Path(folder).mkdir()
        Path(folder, "letters.txt").write_text(self.letters)


class Plugin(Tokenizers):
    made: type[Tokenizer] = Letters

    def of_characters(self, characters):
        return self.made(characters)

    def load(self, folder, setting):
        path = Path(folder, "letters.txt")
        if not path.exists():
            raise ModelError(f"{setting}: {path} is not there")
        return self.made(path.read_text())


class GivesLists(Letters):
    def encode(self, text):
        return super().encode(text).tolist()


class NarrowIds(Letters):
    def encode(self, text):
        return super().encode(text).astype(np.int32)


class CleansSpaces(Letters):
    def decode(self, ids, skip_special=True):
        return " ".join(super().decode(ids, skip_special).split())


class AddsItsEnd(Letters):
    def encode(self, text):
        return np.append(super().encode(text), self.eos_id)


class SpellsItsEnd(Letters):
    def decode(self, ids, skip_special=True):
        return super().decode(ids, skip_special=False)


class HidesItsEnd(Letters):
    def decode(self, ids, skip_special=True):
        return super().decode(ids, skip_special=True)


class ForgetsAddedTokens(Letters):
    def __init__(self, letters):
        super().__init__(letters)
        self.vocab_size = len(letters)


class EndBeyondItsSize(Letters):
    def __init__(self, letters):
        super().__init__(letters)
        self.eos_id = self.vocab_size


class ForgetsItsOrder(Letters):
    """On its way to a worker."""

    def __reduce__(self):
        return ForgetsItsOrder, (self.letters[::-1],)


class SavesAnOrderOfItsOwn(Letters):
    def save(self, folder):
        Letters(self.letters[::-1]).save(folder)


class EmptyTemplate(Letters):
    def apply_chat_template(self, messages, tools=(), options=None, complete=False):
        return np.zeros(0, np.int64)


FAULTS = {
    "test_what_is_spelled_comes_back": [GivesLists, NarrowIds, CleansSpaces, AddsItsEnd],
    "test_special_tokens_are_left_out_unless_asked_for": [SpellsItsEnd, HidesItsEnd],
    "test_its_size_is_one_more_than_the_largest_id": [ForgetsAddedTokens, EndBeyondItsSize],
    "test_it_travels_to_workers": [ForgetsItsOrder],
    "test_what_was_exported_is_read_back_as_the_same": [SavesAnOrderOfItsOwn],
    "test_messages_give_ids_or_say_that_there_is_no_template": [EmptyTemplate],
}
FOLDER = "test_a_folder_without_one_is_told"


def plugin_of(tokenizer):
    plugin = Plugin()
    plugin.made = tokenizer
    return plugin


@each_fault(TokenizerConformance, FAULTS, {FOLDER})
def test_the_fault_is_noticed(fault, method, tmp_path):
    letters = "".join(sorted(set("".join(TokenizerConformance.texts))))
    given = {"plugin": plugin_of(fault), "tokenizer": fault(letters), "tmp_path": tmp_path}
    takes = inspect.signature(getattr(TokenizerConformance(), method)).parameters
    caught(TokenizerConformance, method, **{name: given[name] for name in takes})


class ReadsAnyFolder(Plugin):
    def load(self, folder, setting):
        return Letters("01")


class SaysNoSetting(Plugin):
    def load(self, folder, setting):
        raise ModelError("something is not there")


def test_a_plugin_that_reads_any_folder_or_names_no_setting_is_noticed(tmp_path):
    method = getattr(TokenizerConformance(), FOLDER)
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        method(ReadsAnyFolder(), tmp_path)
    with pytest.raises(AssertionError, match="something is not there"):
        method(SaysNoSetting(), tmp_path)


class TestAGoodPlugin(TokenizerConformance):
    """With the kit's own tokenizer, which knows what it must spell."""

    @pytest.fixture
    def plugin(self):
        return Plugin()

    def test_the_tokenizer_knows_the_texts_alone(self, tokenizer):
        assert set(tokenizer.letters) == set("".join(self.texts))
