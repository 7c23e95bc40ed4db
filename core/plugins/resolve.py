"""Makes the object of a plugin by its name, and checks its class and its options."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from hybridflow.core.contracts.data_source import DataConfig, DataSource
from hybridflow.core.contracts.environment import Environment
from hybridflow.core.contracts.planner import Planner
from hybridflow.core.contracts.protocol import BUILT_IN, TransferProtocol
from hybridflow.core.contracts.reward import FunctionReward, Reward
from hybridflow.core.contracts.tokenizer import Tokenizer, TokenizerConfig, Tokenizers
from hybridflow.core.errors import ConfigError
from hybridflow.core.plugins.lookup import registry

FOREIGN = {"completions": "TRL", "solution_str": "verl"}
"""Parameters of other libraries' reward functions -> the library."""


def reward_from(name: str, options: Mapping[str, Any] | None = None) -> Reward:
    """Make the reward of a plugin's name or of "package.module:object".

    Raises PluginError (no such reward) and ConfigError (options that it does not take).
    """
    return make_reward(registry().get("reward", name), name, options or {})


def make_reward(found: Any, name: str, options: Mapping[str, Any]) -> Reward:
    """Make a Reward from `found`, a Reward class or a function of one sample.

    `name` is for messages. Raises ConfigError for anything else, and for options that do not fit.
    """
    is_class = inspect.isclass(found)
    if not callable(found) or (is_class and not issubclass(found, Reward)):
        raise ConfigError(
            f"reward {name!r} is {found!r}; it must be a function of one sample, or a class "
            "derived from hybridflow.core.contracts.reward.Reward"
        )

    # A function for another library that takes any keyword would pass the check below.
    signature = inspect.signature(found)
    for parameter, library in FOREIGN.items():
        if parameter in signature.parameters and parameter not in options:
            raise ConfigError(
                f"reward {name!r}{signature} has {library}'s form; name it as it is by function = "
                f'"{library.lower()}", options = {{ function = "{name}" }}, or write it for one '
                f"sample: def {found.__name__}(sample) -> float, with sample.prompt, "
                "sample.response, sample.answer and the row's fields in sample.meta"
            )

    # A class takes only the options, a function the sample before them.
    positional = () if is_class else (None,)
    try:
        signature.bind(*positional, **options)
    except TypeError as error:
        raise ConfigError(
            f"the options {dict(options)!r} do not fit reward {name!r}{signature}: {error}"
        ) from error
    return found(**options) if is_class else FunctionReward(found, **options)


def make_environment(name: str, options: Mapping[str, Any]) -> Environment:
    """Make a new object of an environment with its options.

    Raises PluginError (no such environment), ConfigError (not an environment, or options that it
    does not take), and whatever else its class raises.
    """
    plugin = registry().get("environment", name)
    if not (inspect.isclass(plugin) and issubclass(plugin, Environment)):
        raise ConfigError(
            f"environment {name!r} is {plugin!r}; it must be a class derived from "
            "hybridflow.core.Environment"
        )

    signature = inspect.signature(plugin)
    try:
        signature.bind(**options)
    except TypeError as error:
        raise ConfigError(
            f"the options {dict(options)!r} do not fit environment {name!r}{signature}: {error}"
        ) from error
    return plugin(**options)


def load_source(config: DataConfig) -> DataSource:
    """Make the data source that data.source names.

    Raises PluginError (no such source), ConfigError (its options) or DataError (its data).
    """
    # The registry knows no contract of data sources, so the class is checked here.
    plugin = registry().get("data_source", config.source)
    if not (inspect.isclass(plugin) and issubclass(plugin, DataSource)):
        raise ConfigError(
            f"data.source {config.source!r} is {plugin!r}; it must be a class derived from "
            "hybridflow.core.DataSource"
        )
    return plugin(config)


def build_tokenizer(
    config: TokenizerConfig,
    model_path: str | None = None,
    texts: Callable[[], Iterable[str]] = tuple,
) -> Tokenizer:
    """Make the tokenizer by the plugin that [tokenizer] names.

    Its source is the first of: config.characters, config.train, config.path, `model_path`, the
    folder of the models. `texts` returns the texts of the data, and is called only to train.

    Raises ConfigError (contradicting settings, or no source), PluginError (no such plugin),
    ModelError (no tokenizer in the folder) and DataError (nothing to train on).
    """
    if problems := config.problems():
        raise ConfigError(problems)

    # Every plugin of this kind is a class without options: all are in [tokenizer].
    name = config.name or registry().default("tokenizer")
    plugin: Tokenizers = registry().get("tokenizer", name)()

    # The source that [tokenizer] names comes before the models' own.
    if config.characters is not None:
        return plugin.of_characters(config.characters)
    if config.train is not None:
        return plugin.train(config.train, config.vocab_size, texts)
    if config.path is not None:
        return plugin.load(config.path, "tokenizer.path")
    if model_path is not None:
        return plugin.load(model_path, "the actor's model.path")
    raise ConfigError(
        "the model has no folder to take a tokenizer from; give tokenizer.path, "
        "tokenizer.characters or tokenizer.train"
    )


def build_planner(name: str, config: Any) -> Planner:
    """Make a planner by its plugin's name ("" for none) and its settings.

    Raises ConfigError where none is installed.
    """
    if not name:
        raise ConfigError("placement.planner: no planner is installed")
    planner_class: type[Planner] = registry().get("planner", name)
    return planner_class(config)


def find_protocol(protocol: TransferProtocol | type[TransferProtocol] | str) -> TransferProtocol:
    """Make a transfer protocol from an object, a class or a name.

    A name is of a built-in protocol, else of a plugin of kind "protocol". Raises PluginError where
    there is none.
    """
    if isinstance(protocol, TransferProtocol):
        return protocol
    if isinstance(protocol, type):
        return protocol()

    for built_in in BUILT_IN:
        if built_in.name == protocol:
            return built_in

    # A plugin may be a class, or an object that is ready for use.
    plugin = registry().get("protocol", protocol)
    return plugin() if isinstance(plugin, type) else plugin
