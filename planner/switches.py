"""Settings beside the placement that trade memory for time.

    role.generation.keep       the engine's memory stays while models train
    role.offload               weights and optimizer wait in the host's memory
    role.micro_batch_tokens    tokens of a forward pass
    role.backend.NAME          settings in TrainingSettings.switches of the backend
    rollout.NAME               settings in EngineSettings.switches of the rollout engine

Each setting of a job is tried with other values, and the whole mapping is searched anew with each.
For a job that fits nowhere, all settings are first set to the values that take the least memory,
and then reset one by one, the one that makes the step fastest first. The settings that remain are
needed: without any of them the job does not fit, or takes a quarter longer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping as Table
from functools import cached_property
from typing import Any

import attrs

from hybridflow.core.contracts.rollout import engine_settings
from hybridflow.core.contracts.training import training_settings
from hybridflow.core.errors import HybridFlowError
from hybridflow.core.job.job import PlacedModel
from hybridflow.planner.jobs import JobPlan, Misfit
from hybridflow.planner.search import Mapping, NothingFitsError, describe
from hybridflow.settle.roles import inherits

Key = tuple[str, str]
"""A setting: (role, name below the role's table). Those of the engine have the role "rollout"."""
Values = Table[Key, Any]
WORTH = 0.01
"""The least share of a step that a change must save for `fastest` to make it."""
DEARER = 0.25
"""A change is kept although the job fits without it if a step would take this share longer."""


@attrs.frozen
class Trial:
    """A job with some of its settings changed."""

    values: Values
    """All settings, with the values that they have in it."""
    changes: Values
    """The settings whose values differ from the job as it is written."""
    plan: JobPlan
    mapping: Mapping | None
    """The fastest mapping; None where nothing fits."""

    @property
    def seconds(self) -> float:
        """Duration of a step; infinite where nothing fits."""
        return self.mapping.seconds if self.mapping is not None else float("inf")


@attrs.frozen(slots=False, eq=False)
class Switches:
    """The settings of one job on one cluster, and the best mappings for other values of them."""

    plan: JobPlan
    placed: bool = False
    """Whether the job stays where it is placed, and only its settings change."""
    _tried: dict[tuple, Trial] = attrs.field(factory=dict, init=False)
    _roles: dict[tuple, PlacedModel] = attrs.field(factory=dict, init=False)
    """Roles with changed settings: a search keeps what it finds of the same object."""

    @cached_property
    def choices(self) -> dict[Key, tuple[Any, ...]]:
        """The settings that can be changed, each with its values, the one of least memory last."""
        found: dict[Key, tuple[Any, ...]] = {}
        for name, placed in self.plan.job.models.items():
            for key, values in _choices(name, placed, self.plan).items():
                found.setdefault(key, values)
        return found

    @cached_property
    def written(self) -> Values:
        """The values that the job itself has."""
        models = self.plan.job.models
        return {key: _value(_owner(key, models), key[1]) for key in self.choices}

    def trial(self, changes: Values) -> Trial:
        """Return the job with these changes, and its fastest mapping; searched once, then kept."""
        values = {**self.written, **changes}
        key = tuple(values.values())
        if key not in self._tried:
            changes = {one: value for one, value in values.items() if value != self.written[one]}
            plan = self._changed(changes)
            mapping = None if plan is None else self._mapping(plan)
            self._tried[key] = Trial(values, changes, plan or self.plan, mapping)
        return self._tried[key]

    def _mapping(self, plan: JobPlan) -> Mapping | None:
        """Return the mapping of a job with other settings; None where it does not fit."""
        try:
            return plan.written() if self.placed else plan.best()
        except (NothingFitsError, Misfit):
            return None

    def _changed(self, changes: Values) -> JobPlan | None:
        """Return the plan of a job with changed settings; None where the settings refuse them."""
        placed = dict(self.plan.job.models)
        try:
            for name, one in placed.items():
                own = tuple(
                    (key[1], value)
                    for key, value in changes.items()
                    if _owns(key, name, one) or self._follows(key, name)
                )
                if own and (name, own) not in self._roles:
                    for setting, value in own:
                        one = _with(one, setting, value)
                    self._roles[name, own] = one
                placed[name] = self._roles.get((name, own), one)
            work = self.plan.work.of(placed)
        except (HybridFlowError, ValueError):
            return None
        job = attrs.evolve(self.plan.job, models=placed)  # type: ignore[misc]
        return attrs.evolve(self.plan, job=job, work=work)

    def _follows(self, key: Key, name: str) -> bool:
        """Return whether a role that is not trained takes a setting of the actor's backend."""
        role, setting = key
        placed = self.plan.job.models[name]
        if role != "actor" or not setting.startswith("backend.") or placed.role.trained:
            return False
        same = placed.spec.backend == self.plan.job.models[role].spec.backend
        return same and _value(placed, setting) == self.written[key]

    def that_fit(self) -> Trial | None:
        """Return the job with few changes that make it fit; None where all of them are not enough.

        The module's docstring describes how they are chosen.
        """
        thrifty = {key: values[-1] for key, values in self.choices.items()}
        trial = self.trial(thrifty)
        if trial.mapping is None:
            return None

        # Reset them one by one.
        while True:
            fewer = []
            for key in trial.changes:
                rest = {other: value for other, value in trial.changes.items() if other != key}
                fewer.append(self.trial(rest))
            best = min(fewer, key=_seconds, default=trial)
            if best is trial or best.seconds > (1.0 + DEARER) * trial.seconds:
                return trial
            trial = best

    def one_by_one(self, start: Trial) -> Iterator[tuple[Key, Trial]]:
        """Yield `start` with each setting at each of its other values."""
        for key, values in self.choices.items():
            for value in values:
                if value != start.values[key]:
                    yield key, self.trial({**start.values, key: value})

    def fastest(self, start: Trial) -> Trial:
        """Return the job after a greedy search from `start`.

        Each time the setting that saves most is changed, until none saves WORTH of the step.
        """
        best = start
        while True:
            found = min((one for _, one in self.one_by_one(best)), key=_seconds, default=best)
            if found.seconds > (1.0 - WORTH) * best.seconds:
                return best
            best = found

    def line(self, key: Key, value: Any) -> str:
        """Return a setting as a line of a config, such as "actor.offload = true"."""
        role, name = key
        return f"{role}.{name} = {_toml(value)}"

    def lines(self, changes: Values) -> list[str]:
        """Return changes as lines of a config, with lines that keep other roles unchanged."""
        return [self.line(key, value) for key, value in self._said(changes).items()]

    def tables(self, changes: Values) -> dict[str, Any]:
        """Return changes as nested tables of a config."""
        models = self.plan.job.models
        tables: dict[str, Any] = {}
        for (role, key), value in self._said(changes).items():
            *path, last = (role, *key.split("."))
            table = tables
            for part in path:
                table = table.setdefault(part, {})
            table[last] = value
            # A config may name the plugin alone, where a table is needed now.
            owner = _owner((role, key), models).spec
            if role == "rollout":
                table["name"] = owner.engine
            elif path[-1] == "backend":
                table["name"] = owner.backend
        return tables

    def _said(self, changes: Values) -> Values:
        """Return changes with the values of roles that would otherwise inherit the actor's."""
        said = dict(changes)
        for (role, key), value in changes.items():
            for name, placed in self.plan.job.models.items():
                if role != "actor" or not inherits(placed.role):
                    continue
                now = changes.get((name, key), self.written.get((name, key), value))
                if now != value:
                    said[name, key] = now
        return said


def what_fits(plan: JobPlan) -> str:
    """Return a mapping on which a job fits, or the settings that make it fit, in a sentence."""
    try:
        fits = describe(plan.best())
        return f'this fits: {fits} (`hybridflow plan` writes it; placement = "auto" takes it)'
    except NothingFitsError as error:
        return f"nothing fits: {hinted(plan, error).problems[0]}"


def hinted(plan: JobPlan, error: NothingFitsError) -> NothingFitsError:
    """Return an error that names the settings with which the job fits."""
    switches = Switches(plan)
    trial = switches.that_fit()
    if trial is None:
        return NothingFitsError(
            [
                f"{problem}; not even keep = false, offload, recomputation, bfloat16 and smaller "
                "micro-batches make it fit"
                for problem in error.problems
            ]
        )
    *others, last = error.problems
    lines = ", ".join(switches.lines(trial.changes))
    return NothingFitsError([*others, f"{last}. It fits with {lines}"])


def _seconds(trial: Trial) -> float:
    return trial.seconds


def _choices(name: str, placed: PlacedModel, plan: JobPlan) -> dict[Key, tuple[Any, ...]]:
    """Return the settings of one role, with their values."""
    spec = placed.spec
    device = plan.work.device
    found: dict[Key, tuple[Any, ...]] = {}
    settings = training_settings(spec.backend_config)
    works = [task for task in plan.work.workload.tasks if task.role == name]
    if settings.execution(placed.role.trained).offloads:
        found[name, "offload"] = (False, True)

    # A backend's switches concern the backward pass and the optimizer.
    if placed.role.trained:
        for key, values in settings.switches.items():
            found[name, f"backend.{key}"] = _sorted(values, getattr(settings, key), device)

    # A micro-batch has at least one sequence, and at most all of them.
    most = max((t.sequences for t in works if t.verb != "generate"), default=0)
    tokens = plan.work.workload.tokens
    if most:
        now = spec.micro_batch_tokens
        sizes = [now * 2, now, now // 2, now // 4]
        found[name, "micro_batch_tokens"] = tuple(
            size for size in sizes if size == now or tokens <= size <= most * tokens
        )

    # The engine
    if spec.engine is not None and any(task.verb == "generate" for task in works):
        engine = engine_settings(spec.engine_config)
        found[name, "generation.keep"] = (True, False)
        for key, values in engine.switches.items():
            found["rollout", key] = _sorted(values, getattr(engine, key), device)
    return found


def _sorted(values: tuple[Any, ...], now: Any, device: str) -> tuple[Any, ...]:
    """Return a setting's values, with the present value `now` sorted in among numbers.

    Values that are texts are precisions: those wider than the present one are left out, and on CPUs
    narrower ones too.
    """
    if isinstance(now, str):
        known = device != "cpu" and now in values
        return values[values.index(now) :] if known else (now,)
    if now in values:
        return values
    rising = len(values) < 2 or values[0] < values[-1]
    return tuple(sorted((*values, now), reverse=not rising))


def _owner(key: Key, models: Table[str, PlacedModel]) -> PlacedModel:
    return next(placed for name, placed in models.items() if _owns(key, name, placed))


def _owns(key: Key, name: str, placed: PlacedModel) -> bool:
    """Return whether a setting is one of this role: its own, or its engine's."""
    role, _ = key
    return placed.spec.engine is not None if role == "rollout" else role == name


def _value(placed: PlacedModel, key: str) -> Any:
    table, _, name = key.rpartition(".")
    if table == "backend":
        return getattr(training_settings(placed.spec.backend_config), name)
    if table == "generation":
        return placed.section.generation.keep
    if name in ("offload", "micro_batch_tokens"):
        return getattr(placed.spec, name)
    return getattr(engine_settings(placed.spec.engine_config), name)


def _with(placed: PlacedModel, key: str, value: Any) -> PlacedModel:
    """Return a role with another value of a setting. Raises ValueError if its settings refuse."""
    table, _, name = key.rpartition(".")
    spec = placed.spec
    if table == "generation":
        generation = attrs.evolve(placed.section.generation, keep=value)
        section = attrs.evolve(placed.section, generation=generation)
        return attrs.evolve(placed, section=section)
    if table == "backend":
        settings = attrs.evolve(spec.backend_config, **{name: value})
        return attrs.evolve(placed, spec=attrs.evolve(spec, backend_config=settings))
    if name in ("offload", "micro_batch_tokens"):
        return attrs.evolve(placed, spec=attrs.evolve(spec, **{name: value}))
    engine = attrs.evolve(spec.engine_config, **{name: value})
    return attrs.evolve(placed, spec=attrs.evolve(spec, engine_config=engine))


def _toml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value)
