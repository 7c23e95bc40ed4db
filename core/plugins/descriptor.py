"""What a plugin says about itself: kind, name, where its code is, what it can do and what it needs."""

from __future__ import annotations

from typing import Any

import attrs

from hybridflow.core.contracts.capabilities import Capabilities, capabilities_class
from hybridflow.core.errors import PluginError
from hybridflow.core.names import did_you_mean, is_installed, is_path

API_VERSION = 1
"""Version of the plugin API: the hooks, the fields of Descriptor, and the contracts of the kinds."""

KINDS = {
    "training_backend": "trains a model: forward, backward, optimizer, shards",
    "rollout_engine": "generates sequences: token in, token out",
    "algorithm": "the dataflow of a step, its roles and its losses",
    "reward": "scores sequences: a function or a model",
    "environment": "answers the model in several turns",
    "data_source": "gives prompts, demonstrations or pairs",
    "tokenizer": "text to token ids, and back",
    "protocol": "how a worker group splits arguments and joins results",
    "transport": "moves weights from training to rollout",
    "runtime": "starts processes, places them and calls them",
    "tracker": "keeps metrics",
    "planner": "says where models go and how long a step takes",
    "command": "a subcommand of hybridflow",
}
"""The kinds of plugin, each with what it does."""

BY_PATH = frozenset({"reward", "algorithm", "data_source", "protocol", "environment", "tokenizer"})
"""The kinds for which "package.module:Object" may stand in place of a registered name."""


def _names(given: Any) -> tuple[str, ...]:
    return (given,) if isinstance(given, str) else tuple(given)


@attrs.frozen
class Descriptor:
    """One plugin. Making it imports nothing: `factory` and `config` are names, resolved when the plugin is used."""

    kind: str
    """One of KINDS."""
    name: str
    """What a configuration calls it; unique within its kind."""
    factory: str
    """"package.module:Object": the class or function that is the plugin."""
    config: str | None = None
    """"package.module:Class": its attrs config class. None: the object's `Config` when it has one. Give it when the
    factory's module is heavy or its requirements may be missing, so that `hybridflow show` works without them."""
    capabilities: Capabilities | None = None
    """What it can do, of the class of its kind (core/contracts/capabilities.py). None: what its class says when it is
    loaded."""
    default: bool = False
    """Whether a configuration that names no plugin of this kind means this one. Of each kind at most one may say so."""
    requires: tuple[str, ...] = attrs.field(default=(), converter=_names)
    """Modules that must be importable ("ray", "torch.distributed"); looked for, not imported."""
    extra: str | None = None
    """The extra of hybridflow that brings them: the remedy is then pip install 'hybridflow[EXTRA]'."""
    remedy: str = ""
    """What to do when a requirement is missing; wins over `extra`."""
    diagnosis: str | None = None
    """"package.module:function": what `hybridflow doctor` asks, () -> rows of (what, found, what to type); it may take
    seconds (kit/diagnosis.py helps)."""
    api: int = API_VERSION
    """The plugin API that it was made for."""

    def missing(self) -> list[str]:
        """The required modules that are not installed."""
        return [module for module in self.requires if not is_installed(module)]

    def how_to_install(self) -> str:
        """What brings what is missing, as a command where we know it."""
        if self.remedy:
            return self.remedy
        return (
            f"pip install 'hybridflow[{self.extra}]'"
            if self.extra
            else f"install {', '.join(self.missing())}"
        )


def check_descriptor(descriptor: Descriptor, owner: str) -> None:
    """Refuse a descriptor that cannot work. Raises PluginError with what is wrong."""
    check_kind(descriptor.kind)
    check_api(descriptor.api, owner)
    wanted = capabilities_class(descriptor.kind)
    if descriptor.capabilities is not None and not isinstance(descriptor.capabilities, wanted):
        raise PluginError(
            f"the capabilities of a {descriptor.kind} are a {wanted.__name__}, got {descriptor.capabilities!r:.80}"
        )
    if not descriptor.name or ":" in descriptor.name:
        raise PluginError(f"a name is text without a colon, got {descriptor.name!r}; rename it")
    if isinstance(descriptor.config, str) and not is_path(descriptor.config):
        raise PluginError(f"config is 'package.module:Class', got {descriptor.config!r}")
    if not is_path(descriptor.factory):
        raise PluginError(f"factory is 'package.module:Object', got {descriptor.factory!r}")


def check_kind(kind: str) -> None:
    """Raises PluginError for a kind that this hybridflow does not know."""
    if kind not in KINDS:
        raise PluginError(
            f"unknown kind {kind!r}{did_you_mean(kind, KINDS)} (kinds: {', '.join(KINDS)})"
        )


def check_api(found: Any, owner: str) -> None:
    """Raises PluginError for a plugin made for another plugin API. None, it does not say, is taken for ours."""
    if found is None or (type(found) is int and found == API_VERSION):
        return
    if type(found) is not int:
        raise PluginError(
            f"the plugin API it was made for must be an integer, got {found!r}; ours is {API_VERSION}"
        )
    what = f"a version of {owner} made for API {API_VERSION}"
    other = "a newer hybridflow" if found > API_VERSION else "an older hybridflow"
    raise PluginError(
        f"made for plugin API {found}, this hybridflow has {API_VERSION}: install {what}, or {other}"
    )
