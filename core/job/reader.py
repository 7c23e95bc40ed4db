"""One stage's tables, read section by section. What is wrong is collected, so that a user sees all of it at once."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import attrs

from hybridflow.core.config.load import merge
from hybridflow.core.config.structure import structure
from hybridflow.core.contracts.algorithm import Algorithm
from hybridflow.core.contracts.runtime import ResourcePool
from hybridflow.core.errors import ConfigError, HybridFlowError, PluginError
from hybridflow.core.job.schema import SECTIONS, USUAL_ROLES, RoleSection, RunSection
from hybridflow.core.names import did_you_mean
from hybridflow.core.plugins import registry

T = TypeVar("T")


@attrs.frozen
class Choice:
    """A plugin that a table names, imported, with its settings."""

    name: str
    found: Any
    """None: what it needs is not installed, and the run is meant for elsewhere."""
    config: Any
    """None: it has no settings."""
    good: bool = True
    """False: some of its settings have problems, and defaults stand in for them."""


class Reader:
    """`tables` as they count for one stage; `problems` are sentences, `failed` the sections that have one.

    `elsewhere`: it is to run on another machine; what a plugin needs may lack here (its own checks are then left out).
    `unplaced`: its layouts are still to be found, and those that stand there are not looked at by backends.
    """

    def __init__(self, tables: Mapping[str, Any], elsewhere: bool = False, unplaced: bool = False):
        self.tables, self.elsewhere, self.unplaced = dict(tables), elsewhere, unplaced
        self.problems: list[str] = []
        self.failed: set[str] = set()
        for name in SECTIONS:
            if name in self.tables and not isinstance(self.tables[name], Mapping):
                self.fail(
                    name, f"{name}: expected a table, got {self.tables.pop(name)!r}; write [{name}]"
                )

    def fail(self, section: str, *problems: str) -> None:
        """Note problems of a section; checks that read it are left out then."""
        self.failed.add(section)
        self.problems += problems

    def section(self, name: str, cls: type[T]) -> T:
        """[name] as `cls`, whatever problems it has, so that the others are still looked at."""
        made, problems = salvage(self.tables.get(name, {}), cls, name)
        if problems:
            self.fail(name, *problems)
        return cls() if made is None else made

    def plugin(self, kind: str, table: Mapping[str, Any], path: str) -> Choice | None:
        """The plugin that a table asks for by its `name`, else the default one; None with problems noted."""
        try:
            name = table["name"] if "name" in table else registry().default(kind)
        except PluginError as error:
            self.problems.append(f"{path}: {error}")
            return None
        if not isinstance(name, str):
            self.problems.append(
                f"{path}.name: give the name of a {kind} plugin ({', '.join(registry().names(kind))})"
                + ("" if name is None else f", got {name!r}")
            )
            return None
        settings = scoped(kind, {**table, "name": name})
        del settings["name"]
        try:
            there = (
                not self.elsewhere or ":" in name or not registry().descriptor(kind, name).missing()
            )
            found = registry().get(kind, name) if there else None
            config_class = registry().config_class(kind, name)
        except HybridFlowError as error:
            self.problems.append(f"{path}: {error}")
            return None
        if config_class is None:
            self.problems += [
                f"{path}.{k}: unknown key; {kind} {name!r} has no settings" for k in settings
            ]
            return Choice(name, found, None, not settings)
        config, problems = salvage(settings, config_class, path)
        self.problems += [_with_scope(problem, kind, path) for problem in problems]
        return None if config is None else Choice(name, found, config, not problems)

    def algorithm(self) -> tuple[str, Algorithm | None]:
        """The algorithm with its settings, or None with problems noted."""
        table = self.tables.get("algorithm")
        if table is None:
            if "algorithm" not in self.failed:
                self.fail(
                    "algorithm",
                    f"algorithm: which one? There are {', '.join(registry().names('algorithm'))}",
                )
            return "", None
        choice = self.plugin("algorithm", table, "algorithm")
        if choice is None or not choice.good:
            self.failed.add("algorithm")
        if choice is None:
            return str(table.get("name", "")), None
        if not (isinstance(choice.found, type) and issubclass(choice.found, Algorithm)):
            self.fail(
                "algorithm",
                f"algorithm: {choice.name!r} is {choice.found!r}; it must be a class derived from "
                "hybridflow.core.contracts.algorithm.Algorithm",
            )
            return choice.name, None
        try:
            algorithm = choice.found(choice.config)
            problems = [f"algorithm: {problem}" for problem in algorithm.problems() if choice.good]
            algorithm.roles()
        except ConfigError as error:
            algorithm, problems = None, [f"algorithm: {problem}" for problem in error.problems]
        except (ValueError, HybridFlowError) as error:  # a size that its own parts refuse
            algorithm, problems = None, [f"algorithm: {error}"]
        self.problems += problems
        if algorithm is None:
            self.failed.add("algorithm")
        return choice.name, algorithm

    def pools(self) -> dict[str, ResourcePool]:
        """[pools]: name = devices per node."""
        table, pools = self.tables.get("pools", {"main": [1]}), {}
        for name, given in table.items():
            devices = [given] if type(given) is int else given
            if (
                isinstance(devices, list)
                and devices
                and all(type(d) is int and d > 0 for d in devices)
            ):
                pools[name] = ResourcePool(name, tuple(devices))
            else:
                self.fail(
                    "pools",
                    f"pools.{name}: expected devices per node, for example [8, 8], got {given!r}",
                )
        if not table:
            self.fail("pools", "pools: there is none; give one, for example main = [1]")
        return pools

    def unknown_tables(self, roles: set[str], all_known: bool) -> None:
        """Tables that are neither sections nor roles. `all_known`: False while an algorithm could not be read, whose
        roles might be meant; then only what looks misspelt is said."""
        known = {*SECTIONS, *roles, *USUAL_ROLES}
        inside = {f.alias: f"run.{f.alias}" for f in attrs.fields(RunSection)}
        for key, value in self.tables.items():
            if key in known:
                continue
            hint = did_you_mean(key, known, quote="`")
            if not isinstance(value, Mapping) and key in inside:
                hint = f"; did you mean `{inside[key]}`?"
            if hint or all_known:
                there = (
                    f"sections: {', '.join(SECTIONS)}; roles: {', '.join(sorted(roles)) or 'none'}"
                )
                self.problems.append(f"{key}: unknown key{hint} ({there})")

    def unused_roles(self, roles: set[str]) -> list[str]:
        """Tables of usual roles that this algorithm does not have: they may stand there, but not misspelt inside."""
        unused = [key for key in self.tables if key in USUAL_ROLES and key not in roles]
        for name in unused:
            if isinstance(self.tables[name], Mapping):
                structure(self.tables[name], RoleSection, name, self.problems)
            elif not isinstance(self.tables[name], str):
                self.problems.append(
                    f"{name}: expected a table, got {self.tables[name]!r}; write [{name}]"
                )
        return unused


def salvage(table: Mapping[str, Any], cls: type[T], path: str) -> tuple[T | None, list[str]]:
    """(`cls` of a table, its problems). Defaults stand in for what has problems; None where there are none."""
    problems: list[str] = []
    made = structure(table, cls, path, problems)
    if made is not None:
        return made, []
    bad = keys_of(problems, path)
    return structure(
        {key: value for key, value in table.items() if key not in bad}, cls, path, []
    ), problems


def keys_of(problems: Iterable[str], path: str) -> set[str]:
    """The keys of a table that problems are about."""
    return {
        re.split(r"[.:]", problem.removeprefix(f"{path}."), maxsplit=1)[0] for problem in problems
    }


def scoped(kind: str, table: Mapping[str, Any]) -> dict[str, Any]:
    """A table whose sub-tables may be meant for one plugin each: of `[algorithm.ppo]` and `[algorithm.grpo]` the one
    that `name` names counts, over what stands in `[algorithm]` itself."""
    names = registry().names(kind)
    own = table.get(str(table.get("name")))
    rest = {k: v for k, v in table.items() if k not in names or not isinstance(v, Mapping)}
    return merge(rest, own) if isinstance(own, Mapping) else rest


def _with_scope(problem: str, kind: str, path: str) -> str:
    """A key that nothing is spelled like may be another plugin's."""
    if (
        re.match(rf"{re.escape(path)}\.[^.:]+: unknown key \(", problem)
        and len(registry().names(kind)) > 1
    ):
        return f"{problem}; what is meant for another {kind} alone goes into [{path}.NAME]"
    return problem
