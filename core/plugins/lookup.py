"""The plugin registry: finds plugins, lists them without importing them, loads one when asked.

    installed packages --entry points of group "hybridflow"--> load
                             |                                   |
       "kind.name" = "module:Object"                 name = "module"
                             |                                   |  import; hook hybridflow_plugins
                             v                                   v
                            add  <------- Descriptors ------- register ----> observers: notify
                             |
                             v
             _registered[kind, name]  --get-->  import of the descriptor's factory

Plugins of this repository and of other packages are found in the same way (docs/plugins.md).
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
from hybridflow.core.plugins.discovery import FoundPlugin, entry_points
from hybridflow.core.processes.page import doing

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
    """One of KINDS, or "module" for a plugin module that failed before it listed its plugins."""
    name: str
    package: str
    """Name of the distribution that brings the plugin."""
    version: str
    capabilities: Capabilities | None
    """The capabilities in the descriptor; None where it has none."""
    state: str
    """"ready", "missing: MODULES" or "failed: REASON"."""
    remedy: str
    """How to make it ready; empty when it is."""

    @property
    def owner(self) -> str:
        """The package and its version."""
        return f"{self.package} {self.version}".strip()


@attrs.frozen
class _Registered:
    """A descriptor and the package that brought it."""

    descriptor: Descriptor
    package: str
    version: str

    @property
    def owner(self) -> str:
        return f"{self.package} {self.version}".strip()


class Registry:
    """All plugins by (kind, name).

    A broken plugin is listed with the reason, and the others work.
    """

    def __init__(self) -> None:
        # More than one holder of a (kind, name): none of them can be used.
        self._registered: dict[tuple[str, str], list[_Registered]] = {}
        # Plugins that could not be registered, and errors of imports of registered ones.
        self._failed: list[Entry] = []
        self._broken: dict[tuple[str, str], str] = {}

        self._loaded = False
        self._hooks = pluggy.PluginManager(hookspecs.PROJECT)
        self._hooks.add_hookspecs(hookspecs)

    # --- registration ---

    def load(self) -> Registry:
        """Read the entry points of every installed package, once.

        Nothing is raised; plugins that fail are among `entries`.
        """
        if not self._loaded:
            self._loaded = True
            for point in entry_points():
                if not isinstance(point, FoundPlugin):
                    package, version, error = point
                    self._fail("module", "entry_points.txt", package, version, error)
                    continue

                try:
                    self._load_entry_point(point)
                except Exception as error:
                    # "kind.name" = "module:Object" is one plugin, any other form a module.
                    kind, _, name = point.name.partition(".")
                    where = (kind, name) if name and ":" in point.value else ("module", point.name)
                    self._fail(*where, point.package, point.version, error)
        return self

    def add(self, descriptor: Descriptor, owner: str = "this process", version: str = "") -> None:
        """Register one plugin.

        The same descriptor of the same owner may be added again. A second owner of a name raises
        nothing here: `get` refuses the name, and `entries` lists it as failed, for both owners.

        Raises PluginError for an unknown kind, another plugin API or a malformed factory.
        """
        check_descriptor(descriptor, owner)

        # A second owner of the name is kept beside the first, so that messages can name both.
        holders = self._registered.setdefault((descriptor.kind, descriptor.name), [])
        holder = _Registered(descriptor, owner, version)
        if holder not in holders:
            holders.append(holder)

    def register(self, plugin: Any, owner: str = "this process", version: str = "") -> None:
        """Register a module, or any object, with hooks: its descriptors and its observers.

        A descriptor that is refused is listed as failed, and the others work. Raises PluginError
        for another plugin API, for a hook that does not exist or takes other arguments, and when
        `hybridflow_plugins` raises.
        """
        check_api(getattr(plugin, "HYBRIDFLOW_API", None), owner)
        label = getattr(plugin, "__name__", None) or repr(plugin)

        # All hooks of a plugin count, or none of them.
        descriptors: list[Descriptor] = []
        try:
            self._hooks.register(plugin, name=f"{owner}:{label}")
            self._refuse_unknown_hooks(plugin)
            for answer in self._call(plugin, "hybridflow_plugins"):
                descriptors += _descriptors(answer)
        except Exception as error:
            if self._hooks.is_registered(plugin):
                self._hooks.unregister(plugin)
            raise error if isinstance(error, PluginError) else PluginError(reason(error)) from error

        # One bad descriptor affects only its own plugin.
        for descriptor in descriptors:
            try:
                self.add(descriptor, owner, version)
            except PluginError as error:
                self._fail(descriptor.kind, descriptor.name, owner, version, error)

    def _load_entry_point(self, found: FoundPlugin) -> None:
        """Register an entry point: "kind.name" = "module:Object", or name = "module".

        Raises PluginError for a mixture of the two forms.
        """
        kind, dot, name = found.name.partition(".")
        line = f'"{found.name}" = "{found.value}"'
        if ":" in found.value:
            if not dot:
                raise PluginError(
                    f'{line} names an object without its kind: write "KIND.{found.name}"'
                )
            # Such a plugin describes itself by its class, which is not imported yet.
            self.add(Descriptor(kind, name, found.value), found.package, found.version)
        elif kind in KINDS and dot:
            raise PluginError(
                f'{line} names a module: write "{found.value}:Object", or a name without a kind'
            )
        else:
            self.register(import_named(found.value), found.package, found.version)

    def _refuse_unknown_hooks(self, plugin: Any) -> None:
        """Raise PluginError for a function that implements no hook, unless it is optional."""
        known = [name for name in vars(hookspecs) if name.startswith("hybridflow_")]
        for caller in self._hooks.get_hookcallers(plugin) or []:
            # Only the marks of this plugin count: others may implement a hook of the same name.
            optional = all(
                impl.optionalhook for impl in caller.get_hookimpls() if impl.plugin is plugin
            )
            if not caller.has_spec() and not optional:
                meant = did_you_mean(caller.name, known)
                raise PluginError(
                    f"there is no hook {caller.name!r}{meant} (hooks: {', '.join(known)})"
                )

    def _fail(self, kind: str, name: str, package: str, version: str, error: BaseException) -> None:
        """Add a plugin that failed to the entries."""
        remedy = _remedy(package, version)
        self._failed.append(
            Entry(kind, name, package, version, None, f"failed: {_one_line(error)}", remedy)
        )

    # --- use ---

    def get(self, kind: str, name: str) -> Any:
        """Import a plugin, and return its object.

        For the kinds in BY_PATH `name` may be "package.module:Object". It is imported from
        sys.path, to which the configuration's folder is added, and the current one by the command
        line.

        Raises PluginError when the name is unknown, claimed twice, lacks a requirement, or when
        its import fails.
        """
        if ":" in name:
            return self._get_by_path(kind, name)

        # Requirements first: the message then says what to install, not which import failed.
        descriptor = self.descriptor(kind, name)
        missing = descriptor.missing()
        if missing:
            need = f"{kind} {name!r} needs {', '.join(missing)}, not installed here"
            raise PluginError(f"{need}: {descriptor.how_to_install()}")

        # A failure is remembered, for `entries`, until an import succeeds.
        owner = self._registered[kind, name][0].owner
        try:
            plugin = _import_object(descriptor.factory, owner)
            _check_contract(kind, plugin)
        except Exception as error:
            text = self._broken[kind, name] = _one_line(error)
            raise PluginError(
                f"{kind} {name!r} of {owner} does not load ({descriptor.factory}): {text}"
            ) from error
        self._broken.pop((kind, name), None)
        return plugin

    def _get_by_path(self, kind: str, path: str) -> Any:
        """Import the object at "package.module:Object" as a plugin. Raises PluginError."""
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
            return _import_object(path, path)
        except Exception as error:
            hint = ""
            if isinstance(error, ModuleNotFoundError):
                hint = (
                    " (modules are looked for where sys.path says, then beside the configuration, "
                    "then, by the `hybridflow` command, in the current folder)"
                )
            raise PluginError(f"{kind} {path!r} does not load: {_one_line(error)}{hint}") from error

    def descriptor(self, kind: str, name: str) -> Descriptor:
        """Look up the descriptor that is registered under a name; nothing is imported.

        Raises PluginError when the name is unknown or claimed twice.
        """
        check_kind(kind)
        holders = self._registered.get((kind, name), [])
        if len(holders) == 1:
            return holders[0].descriptor
        if holders:
            raise PluginError(
                f"{kind} {name!r} is {_claims(holders)}: uninstall one of them, "
                "or rename its plugin"
            )
        raise PluginError(self._unknown(kind, name))

    def owner(self, kind: str, name: str) -> tuple[str, str]:
        """Return the (package, version) that registered a plugin.

        Code of this process has ("this process", "").
        """
        self.descriptor(kind, name)
        holder = self._registered[kind, name][0]
        return holder.package, holder.version

    def config_class(self, kind: str, name: str) -> type | None:
        """Import a plugin's attrs config class.

        It is the descriptor's `config`, which needs none of the plugin's requirements, else the
        object's `Config`. None: the plugin has no settings. Raises PluginError as `get` does.
        """
        # Code that is named by its path has no descriptor.
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
        """Return a plugin's capabilities: those of its descriptor, else those of its class.

        The class is imported for that. Where a requirement is missing, the kind's defaults are
        returned instead. Raises PluginError as `get` does.
        """
        # The descriptor's own need no import, and so no GPU library.
        descriptor = self.descriptor(kind, name)
        if descriptor.capabilities is not None:
            return descriptor.capabilities

        # Kinds without capabilities need no import to say so.
        wanted = capabilities_class(kind)
        if wanted is NoCapabilities or descriptor.missing():
            return wanted()
        return self.get(kind, name).capabilities

    def training_capabilities(self, name: str) -> TrainingCapabilities:
        """Return `capabilities` of a training backend, as their own type."""
        return cast(TrainingCapabilities, self.capabilities("training_backend", name))

    def engine_capabilities(self, name: str) -> EngineCapabilities:
        """Return `capabilities` of a rollout engine, as their own type."""
        return cast(EngineCapabilities, self.capabilities("rollout_engine", name))

    def runtime_capabilities(self, name: str) -> RuntimeCapabilities:
        """Return `capabilities` of a runtime, as their own type."""
        return cast(RuntimeCapabilities, self.capabilities("runtime", name))

    def default(self, kind: str, device: str | None = None) -> str:
        """Return the plugin of a kind that is used where a configuration names none.

        device: the type of the devices that it is for; an installed plugin may be the default of
        one. Raises PluginError where no plugin, or more than one, says that it is the default.
        """
        check_kind(kind)
        names = self.names(kind)
        own = [self.descriptor(kind, name) for name in names]
        if device is not None:
            those = [descriptor for descriptor in own if device in descriptor.default_on]
            for descriptor in sorted(those, key=lambda one: one.default_on[device]):
                if not descriptor.missing():
                    return descriptor.name

        # On other devices a configuration without a name means the same plugin on every machine.
        defaults = [descriptor.name for descriptor in own if descriptor.default]
        if len(defaults) == 1:
            return defaults[0]

        what = "no plugin says that it is"
        if defaults:
            what = f"{' and '.join(defaults)} both say that they are"
        raise PluginError(
            f"{what} the default {kind}; name one (there is: {', '.join(names) or 'none'})"
        )

    def names(self, kind: str) -> list[str]:
        """List the names of a kind that are registered once, sorted.

        Some of them may lack a requirement. Raises PluginError for an unknown kind.
        """
        check_kind(kind)
        return sorted(
            name
            for (own_kind, name), holders in self._registered.items()
            if own_kind == kind and len(holders) == 1
        )

    def entries(self) -> list[Entry]:
        """List every plugin, ready or not, sorted by kind (in the order of KINDS) and name.

        None of them is imported.
        """
        entries = []
        for holders in self._registered.values():
            entries += [self._entry(holder, holders) for holder in holders]
        entries += self._failed

        # Sorts are stable, so the kind counts most. Failed modules are of no kind, and come last.
        order = {kind: position for position, kind in enumerate(KINDS)}
        entries.sort(key=lambda entry: (entry.name, entry.package))
        return sorted(entries, key=lambda entry: order.get(entry.kind, len(order)))

    def diagnoses(self) -> list[tuple[str, str, str]]:
        """List (kind, name, "module:function") of the plugins with a diagnosis, sorted."""
        rows = []
        for (kind, name), holders in self._registered.items():
            # A name that is claimed twice is diagnosed twice.
            diagnoses = [holder.descriptor.diagnosis for holder in holders]
            rows += [(kind, name, str(diagnosis)) for diagnosis in diagnoses if diagnosis]
        return sorted(rows)

    def notify(self, hook: str, **arguments: Any) -> list[Any]:
        """Call an observer hook of every plugin; return their answers.

        One that raises is logged with the plugin's name, and the run goes on.
        """
        answers: list[Any] = []
        for impl in getattr(self._hooks.hook, hook).get_hookimpls():
            try:
                with doing(f"{hook} of plugin {impl.plugin_name}"):
                    answers += self._call(impl.plugin, hook, **arguments)
            except Exception:
                log.warning(
                    "%s of plugin %s raised; the run goes on", hook, impl.plugin_name, exc_info=True
                )
        return answers

    # --- details ---

    def _call(self, plugin: Any, hook: str, **arguments: Any) -> Any:
        """Call the hook of one plugin only, so that an error in it does not stop the others."""
        others = [other for other in self._hooks.get_plugins() if other is not plugin]
        return self._hooks.subset_hook_caller(hook, others)(**arguments)

    def _entry(self, holder: _Registered, holders: list[_Registered]) -> Entry:
        """Describe a holder among all `holders` of the same (kind, name)."""
        plugin = holder.descriptor
        missing = plugin.missing()
        broken = self._broken.get((plugin.kind, plugin.name))

        # The first obstacle is shown: a second owner, then missing requirements, then an error.
        state = "ready"
        remedy = ""
        if len(holders) > 1:
            state = f"failed: {_claims(holders)}"
            remedy = "uninstall one of them, or rename its plugin"
        elif missing:
            state = f"missing: {', '.join(missing)}"
            remedy = plugin.how_to_install()
        elif broken is not None:
            state = f"failed: {broken}"
            remedy = _remedy(holder.package, holder.version)

        return Entry(
            plugin.kind,
            plugin.name,
            holder.package,
            holder.version,
            plugin.capabilities,
            state,
            remedy,
        )

    def _unknown(self, kind: str, name: str) -> str:
        """Return the sentence that a kind has no such plugin.

        It lists the kind's plugins, a similar name, and plugins that failed to load and may be it.
        """
        # A module that failed to load may have had the plugin, of any kind.
        entries = [entry for entry in self.entries() if entry.kind in (kind, "module")]
        usable = []
        failed = []
        for entry in entries:
            if entry.state.startswith("failed"):
                failed.append(f"{entry.name} of {entry.owner} ({entry.state[8:]})")
            elif entry.state == "ready":
                usable.append(entry.name)
            else:
                usable.append(f"{entry.name} ({entry.state})")

        meant = did_you_mean(name, [entry.name for entry in entries if entry.kind == kind])
        text = f"unknown {kind} {name!r}{meant or '.'} There is: {', '.join(usable) or 'none'}"
        return text + (f"; failed to load: {', '.join(failed)}" if failed else "")


def _import_object(path: str, owner: str) -> Any:
    """Import an object. Raises PluginError where it was made for another plugin API."""
    plugin = import_named(path)
    check_api(getattr(plugin, "hybridflow_api", None), owner)
    return plugin


def _one_line(error: BaseException) -> str:
    """Return an exception in a line; for a HybridFlowError without its type."""
    return str(error) if isinstance(error, PluginError) else reason(error)


def _claims(holders: list[_Registered]) -> str:
    """Return in words which packages claim one (kind, name), for a message."""
    return f"claimed by {' and by '.join(holder.owner for holder in holders)}"


def _remedy(package: str, version: str) -> str:
    """Return the remedy for a plugin that fails.

    Code of this process, which has no version, is the user's own.
    """
    return f"upgrade {package}, or uninstall it" if version else "fix it"


def _descriptors(found: Any) -> list[Descriptor]:
    """Check the answer of a `hybridflow_plugins` hook.

    Raises PluginError unless it is a list of descriptors.
    """
    is_list = isinstance(found, list | tuple)
    if not is_list or not all(isinstance(item, Descriptor) for item in found):
        raise PluginError(
            f"hybridflow_plugins must return a list of Descriptor, got {found!r:.200}"
        )
    return list(found)


@functools.cache
def registry() -> Registry:
    """Return the registry of this process, loaded on the first call."""
    return Registry().load()


def _check_contract(kind: str, found: Any) -> None:
    """Check that a plugin's class implements the contract of its kind.

    Raises TypeError for anything but a class of the kind's contract, for one that lacks a method,
    and for capabilities of another kind.
    """
    # The other kinds may be functions or objects, or are checked where their objects are made.
    if kind not in CONTRACTS:
        return

    contract = import_named(f"hybridflow.core.contracts.{CONTRACTS[kind]}")
    derived = isinstance(found, type) and issubclass(found, contract)
    if not derived:
        raise TypeError(f"{found!r} is no class derived from {contract.__name__}")
    if lacking := sorted(found.__abstractmethods__):
        raise TypeError(f"{found.__name__} lacks {', '.join(lacking)} of {contract.__name__}")

    # A job reads capabilities from the class, before there is an object.
    wanted = capabilities_class(kind)
    if wanted is not NoCapabilities and not isinstance(found.capabilities, wanted):
        raise TypeError(
            f"{found.__name__}.capabilities is {found.capabilities!r}; give {wanted.__name__}(...)"
        )
