"""From a plugin's name to what the contracts promise: checked, and with the options that it takes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from hybridflow.core.contracts.data_source import DataConfig, DataSource
from hybridflow.core.contracts.environment import Environment
from hybridflow.core.contracts.protocol import BUILT_IN, TransferProtocol
from hybridflow.core.contracts.reward import FunctionReward, Reward
from hybridflow.core.contracts.tokenizer import Tokenizer, TokenizerConfig, Tokenizers
from hybridflow.core.errors import ConfigError
from hybridflow.core.plugins.registry import registry


def reward_from(name: str, options: Mapping[str, Any] | None = None) -> Reward:
    """The reward of a plugin's name, or of "package.module:object": a Reward class, or a function of one sample.

    Raises PluginError (no such reward) and ConfigError (options that it does not take).
    """
    return make_reward(registry().get("reward", name), name, options or {})


def make_reward(found: Any, name: str, options: Mapping[str, Any]) -> Reward:
    """A Reward of a Reward class or a function; `name` is for messages."""
    is_class = inspect.isclass(found)
    if not callable(found) or (is_class and not issubclass(found, Reward)):
        raise ConfigError(
            f"reward {name!r} is {found!r}; it must be a function of one sample, or a class derived from "
            "hybridflow.core.contracts.reward.Reward"
        )
    signature = inspect.signature(found)
    try:
        signature.bind(*(() if is_class else (None,)), **options)
    except TypeError as error:
        raise ConfigError(
            f"the options {dict(options)!r} do not fit reward {name!r}{signature}: {error}"
        ) from error
    return found(**options) if is_class else FunctionReward(found, **options)


def environment_class(name: str, options: Mapping[str, Any]) -> type[Environment]:
    """Raises PluginError (no such environment) and ConfigError (not one, or options that it does not take)."""
    found = registry().get("environment", name)
    if not (inspect.isclass(found) and issubclass(found, Environment)):
        raise ConfigError(
            f"environment {name!r} is {found!r}; it must be a class derived from hybridflow.core.Environment"
        )
    signature = inspect.signature(found)
    try:
        signature.bind(**options)
    except TypeError as error:
        raise ConfigError(
            f"the options {dict(options)!r} do not fit environment {name!r}{signature}: {error}"
        ) from error
    return found


def load_source(config: DataConfig) -> DataSource:
    """The source that data.source names. Raises PluginError, ConfigError (its options) or DataError (its data)."""
    found = registry().get("data_source", config.source)
    if not (inspect.isclass(found) and issubclass(found, DataSource)):
        raise ConfigError(
            f"data.source {config.source!r} is {found!r}; it must be a class derived from hybridflow.core.DataSource"
        )
    return found(config)


def build_tokenizer(
    config: TokenizerConfig,
    model_path: str | None = None,
    texts: Callable[[], Iterable[str]] = tuple,
) -> Tokenizer:
    """By the plugin that [tokenizer] names. `texts` gives the data's texts and is called only when one is trained.

    Raises ConfigError (contradicting settings), PluginError (no such plugin), ModelError (no tokenizer in the folder) and
    DataError (nothing to train on).
    """
    if problems := config.problems():
        raise ConfigError(problems)
    plugin: Tokenizers = registry().get(
        "tokenizer", config.name or registry().default("tokenizer")
    )()
    if config.characters is not None:
        return plugin.of_characters(config.characters)
    if config.train is not None:
        return plugin.train(config.train, config.vocab_size, texts)
    if config.path is not None:
        return plugin.load(config.path, "tokenizer.path")
    if model_path is not None:
        return plugin.load(model_path, "the actor's model.path")
    raise ConfigError(
        "the model has no folder to take a tokenizer from; give tokenizer.path, tokenizer.characters or tokenizer.train"
    )


def find_protocol(protocol: TransferProtocol | type[TransferProtocol] | str) -> TransferProtocol:
    """A protocol as it is, or by name: built in, else a plugin of kind "protocol". Raises PluginError."""
    if isinstance(protocol, TransferProtocol):
        return protocol
    if isinstance(protocol, type):
        return protocol()
    for built_in in BUILT_IN:
        if built_in.name == protocol:
            return built_in
    found = registry().get("protocol", protocol)
    return found() if isinstance(found, type) else found
