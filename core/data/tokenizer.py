"""The run's tokenizer: read from a folder, or made."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from hybridflow.core.contracts.tokenizer import Tokenizer, TokenizerConfig, Tokenizers
from hybridflow.core.errors import ConfigError
from hybridflow.core.plugins import registry


def build_tokenizer(config: TokenizerConfig, model_path: str | None, texts: Callable[[], Iterable[str]]) -> Tokenizer:
    """By the plugin that [tokenizer] names. `texts` gives the data's texts and is called only when one is trained.

    Raises ConfigError (contradicting settings), PluginError (no such plugin), ModelError (no tokenizer in the folder) and
    DataError (nothing to train on).
    """
    if problems := config.problems():
        raise ConfigError(problems)
    plugin: Tokenizers = registry().get("tokenizer", config.name or registry().default("tokenizer"))()
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
