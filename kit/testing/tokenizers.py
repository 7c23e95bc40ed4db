"""TokenizerConformance: encoding and decoding give the text back, here and elsewhere.

A tokenizer does the same after it travelled to a worker, and after an export.
"""

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
    """Subclass it and give a fixture `plugin`: an instance of your Tokenizers.

    Override the fixture `tokenizer` where the plugin makes no tokenizers of given characters.
    """

    texts: tuple[str, ...] = ("17+25=42", "A b\nc", "0")
    """Texts that the tokenizer must spell."""

    @pytest.fixture
    def plugin(self) -> Tokenizers:
        """The author's plugin."""
        return missing_fixture(self, "plugin", "an instance of your Tokenizers")

    @pytest.fixture
    def tokenizer(self, plugin: Tokenizers) -> Tokenizer:
        """A tokenizer that knows the characters of `texts`."""
        # Sorted, so that a character has the same id in every process.
        characters = set("".join(self.texts))
        return plugin.of_characters("".join(sorted(characters)))

    def _spelled(self, tokenizer: Tokenizer) -> list[list[int]]:
        """Return the ids of each text."""
        return [tokenizer.encode(text).tolist() for text in self.texts]

    def test_what_is_spelled_comes_back(self, tokenizer):
        """Ids are int64 [T], decode to the text, and have no special tokens among them."""
        for text in self.texts:
            ids = tokenizer.encode(text)
            require(
                isinstance(ids, np.ndarray) and ids.dtype == np.int64 and ids.ndim == 1,
                got=repr(ids),
                expected="an int64 array of shape [T]",
                likely="a list, or the library's own type",
            )

            # With and without special tokens, of which encode adds none.
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
        """The end token behind a text is spelled only with skip_special=False."""
        text = self.texts[0]
        ids = [*tokenizer.encode(text).tolist(), tokenizer.eos_id]
        # The end token is the last id.
        plain = tokenizer.decode(ids)
        spelled = tokenizer.decode(ids, skip_special=False)
        require(
            plain == text != spelled,
            got=f"{plain!r}, {spelled!r}",
            expected=f"{text!r}, and that with the end's spelling",
            likely="skip_special is not passed on",
        )

    def test_its_size_is_one_more_than_the_largest_id(self, tokenizer):
        """Every id of the texts, and of the special tokens, lies below vocab_size."""
        used = max(max(ids) for ids in self._spelled(tokenizer))
        special_ids = (tokenizer.pad_id, tokenizer.eos_id, tokenizer.bos_id)
        special = max(token for token in special_ids if token is not None)
        largest = max(used, special)
        require(
            largest < tokenizer.vocab_size,
            got=f"vocab_size {tokenizer.vocab_size} and the id {largest}",
            expected="vocab_size above every id",
            likely="added tokens are not counted",
        )

    def test_it_travels_to_workers(self, tokenizer):
        """A pickled tokenizer gives the same ids."""
        arrived = pickle.loads(pickle.dumps(tokenizer))
        require(
            self._spelled(arrived) == self._spelled(tokenizer),
            got=f"{self._spelled(arrived)}",
            expected=f"{self._spelled(tokenizer)}",
            likely="__reduce__ leaves a setting behind",
        )

    def test_what_was_exported_is_read_back_as_the_same(self, plugin, tokenizer, tmp_path: Path):
        """`load` reads the folder that `save` wrote, and gives the same ids."""
        folder = tmp_path / "folder"
        tokenizer.save(folder)
        loaded = plugin.load(str(folder), "tokenizer.path")
        require(
            self._spelled(loaded) == self._spelled(tokenizer),
            got=f"{self._spelled(loaded)}",
            expected=f"{self._spelled(tokenizer)}",
            likely="save writes less than load reads",
        )

    def test_a_folder_without_one_is_told(self, plugin, tmp_path: Path):
        """An empty folder, and a missing one, are an error that names the setting."""
        for folder in (tmp_path, tmp_path / "none"):
            with pytest.raises(HybridFlowError, match=r"tokenizer\.path"):
                plugin.load(str(folder), "tokenizer.path")

    def test_messages_give_ids_or_say_that_there_is_no_template(self, tokenizer):
        """apply_chat_template returns ids, or raises DataError where there is no template.

        So it does with tools and options, and of a chat that ends with the assistant's turn.
        """
        messages = [{"role": "user", "content": self.texts[0]}]
        answered = [*messages, {"role": "assistant", "content": self.texts[0]}]
        for chat, complete in ((messages, False), (answered, True)):
            try:
                ids: Iterable[int] = tokenizer.apply_chat_template(
                    chat, tools=(), options={}, complete=complete
                )
            except DataError:
                return

            require(
                len(list(ids)) > 0,
                got="nothing",
                expected="ids of the messages",
                likely="an empty template",
            )
