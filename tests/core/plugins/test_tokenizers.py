"""The run's tokenizer: by the plugin, and the setting, that the configuration names."""

from __future__ import annotations

import pytest

from hybridflow.core.contracts.tokenizer import TokenizerConfig, Tokenizers
from hybridflow.core.errors import ConfigError, PluginError
from hybridflow.core.plugins.resolve import build_tokenizer

TEXTS = ["ba", "cab"]


class Lettered(Tokenizers):
    """Of a stranger: says what it was asked for."""

    def load(self, folder, setting):
        return ("load", folder, setting)

    def train(self, kind, vocab_size, texts):
        return ("train", kind, vocab_size, list(texts()))


def never():
    raise AssertionError("only a trained tokenizer reads the data")


@pytest.fixture
def lettered(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, __name__, sys.modules[__name__])
    return f"{__name__}:Lettered"


def test_the_setting_says_what_the_plugin_is_asked_for(lettered):
    trained = TokenizerConfig(name=lettered, train="bpe", vocab_size=300)
    assert build_tokenizer(trained, "model", lambda: TEXTS) == ("train", "bpe", 300, TEXTS)
    given = TokenizerConfig(name=lettered, path="there")
    assert build_tokenizer(given, "model", never) == ("load", "there", "tokenizer.path")
    assert build_tokenizer(TokenizerConfig(name=lettered), "model", never) == (
        "load",
        "model",
        "the actor's model.path",
    )


def test_what_a_plugin_does_not_make_is_told(lettered):
    with pytest.raises(ConfigError, match=r"Lettered makes no tokenizer of characters; give tokenizer\.path"):
        build_tokenizer(TokenizerConfig(name=lettered, characters="ab"), None, never)
    with pytest.raises(PluginError, match="unknown tokenizer 'huggingfaces'; did you mean 'huggingface'"):
        build_tokenizer(TokenizerConfig(name="huggingfaces", characters="ab"), None, never)


def test_the_default_plugin_makes_one_of_characters():
    made = build_tokenizer(TokenizerConfig(characters="01"), None, never)
    assert made.encode("10").tolist() == [4, 3]


@pytest.mark.parametrize(
    "config, words",
    [
        (TokenizerConfig(path="a", characters="b"), "path and characters are given; keep one"),
        (TokenizerConfig(characters=""), "characters is empty"),
        (TokenizerConfig(characters="aba"), "'a' more than once"),
        (TokenizerConfig(train="bpe", vocab_size=100), "at least 259"),
        (TokenizerConfig(), "give tokenizer.path, tokenizer.characters or tokenizer.train"),
    ],
)
def test_contradicting_settings_say_what_to_change(config, words):
    with pytest.raises(ConfigError, match=words):
        build_tokenizer(config, None, lambda: TEXTS)
