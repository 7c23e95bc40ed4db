"""The plugin registry: finds plugins by entry points, lists them without importing them, loads one when asked.

Our own plugins and a stranger's come in by the same door, the entry-point group `hybridflow` (docs/plugins.md).
"""

from __future__ import annotations

import functools
import logging
from typing import Any, cast

import attrs
import pluggy

from hybridflow.core.contracts.capabilities import (
    Capabilities,
    EngineCapabilities,
    NoCapabilities,
    RuntimeCapabilities,
    TrainingCapabilities,
    capabilities_class,
)
from hybridflow.core.errors import PluginError
from hybridflow.core.names import did_you_mean, import_named, is_path, reason
from hybridflow.core.plugins import hookspecs
from hybridflow.core.plugins.descriptor import (
    BY_PATH,
    KINDS,
    Descriptor,
    check_api,
    check_descriptor,
    check_kind,
)
from hybridflow.core.plugins.discovery import Found, entry_points

log = logging.getLogger(__name__)

CONTRACTS = {
    "training_backend": "training:TrainingBackend",
    "rollout_engine": "rollout:RolloutEngine",
    "runtime": "runtime:Runtime",
    "transport": "transport:Transport",
    "tracker": "tracker:Tracker",
    "tokenizer": "tokenizer:Tokenizers",
    "planner": "planner:Planner",
    "command": "command:Command",
}
"""Kind -> the class in core.contracts that its plugins are derived from."""


@attrs.frozen
class Entry:
    """One line of `hybridflow plugins`."""

    kind: str
    """One of KINDS; "module" for a plugin module that failed before it could say what it has."""
    name: str
    package: str
    version: str
    capabilities: Capabilities | None
    state: str
    """"ready", "missing: MODULES" or "failed: REASON"."""
    remedy: str
    """What to do about it; empty when ready."""

    @property
    def owner(self) -> str:
        return f"{self.package} {self.version}".strip()


@attrs.frozen
class _Registered:
    """A descriptor and the package that it came from."""

    descriptor: Descriptor
    package: str
    version: str

    @property
    def owner(self) -> str:
        return f"{self.package} {self.version}".strip()


class Registry:
    """All plugins by (kind, name). One that is broken is listed with its reason and hurts nobody else."""

    def __init__(self) -> None:
        self._registered: dict[tuple[str, str], list[_Registered]] = {}
        self._failed: list[Entry] = []
        self._broken: dict[tuple[str, str], str] = {}
        self._loaded = False
        self._hooks = pluggy.PluginManager(hookspecs.PROJECT)
        self._hooks.add_hookspecs(hookspecs)

    # --- registration ---

    def load(self) -> Registry:
        """Read the entry points of every installed package, once. Raises nothing: see `entries`."""
        if not self._loaded:
            self._loaded = True
            for found in entry_points():
                if not isinstance(found, Found):
                    package, version, error = found
                    self._fail("module", "entry_points.txt", package, version, error)
                    continue
                try:
                    self._load_entry_point(found)
                except Exception as error:
                    kind, _, name = (
                        found.name.partition(".") if ":" in found.value else ("", "", "")
                    )
                    where = (kind, name) if name else ("module", found.name)
                    self._fail(*where, found.package, found.version, error)
        return self

    def add(self, descriptor: Descriptor, owner: str = "this process", version: str = "") -> None:
        """Register one plugin. Raises PluginError for an unknown kind, another plugin API or a malformed factory.

        The same descriptor of the same owner again changes nothing; a second owner of the name is not an error here:
        the name is then refused by `get` and listed as failed, for both.
        """
        check_descriptor(descriptor, owner)
        holders = self._registered.setdefault((descriptor.kind, descriptor.name), [])
        new = _Registered(descriptor, owner, version)
        if new not in holders:
            holders.append(new)

    def register(self, plugin: Any, owner: str = "this process", version: str = "") -> None:
        """Register a module, or any object, with hooks: its descriptors and its observers.

        Raises PluginError when it was made for another plugin API, when a hook has arguments that we do not give or is
        none of ours, and when `hybridflow_plugins` raises. A descriptor that is refused is listed; the others work.
        """
        check_api(getattr(plugin, "HYBRIDFLOW_API", None), owner)
        label = getattr(plugin, "__name__", None) or repr(plugin)
        try:
            self._hooks.register(plugin, name=f"{owner}:{label}")
            self._refuse_unknown_hooks(plugin)
            descriptors = [
                d for found in self._call(plugin, "hybridflow_plugins") for d in _checked(found)
            ]
        except Exception as error:
            if self._hooks.is_registered(plugin):
                self._hooks.unregister(plugin)
            raise error if isinstance(error, PluginError) else PluginError(reason(error)) from error
        for descriptor in descriptors:
            try:
                self.add(descriptor, owner, version)
            except PluginError as error:
                self._fail(descriptor.kind, descriptor.name, owner, version, error)

    def _load_entry_point(self, found: Found) -> None:
        """One of the two forms: "kind.name" = "module:Object", or name = "module"."""
        kind, dot, name = found.name.partition(".")
        line = f'"{found.name}" = "{found.value}"'
        if ":" in found.value:
            if not dot:
                raise PluginError(
                    f'{line} names an object without its kind: write "KIND.{found.name}"'
                )
            self.add(Descriptor(kind, name, found.value), found.package, found.version)
        elif kind in KINDS and dot:
            raise PluginError(
                f'{line} names a module: write "{found.value}:Object", or a name without a kind'
            )
        else:
            self.register(import_named(found.value), found.package, found.version)

    def _refuse_unknown_hooks(self, plugin: Any) -> None:
        known = [name for name in vars(hookspecs) if name.startswith("hybridflow_")]
        for caller in self._hooks.get_hookcallers(plugin) or []:
            optional = all(
                impl.optionalhook for impl in caller.get_hookimpls() if impl.plugin is plugin
            )
            if not caller.has_spec() and not optional:
                meant = did_you_mean(caller.name, known)
                raise PluginError(
                    f"there is no hook {caller.name!r}{meant} (hooks: {', '.join(known)})"
                )

    def _fail(self, kind: str, name: str, package: str, version: str, error: BaseException) -> None:
        """List a plugin as failed."""
        remedy = _repair(package, version)
        self._failed.append(
            Entry(kind, name, package, version, None, f"failed: {_said(error)}", remedy)
        )

    # --- use ---

    def get(self, kind: str, name: str) -> Any:
        """The plugin's object, imported now. For the kinds in BY_PATH `name` may be "package.module:Object".

        Such a path is imported from sys.path; the command line puts the current folder on it. Raises PluginError when
        the name is unknown, claimed twice, lacks a requirement, or when its import fails.
        """
        if ":" in name:
            return self._get_by_path(kind, name)
        descriptor = self.descriptor(kind, name)
        missing = descriptor.missing()
        if missing:
            need = f"{kind} {name!r} needs {', '.join(missing)}, not installed here"
            raise PluginError(f"{need}: {descriptor.how_to_install()}")
        owner = self._registered[kind, name][0].owner
        try:
            found = _imported(descriptor.factory, owner)
            _check_contract(kind, found)
        except Exception as error:
            text = self._broken[kind, name] = _said(error)
            raise PluginError(
                f"{kind} {name!r} of {owner} does not load ({descriptor.factory}): {text}"
            ) from error
        self._broken.pop((kind, name), None)
        return found

    def _get_by_path(self, kind: str, path: str) -> Any:
        check_kind(kind)
        if kind not in BY_PATH:
            allowed = ", ".join(sorted(BY_PATH))
            raise PluginError(
                f"{kind} {path!r}: give a registered name; paths to code are for {allowed}"
            )
        if not is_path(path):
            raise PluginError(
                f"{kind} {path!r} is neither a name nor of the form 'package.module:Object'"
            )
        try:
            return _imported(path, path)
        except Exception as error:
            hint = " (the `hybridflow` command looks in the current folder, Python code where sys.path says)"
            hint = hint if isinstance(error, ModuleNotFoundError) else ""
            raise PluginError(f"{kind} {path!r} does not load: {_said(error)}{hint}") from error

    def descriptor(self, kind: str, name: str) -> Descriptor:
        """What is registered under the name; imports nothing. Raises PluginError when unknown or claimed twice."""
        check_kind(kind)
        holders = self._registered.get((kind, name), [])
        if len(holders) == 1:
            return holders[0].descriptor
        if holders:
            raise PluginError(
                f"{kind} {name!r} is {_claimed(holders)}: uninstall one of them, or rename its plugin"
            )
        raise PluginError(self._unknown(kind, name))

    def owner(self, kind: str, name: str) -> tuple[str, str]:
        """(package, version) that registered a plugin; the version is "" for code of this process."""
        self.descriptor(kind, name)
        holder = self._registered[kind, name][0]
        return holder.package, holder.version

    def config_class(self, kind: str, name: str) -> type | None:
        """The attrs config class: the descriptor's `config`, else the `Config` of the object, else None.

        A `config` that is given is imported without the plugin's requirements. Raises PluginError as `get` does.
        """
        config = None if ":" in name else self.descriptor(kind, name).config
        if config is None:
            return getattr(self.get(kind, name), "Config", None)
        try:
            return import_named(config)
        except Exception as error:
            raise PluginError(
                f"the config of {kind} {name!r} does not load ({config}): {reason(error)}"
            ) from error

    def capabilities(self, kind: str, name: str) -> Capabilities:
        """What the descriptor says it can do, else what its class says, which is imported for that.

        Raises PluginError as `get` does; where a requirement lacks, what the kind can do at least.
        """
        descriptor = self.descriptor(kind, name)
        if descriptor.capabilities is not None:
            return descriptor.capabilities
        wanted = capabilities_class(kind)
        if wanted is NoCapabilities or descriptor.missing():
            return wanted()
        return self.get(kind, name).capabilities

    def training_capabilities(self, name: str) -> TrainingCapabilities:
        return cast(TrainingCapabilities, self.capabilities("training_backend", name))

    def engine_capabilities(self, name: str) -> EngineCapabilities:
        return cast(EngineCapabilities, self.capabilities("rollout_engine", name))

    def runtime_capabilities(self, name: str) -> RuntimeCapabilities:
        return cast(RuntimeCapabilities, self.capabilities("runtime", name))

    def default(self, kind: str) -> str:
        """The name of the plugin that a configuration means which names none.

        Raises PluginError where there is none, or more than one.
        """
        check_kind(kind)
        every = [
            holders[0].descriptor for holders in self._registered.values() if len(holders) == 1
        ]
        found = sorted(d.name for d in every if d.kind == kind and d.default)
        if len(found) == 1:
            return found[0]
        there = ", ".join(self.names(kind)) or "none"
        what = (
            f"{' and '.join(found)} both say that they are"
            if found
            else "no plugin says that it is"
        )
        raise PluginError(f"{what} the default {kind}; name one (there is: {there})")

    def names(self, kind: str) -> list[str]:
        """The names of a kind that are registered once, sorted; some may lack a requirement."""
        check_kind(kind)
        return sorted(
            name
            for (of, name), holders in self._registered.items()
            if of == kind and len(holders) == 1
        )

    def entries(self) -> list[Entry]:
        """Every plugin that was found, ready or not, sorted by kind and name. Imports none of them."""
        found = [
            self._entry(holder, holders)
            for holders in self._registered.values()
            for holder in holders
        ]
        order = {kind: position for position, kind in enumerate(KINDS)}
        return sorted(
            found + self._failed, key=lambda e: (order.get(e.kind, len(order)), e.name, e.package)
        )

    def diagnoses(self) -> list[tuple[str, str, str]]:
        """(kind, name, "module:function") of the plugins that can say more of the packages that they need."""
        found = [
            d
            for holders in self._registered.values()
            for d in (h.descriptor for h in holders)
            if d.diagnosis
        ]
        return sorted((d.kind, d.name, str(d.diagnosis)) for d in found)

    def notify(self, hook: str, **arguments: Any) -> None:
        """Call an observation hook of every plugin. One that raises is logged with its name; the run goes on."""
        for impl in getattr(self._hooks.hook, hook).get_hookimpls():
            try:
                self._call(impl.plugin, hook, **arguments)
            except Exception:
                log.warning(
                    "%s of plugin %s raised; the run goes on", hook, impl.plugin_name, exc_info=True
                )

    # --- details ---

    def _call(self, plugin: Any, hook: str, **arguments: Any) -> Any:
        """Call the hook of one plugin only, so that one which raises does not stop the others."""
        others = [other for other in self._hooks.get_plugins() if other is not plugin]
        return self._hooks.subset_hook_caller(hook, others)(**arguments)

    def _entry(self, holder: _Registered, holders: list[_Registered]) -> Entry:
        d = holder.descriptor
        state, remedy, missing = "ready", "", d.missing()
        if len(holders) > 1:
            state, remedy = (
                f"failed: {_claimed(holders)}",
                "uninstall one of them, or rename its plugin",
            )
        elif missing:
            state, remedy = f"missing: {', '.join(missing)}", d.how_to_install()
        elif (d.kind, d.name) in self._broken:
            state, remedy = (
                f"failed: {self._broken[d.kind, d.name]}",
                _repair(holder.package, holder.version),
            )
        return Entry(d.kind, d.name, holder.package, holder.version, d.capabilities, state, remedy)

    def _unknown(self, kind: str, name: str) -> str:
        """What there is of the kind, what is near, and what failed to load and might have been it."""
        entries = [entry for entry in self.entries() if entry.kind in (kind, "module")]
        fine = [
            e.name if e.state == "ready" else f"{e.name} ({e.state})"
            for e in entries
            if e.state[:6] != "failed"
        ]
        failed = [
            f"{e.name} of {e.owner} ({e.state[8:]})" for e in entries if e.state[:6] == "failed"
        ]
        meant = did_you_mean(name, [entry.name for entry in entries if entry.kind == kind])
        text = f"unknown {kind} {name!r}{meant or '.'} There is: {', '.join(fine) or 'none'}"
        return text + (f"; failed to load: {', '.join(failed)}" if failed else "")


def _imported(path: str, owner: str) -> Any:
    """An object that was made for this plugin API."""
    found = import_named(path)
    check_api(getattr(found, "hybridflow_api", None), owner)
    return found


def _said(error: BaseException) -> str:
    return str(error) if isinstance(error, PluginError) else reason(error)


def _claimed(holders: list[_Registered]) -> str:
    return f"claimed by {' and by '.join(holder.owner for holder in holders)}"


def _repair(package: str, version: str) -> str:
    """What a user can do about a plugin that fails; code of this process, which has no version, is the user's own."""
    return f"upgrade {package}, or uninstall it" if version else "fix it"


def _checked(found: Any) -> list[Descriptor]:
    """What a `hybridflow_plugins` hook returned. Raises PluginError unless it is a list of descriptors."""
    if not isinstance(found, list | tuple) or not all(isinstance(d, Descriptor) for d in found):
        raise PluginError(
            f"hybridflow_plugins must return a list of Descriptor, got {found!r:.200}"
        )
    return list(found)


@functools.cache
def registry() -> Registry:
    """The registry of this process, loaded on the first call."""
    return Registry().load()


def _check_contract(kind: str, found: Any) -> None:
    """Raises TypeError for what is no class of the kind's contract, lacks a method, or has capabilities of another kind."""
    if kind not in CONTRACTS:
        return
    contract = import_named(f"hybridflow.core.contracts.{CONTRACTS[kind]}")
    derived = isinstance(found, type) and issubclass(found, contract)
    if not derived:
        raise TypeError(f"{found!r} is no class derived from {contract.__name__}")
    if lacking := sorted(found.__abstractmethods__):
        raise TypeError(f"{found.__name__} lacks {', '.join(lacking)} of {contract.__name__}")
    wanted = capabilities_class(kind)
    if wanted is not NoCapabilities and not isinstance(found.capabilities, wanted):
        raise TypeError(
            f"{found.__name__}.capabilities is {found.capabilities!r}; give {wanted.__name__}(...)"
        )
