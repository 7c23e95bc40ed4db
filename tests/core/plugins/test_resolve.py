"""From names to rewards, environments, sources, tokenizers and protocols, with their options."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from hybridflow.core.contracts.data_source import DataConfig, DataSource
from hybridflow.core.contracts.environment import Answer, Environment
from hybridflow.core.contracts.protocol import Protocol, SplitProtocol
from hybridflow.core.contracts.reward import Reward, RewardSample
from hybridflow.core.contracts.tokenizer import TokenizerConfig, Tokenizers
from hybridflow.core.errors import ConfigError, PluginError
from hybridflow.core.plugins.resolve import (
    build_tokenizer,
    find_protocol,
    load_source,
    make_environment,
    make_reward,
    reward_from,
)

TEXTS = ["ba", "cab"]
SAMPLE = RewardSample("1+1=", "2", np.array([5, 2]), {"answer": "2"})


def letters(sample, each=1.0):
    """A reward that is a function."""
    return each * len(sample.response)


class Constant(Reward):
    """A reward that is a class."""

    def __init__(self, value):
        self.value = value

    def __call__(self, samples):
        return [self.value for _ in samples]


class Echo(Environment):
    def __init__(self, times=1):
        self.times = times

    def step(self, turn):
        return Answer(text=turn.text * self.times)


class Letters(DataSource):
    def __len__(self):
        return len(self.config.options["letters"])

    def __getitem__(self, i):
        return {"prompt": self.config.options["letters"][i]}


class Backwards(SplitProtocol):
    name = "BACKWARDS"


def of_trl(prompts, completions, **kwargs):
    return [0.0 for _ in completions]


def of_verl(data_source, solution_str, ground_truth, extra_info=None):
    return 0.0


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    """This module by its name, whichever way pytest imported it."""
    monkeypatch.setitem(sys.modules, __name__, sys.modules[__name__])


def path(thing: str) -> str:
    return f"{__name__}:{thing}"


def test_a_reward_is_a_function_or_a_class_with_its_options():
    assert reward_from(path("letters"))([SAMPLE]) == [1.0]
    assert reward_from(path("letters"), {"each": 0.5})([SAMPLE, SAMPLE]) == [0.5, 0.5]
    assert make_reward(Constant, "constant", {"value": 3.0})([SAMPLE]) == [3.0]
    assert list(reward_from("exact_match")([SAMPLE])) == [1.0]


@pytest.mark.parametrize(
    "found, options, why",
    [
        (letters, {"eac": 1}, r"options \{'eac': 1\} do not fit reward 'mine'\(sample, each=1.0\)"),
        (Constant, {}, r"options \{\} do not fit reward 'mine'\(value\): missing .* 'value'"),
        (3, {}, "reward 'mine' is 3; it must be a function of one sample, or a class derived from"),
        (Echo, {}, "reward 'mine' is <class .*Echo'>; it must be a function"),
        (of_trl, {}, r"has TRL's form; .*def of_trl\(sample\)"),
        (of_verl, {}, "has verl's form"),
    ],
    ids=["unknown option", "missing option", "a number", "another class", "TRL's", "verl's"],
)
def test_what_is_no_reward_or_does_not_take_its_options_is_refused(found, options, why):
    with pytest.raises(ConfigError, match=why):
        make_reward(found, "mine", options)


def test_an_environment_is_a_class_that_takes_its_options():
    made = make_environment(path("Echo"), {"times": 2})
    assert type(made) is Echo and made.times == 2
    with pytest.raises(ConfigError, match=r"\{'time': 2\} do not fit environment .*\(times=1\)"):
        make_environment(path("Echo"), {"time": 2})
    with pytest.raises(ConfigError, match="it must be a class derived from"):
        make_environment(path("letters"), {})
    with pytest.raises(PluginError, match="unknown environment 'echo'"):
        make_environment("echo", {})


def test_a_source_is_a_class_made_with_the_settings_of_the_data():
    source = load_source(DataConfig(source=path("Letters"), options={"letters": "abc"}))
    assert [source[i]["prompt"] for i in range(len(source))] == ["a", "b", "c"]
    with pytest.raises(ConfigError, match=r"data\.source '.*Echo' is .*; it must be a class"):
        load_source(DataConfig(source=path("Echo")))
    with pytest.raises(PluginError, match="unknown data_source 'jsonll'; did you mean 'jsonl'"):
        load_source(DataConfig(source="jsonll"))


def test_a_protocol_is_found_by_name_by_path_and_as_it_is():
    assert find_protocol("DP") is Protocol.DP
    mine = Backwards()
    assert find_protocol(mine) is mine and isinstance(find_protocol(Backwards), Backwards)
    assert isinstance(find_protocol(path("Backwards")), Backwards)
    with pytest.raises(PluginError, match="unknown protocol 'BACKWARDS'"):
        find_protocol("BACKWARDS")


class Lettered(Tokenizers):
    """Of a stranger: says what it was asked for."""

    def load(self, folder, setting):
        return ("load", folder, setting)

    def train(self, kind, vocab_size, texts):
        return ("train", kind, vocab_size, list(texts()))


def never():
    raise AssertionError("only a trained tokenizer reads the data")


def test_the_setting_says_what_the_plugin_is_asked_for():
    trained = TokenizerConfig(name=path("Lettered"), train="bpe", vocab_size=300)
    assert build_tokenizer(trained, "model", lambda: TEXTS) == ("train", "bpe", 300, TEXTS)
    given = TokenizerConfig(name=path("Lettered"), path="there")
    assert build_tokenizer(given, "model", never) == ("load", "there", "tokenizer.path")
    assert build_tokenizer(TokenizerConfig(name=path("Lettered")), "model", never) == (
        "load",
        "model",
        "the actor's model.path",
    )


def test_what_a_plugin_does_not_make_is_told():
    with pytest.raises(ConfigError, match=r"give tokenizer\.path"):
        build_tokenizer(TokenizerConfig(name=path("Lettered"), characters="ab"), None, never)
    with pytest.raises(PluginError, match="did you mean 'huggingface'"):
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
