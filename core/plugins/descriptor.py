"""Descriptors of plugins: kind, name, code path, capabilities and requirements."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from hybridflow.core.contracts.capabilities import Capabilities, capabilities_class
from hybridflow.core.errors import PluginError
from hybridflow.core.names import did_you_mean, is_installed, is_path

API_VERSION = 1
"""Version of the plugin API: the hooks, the fields of Descriptor, the contracts of the kinds."""

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
"""The kinds of plugin, each with a description of its plugins."""

BY_PATH = frozenset({"reward", "algorithm", "data_source", "protocol", "environment", "tokenizer"})
"""The kinds for which "package.module:Object" may be given instead of a registered name."""


def _names(value: Any) -> tuple[str, ...]:
    """Return one name, or several, as a tuple."""
    return (value,) if isinstance(value, str) else tuple(value)


@attrs.frozen
class Descriptor:
    """Describes one plugin without importing it.

    `factory` and `config` are names, which are resolved when the plugin is used.
    """

    kind: str
    """One of KINDS."""
    name: str
    """The name of the plugin in a configuration; unique within its kind."""
    factory: str
    """"package.module:Object": the class or function that is the plugin."""
    config: str | None = None
    """"package.module:Class": the attrs class of its settings. None: the object's `Config` where it
    has one. Give it when the factory's module is slow to import or its requirements may be missing,
    so that `hybridflow show` works without them."""
    capabilities: Capabilities | None = None
    """Its capabilities, an instance of its kind's class in core/contracts/capabilities.py. None:
    those of its class, once it is loaded."""
    default: bool = False
    """Whether it is used where a configuration names no plugin of this kind. At most one plugin of
    a kind may be the default."""
    default_on: Mapping[str, int] = attrs.field(factory=dict)
    """Device types ("cuda") on which it is the default if it is installed: type -> its priority
    among such plugins, the lowest first."""
    requires: tuple[str, ...] = attrs.field(default=(), converter=_names)
    """Modules that must be importable ("ray", "torch.distributed"). They are looked for, but not
    imported."""
    extra: str | None = None
    """The extra of hybridflow that brings these modules; the remedy is then
    pip install 'hybridflow[EXTRA]'."""
    remedy: str = ""
    """What to do when a requirement is missing; it replaces the remedy of `extra`."""
    diagnosis: str | None = None
    """"package.module:function" that `hybridflow doctor` calls: () -> rows of (what, found, what to
    type). It may take seconds (kit/diagnosis.py helps)."""
    api: int = API_VERSION
    """Version of the plugin API for which it was made."""

    def missing(self) -> list[str]:
        """List the required modules that are not installed."""
        return [module for module in self.requires if not is_installed(module)]

    def how_to_install(self) -> str:
        """Return how to install the missing modules: a command, where one is known."""
        # The plugin's own remedy comes first, then its extra.
        if self.remedy:
            return self.remedy
        if self.extra:
            return f"pip install 'hybridflow[{self.extra}]'"
        return f"install {', '.join(self.missing())}"


def check_descriptor(descriptor: Descriptor, owner: str) -> None:
    """Raise PluginError for a descriptor that cannot work."""
    check_kind(descriptor.kind)
    check_api(descriptor.api, owner)

    # Checks of a job read the fields of the kind's own class.
    wanted = capabilities_class(descriptor.kind)
    if descriptor.capabilities is not None and not isinstance(descriptor.capabilities, wanted):
        raise PluginError(
            f"the capabilities of a {descriptor.kind} are a {wanted.__name__}, "
            f"got {descriptor.capabilities!r:.80}"
        )

    # A colon marks a path to code.
    if not descriptor.name or ":" in descriptor.name:
        raise PluginError(f"a name is text without a colon, got {descriptor.name!r}; rename it")

    # Paths are checked by their form alone: importing them is for later.
    if isinstance(descriptor.config, str) and not is_path(descriptor.config):
        raise PluginError(f"config is 'package.module:Class', got {descriptor.config!r}")
    if not is_path(descriptor.factory):
        raise PluginError(f"factory is 'package.module:Object', got {descriptor.factory!r}")


def check_kind(kind: str) -> None:
    """Raise PluginError for a kind that this version of hybridflow does not know."""
    if kind not in KINDS:
        raise PluginError(
            f"unknown kind {kind!r}{did_you_mean(kind, KINDS)} (kinds: {', '.join(KINDS)})"
        )


def check_api(found: Any, owner: str) -> None:
    """Raise PluginError for a plugin that was made for another plugin API.

    `found` is the version that the plugin states; None means that it states none, and is accepted.
    """
    if found is None or (type(found) is int and found == API_VERSION):
        return
    if type(found) is not int:
        raise PluginError(
            "the plugin API it was made for must be an integer, "
            f"got {found!r}; ours is {API_VERSION}"
        )

    # The user may replace the plugin or hybridflow.
    what = f"a version of {owner} made for API {API_VERSION}"
    other = "a newer hybridflow" if found > API_VERSION else "an older hybridflow"
    raise PluginError(
        f"made for plugin API {found}, this hybridflow has {API_VERSION}: "
        f"install {what}, or {other}"
    )
