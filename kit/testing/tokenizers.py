"""TokenizerConformance: what a tokenizer spells comes back, travels to workers, and is the same after an export."""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest

from hybridflow.core.contracts.tokenizer import Tokenizer, Tokenizers
from hybridflow.core.errors import DataError, HybridFlowError
from hybridflow.kit.testing.checks import missing_fixture, require


class TokenizerConformance:
    """Give a fixture `plugin`: an instance of your Tokenizers; or override `tokenizer`, where it makes no small ones."""

    texts: tuple[str, ...] = ("17+25=42", "A b\nc", "0")
    """That it must spell."""

    @pytest.fixture
    def plugin(self) -> Tokenizers:
        return missing_fixture(self, "plugin", "an instance of your Tokenizers")

    @pytest.fixture
    def tokenizer(self, plugin: Tokenizers) -> Tokenizer:
        """One that knows `texts`."""
        return plugin.of_characters("".join(sorted(set("".join(self.texts)))))

    def _spelled(self, tokenizer: Tokenizer) -> list[list[int]]:
        return [tokenizer.encode(text).tolist() for text in self.texts]

    def test_what_is_spelled_comes_back(self, tokenizer):
        for text in self.texts:
            ids = tokenizer.encode(text)
            require(
                isinstance(ids, np.ndarray) and ids.dtype == np.int64 and ids.ndim == 1,
                got=repr(ids),
                expected="an int64 array of shape [T]",
                likely="a list, or the library's own type",
            )
            require(
                tokenizer.decode(ids) == text,
                got=repr(tokenizer.decode(ids)),
                expected=repr(text),
                likely="spaces are cleaned up, or letters are lost",
            )
            spelled = tokenizer.decode(ids, skip_special=False)
            require(
                spelled == text,
                got=repr(spelled),
                expected=f"{text!r}: nothing is added on the way in",
                likely="encode puts special tokens before or after the text",
            )

    def test_special_tokens_are_left_out_unless_asked_for(self, tokenizer):
        ids = [*tokenizer.encode(self.texts[0]).tolist(), tokenizer.eos_id]
        require(
            tokenizer.decode(ids) == self.texts[0] != tokenizer.decode(ids, skip_special=False),
            got=f"{tokenizer.decode(ids)!r}, {tokenizer.decode(ids, skip_special=False)!r}",
            expected=f"{self.texts[0]!r}, and that with the end's spelling",
            likely="skip_special is not passed on",
        )

    def test_its_size_is_one_more_than_the_largest_id(self, tokenizer):
        used = max(max(ids) for ids in self._spelled(tokenizer))
        special = max(
            i for i in (tokenizer.pad_id, tokenizer.eos_id, tokenizer.bos_id) if i is not None
        )
        require(
            max(used, special) < tokenizer.vocab_size,
            got=f"vocab_size {tokenizer.vocab_size} and the id {max(used, special)}",
            expected="vocab_size above every id",
            likely="added tokens are not counted",
        )

    def test_it_travels_to_workers(self, tokenizer):
        again = pickle.loads(pickle.dumps(tokenizer))
        require(
            self._spelled(again) == self._spelled(tokenizer),
            got=f"{self._spelled(again)}",
            expected=f"{self._spelled(tokenizer)}",
            likely="__reduce__ leaves a setting behind",
        )

    def test_what_was_exported_is_read_back_as_the_same(self, plugin, tokenizer, tmp_path: Path):
        tokenizer.save(tmp_path / "folder")
        again = plugin.load(str(tmp_path / "folder"), "tokenizer.path")
        require(
            self._spelled(again) == self._spelled(tokenizer),
            got=f"{self._spelled(again)}",
            expected=f"{self._spelled(tokenizer)}",
            likely="save writes less than load reads",
        )

    def test_a_folder_without_one_is_told(self, plugin, tmp_path: Path):
        for folder in (tmp_path, tmp_path / "none"):
            with pytest.raises(HybridFlowError, match=r"tokenizer\.path"):
                plugin.load(str(folder), "tokenizer.path")

    def test_messages_give_ids_or_say_that_there_is_no_template(self, tokenizer):
        try:
            ids: Iterable[int] = tokenizer.apply_chat_template(
                [{"role": "user", "content": self.texts[0]}]
            )
        except DataError:
            return
        require(
            len(list(ids)) > 0,
            got="nothing",
            expected="ids of the messages",
            likely="an empty template",
        )
