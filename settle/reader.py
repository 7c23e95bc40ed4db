"""Reads one run stage's tables section by section.

Problems are collected rather than raised, so that a user sees all of them at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any, TypeVar

import attrs
import torch

from hybridflow.core.contracts.algorithm import Algorithm
from hybridflow.core.contracts.runtime import ResourcePool
from hybridflow.core.errors import ConfigError, HybridFlowError, PluginError
from hybridflow.core.job.sections import RoleSection, RunSection
from hybridflow.core.names import did_you_mean
from hybridflow.core.plugins import registry
from hybridflow.settle.config.load import merge
from hybridflow.settle.config.structure import Problem, structure
from hybridflow.settle.schema import SECTIONS, USUAL_ROLES

T = TypeVar("T")


@attrs.frozen
class Choice:
    """A plugin that a table names, imported, with its settings."""

    name: str
    """The plugin's name, or its path to code."""
    found: Any
    """The plugin's class or function. None: its requirements are not installed, and the run is
    meant for another machine."""
    config: Any
    """An instance of the plugin's config class. None: it has no settings."""
    good: bool = True
    """Whether its settings are valid; otherwise `config` has defaults for those with problems."""


MOST_DEVICES = 65_536
"""The most devices of a pool: more than any cluster has, and quickly laid out."""
DEFAULT_POOLS = {"main": [1]}
"""[pools] where the configuration has no pool for models."""


class Reader:
    """The tables of one run stage, with their problems.

    `problems` are those of all sections; `failed` are the sections that have one.
    With `elsewhere` the job will run on another machine: a plugin may lack its requirements here,
    and its own checks are then left out. With `unplaced` the layouts are still to be found, and
    backends do not check those in the tables.
    """

    def __init__(self, tables: Mapping[str, Any], elsewhere: bool = False, unplaced: bool = False):
        self.tables = dict(tables)
        self.elsewhere = elsewhere
        self.unplaced = unplaced
        self.problems: list[Problem] = []
        self.failed: set[str] = set()

        # Sections are tables. Other values are taken out, so that later readers need no check.
        for name in SECTIONS:
            if name in self.tables and not isinstance(self.tables[name], Mapping):
                value = self.tables.pop(name)
                self.fail(name, Problem(name, f"expected a table, got {value!r}; write [{name}]"))

    def note(self, key: str, *texts: str) -> None:
        """Note problems of the value at a dotted key; "" for texts that name it themselves."""
        self.problems += [Problem(key, text) for text in texts]

    def fail(self, section: str, *problems: Problem) -> None:
        """Note problems of a section. Checks that read this section are then left out."""
        self.failed.add(section)
        self.problems += problems

    def section(self, name: str, cls: type[T]) -> T:
        """Read [name] as an instance of `cls`.

        Keys with problems get their defaults, so that the other keys are still checked.
        """
        instance, problems = salvage(self.tables.get(name, {}), cls)
        if problems:
            self.fail(name, *(problem.inside(name) for problem in problems))
        return cls() if instance is None else instance

    @cached_property
    def device(self) -> str:
        """The device of the models, "cpu" or "cuda".

        "auto" is "cuda" where this machine has it, and for a job of another machine.
        """
        run = self.tables.get("run", {})
        device = run.get("device", "auto") if isinstance(run, Mapping) else "auto"
        if device in ("cpu", "cuda"):
            return device
        return "cuda" if self.elsewhere or torch.cuda.is_available() else "cpu"

    def plugin(
        self,
        kind: str,
        table: Mapping[str, Any],
        path: str,
        hf_config: Mapping[str, Any] | None = None,
    ) -> Choice | None:
        """Choose the plugin that a table names by its `name`, else the default one of its kind.

        `path` is the table's dotted key. `hf_config` are the fields of the model's config, on which
        defaults may depend, as on the device. None where there is no such plugin, with problems
        noted.
        """
        # The name
        try:
            name = table["name"] if "name" in table else registry().default(kind, self.device)
        except PluginError as error:
            self.note(path, str(error))
            return None
        if not isinstance(name, str):
            names = ", ".join(registry().names(kind))
            got = "" if name is None else f", got {name!r}"
            self.note(f"{path}.name", f"give the name of a {kind} plugin ({names}){got}")
            return None

        # Load the plugin for the class of its settings.
        settings = scoped(kind, {**table, "name": name})
        del settings["name"]
        try:
            # Paths to code have no descriptor to say what they need.
            installed = (
                not self.elsewhere or ":" in name or not registry().descriptor(kind, name).missing()
            )
            plugin = registry().get(kind, name) if installed else None
            config_class = registry().config_class(kind, name)
        except HybridFlowError as error:
            self.note(path, str(error))
            return None

        # The settings
        if config_class is None:
            for key in settings:
                self.note(f"{path}.{key}", f"unknown key; {kind} {name!r} has no settings")
            return Choice(name, plugin, None, not settings)
        if hf_config is not None:
            settings = {**device_defaults(config_class, self.device, hf_config), **settings}
        config, problems = salvage(settings, config_class)
        because = ""
        if "name" not in table and name != registry().default(kind):
            usual = registry().default(kind)
            because = f"; {name} is the default on {self.device}: for another set {path}.name"
            because += f', as in "{usual}"'
        for problem in problems:
            text = f"{_with_scope(problem, kind, path)}{because}"
            self.problems.append(Problem(problem.key, text).inside(path))
        return None if config is None else Choice(name, plugin, config, not problems)

    def algorithm(self) -> tuple[str, Algorithm | None]:
        """Make the algorithm with its settings: (name, algorithm).

        The algorithm is None, with problems noted, where no usable class is named or where it
        cannot be made with its settings. One whose `problems()` lists contradictions is
        returned all the same, with these noted.
        """
        # The table may be missing, or be no table, which has been noted already.
        table = self.tables.get("algorithm")
        if table is None:
            if "algorithm" not in self.failed:
                names = ", ".join(registry().names("algorithm"))
                self.fail("algorithm", Problem("algorithm", f"which one? There are {names}"))
            return "", None

        choice = self.plugin("algorithm", table, "algorithm")
        if choice is None or not choice.good:
            self.failed.add("algorithm")
        if choice is None:
            return str(table.get("name", "")), None
        if not (isinstance(choice.found, type) and issubclass(choice.found, Algorithm)):
            text = (
                f"{choice.name!r} is {choice.found!r}; it must be a class derived from "
                "hybridflow.core.contracts.algorithm.Algorithm"
            )
            self.fail("algorithm", Problem("algorithm", text))
            return choice.name, None

        try:
            algorithm = choice.found(choice.config)
            algorithm.roles()
        except (ValueError, HybridFlowError) as error:  # a size that its own parts refuse
            self.note("algorithm", *sentences(error))
            self.failed.add("algorithm")
            return choice.name, None
        return choice.name, algorithm

    def pools(self) -> dict[str, ResourcePool]:
        """Return the pools of [pools] by name, without those with problems.

        `main = 4` is short for `main = [4]`, and that for `main = { devices = [4] }`. Where no pool
        is for models, there is also main, of one device.
        """
        # isinstance would take true for a number of devices: bool is an int in Python.
        table = self.tables.get("pools", DEFAULT_POOLS)
        pools = {}
        for name, value in table.items():
            given = value if isinstance(value, Mapping) else {"devices": value}
            devices: Any = given.get("devices")
            devices = [devices] if type(devices) is int else devices
            is_list = isinstance(devices, list) and devices
            if unknown := set(given) - {"devices", "device"}:
                text = f"has no key {min(unknown)!r}; it takes devices and device"
                self.fail("pools", Problem(f"pools.{name}", text))
            elif given.get("device") not in (None, "cpu"):
                text = (
                    f'device is {given["device"]!r}; give "cpu" for a pool of reward functions, '
                    "and leave it out for one of models, which are on run.device"
                )
                self.fail("pools", Problem(f"pools.{name}", text))
            elif is_list and all(type(count) is int and count > 0 for count in devices):
                if sum(devices) > MOST_DEVICES:
                    text = f"has {sum(devices)} devices; the largest pool is of {MOST_DEVICES}"
                    self.fail("pools", Problem(f"pools.{name}", text))
                    continue
                pools[name] = ResourcePool(name, tuple(devices), given.get("device"))
            else:
                text = f"expected devices per node, for example [8, 8], got {value!r}"
                self.fail("pools", Problem(f"pools.{name}", text))
        if (
            table
            and all(pool.device == "cpu" for pool in pools.values())
            and len(pools) == len(table)
        ):
            pools = {**{name: ResourcePool(name) for name in DEFAULT_POOLS}, **pools}
        if not table:
            self.fail("pools", Problem("pools", "there is none; give one, for example main = [1]"))
        return pools

    def unknown_tables(self, roles: set[str], all_known: bool) -> None:
        """Note tables that are neither sections nor roles.

        `all_known` is False while an algorithm cannot be read: a table may be a role of it, and
        only tables that look misspelt are noted.
        """
        known = {*SECTIONS, *roles, *USUAL_ROLES}
        run_keys = {field.alias for field in attrs.fields(RunSection)}
        for key, value in self.tables.items():
            if key in known:
                continue
            hint = did_you_mean(key, known, quote="`")
            # A setting of [run] that stands outside any table.
            if not isinstance(value, Mapping) and key in run_keys:
                hint = f"; did you mean `run.{key}`?"
            if hint or all_known:
                names = ", ".join(sorted(roles)) or "none"
                sections = ", ".join(SECTIONS)
                self.note(key, f"unknown key{hint} (sections: {sections}; roles: {names})")

    def unused_roles(self, roles: set[str]) -> list[str]:
        """List the tables of usual roles that are not among `roles`, the algorithm's own.

        A configuration may have them, for another algorithm, but their keys are checked.
        """
        unused = [key for key in self.tables if key in USUAL_ROLES and key not in roles]
        for name in unused:
            table = self.tables[name]
            if isinstance(table, Mapping):
                structure(table, RoleSection, name, self.problems)
            # A string is a reward's function.
            elif not isinstance(table, str):
                self.note(name, f"expected a table, got {table!r}; write [{name}]")
        return unused


def device_defaults(
    config_class: Any, device: str, hf_config: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Return the defaults of a plugin's settings that depend on the device, for this device."""
    ask = getattr(config_class, "defaults_on", None)
    said = ask(device, hf_config) if ask is not None else {}
    # A class may derive from one of ours, and not have all of its settings.
    known = {field.alias for field in attrs.fields(config_class)}
    return {key: value for key, value in said.items() if key in known}


def sentences(error: Exception) -> list[str]:
    """Return the problems of a ConfigError, each a sentence, or the message of any other error."""
    return error.problems if isinstance(error, ConfigError) else [str(error)]


def salvage(table: Mapping[str, Any], cls: type[T]) -> tuple[T | None, list[Problem]]:
    """Make an instance of `cls` from a table that may have problems: (instance, problems).

    Keys with problems get their defaults. The instance is None where a key without a default, or
    the class as a whole, has a problem. The problems' keys are relative to the table.
    """
    problems: list[Problem] = []
    instance = structure(table, cls, problems=problems)
    if instance is not None:
        return instance, []

    # Once more without the bad keys; the problems of this second attempt are known already.
    bad = first_keys(problems)
    rest = {key: value for key, value in table.items() if key not in bad}
    return structure(rest, cls, problems=[]), problems


def first_keys(problems: list[Problem]) -> set[str]:
    """Return the keys of a table that have problems: for a problem of the key "b.c" it is `b`."""
    return {problem.key.partition(".")[0] for problem in problems}


def scoped(kind: str, table: Mapping[str, Any]) -> dict[str, Any]:
    """Merge a table with its sub-table for the plugin that `name` names, and drop other plugins'.

    With `name = "ppo"` in [algorithm], [algorithm.ppo] takes precedence over [algorithm] itself,
    and [algorithm.grpo] is ignored.
    """
    # A table under a plugin's name is a sub-table, and any other value a setting.
    names = registry().names(kind)
    own = table.get(str(table.get("name")))
    rest = {
        key: value
        for key, value in table.items()
        if key not in names or not isinstance(value, Mapping)
    }
    return merge(rest, own) if isinstance(own, Mapping) else rest


def _with_scope(problem: Problem, kind: str, path: str) -> str:
    """Return the problem, for an unknown key without a similar one with a hint on other plugins."""
    unknown = "." not in problem.key and problem.text.startswith("unknown key (")
    if unknown and len(registry().names(kind)) > 1:
        return f"{problem.text}; what is meant for another {kind} alone goes into [{path}.NAME]"
    return problem.text
