"""Makes attrs classes from tables: types are strict, and all problems are reported at once.

    structure --> _convert --> converter (cattrs) --> a hook per type
                     ^                                   |
                     '---- the values inside ------------'

A hook returns the value or raises Invalid, whose keys are relative to that value. Each level puts
its own key in front on the way up, so a problem ends with the full dotted key.
"""

from __future__ import annotations

import functools
import json
import math
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

import attrs
import cattrs

from hybridflow.core.errors import ConfigError
from hybridflow.core.names import did_you_mean, reason
from hybridflow.core.validators import INFINITE
from hybridflow.settle.config.field_docs import field_docs

T = TypeVar("T")


class Problem(NamedTuple):
    """A problem of a value; str() of it is the sentence "KEY: TEXT"."""

    key: str
    """Dotted key of the value, "" for the whole."""
    text: str

    def __str__(self) -> str:
        return f"{self.key}: {self.text}" if self.key else self.text

    def inside(self, key: str) -> Problem:
        """Return the same problem, its key relative to the value that has this one under `key`."""
        inner = (key, self.key) if key and self.key else (key or self.key,)
        return Problem(".".join(inner), self.text)


class Invalid(ValueError):
    """Raised with the problems inside a value; their keys are relative to it."""

    def __init__(self, problems: list[Problem]):
        super().__init__("; ".join(map(str, problems)))
        self.problems = problems

    def inside(self, key: str) -> list[Problem]:
        """Return the same problems, relative to the value that has this one under `key`."""
        return [problem.inside(key) for problem in self.problems]


def structure(
    data: Any, cls: type[T], path: str = "", problems: list[Problem] | None = None
) -> T | None:
    """Return an instance of the attrs class from tables; `path` is the dotted key of the tables.

    Types are strict: an integer field takes no "3", 3.5 or true; a float field takes integers; TOML
    arrays become the field's type. Appends every problem to `problems`, and returns None when there
    was one. Without `problems` raises ConfigError with all of them.
    """
    # The keys of the problems are relative to `data`, so `path` comes in front.
    try:
        return _convert(data, cls)
    except Invalid as error:
        found = error.inside(path)
    if problems is None:
        raise ConfigError(list(map(str, found)))
    problems += found
    return None


# --- attrs classes ---


def _structure_attrs(value: Any, cls: Any) -> Any:
    """Return an instance of the class.

    Raises Invalid with all problems: unknown keys, missing ones, wrong types, and the errors of the
    validators.
    """
    if isinstance(value, cls):
        return value
    if not isinstance(value, Mapping):
        raise _mismatch(cls, value)

    # Keys are checked both ways: those that no field has, and fields that no key gives.
    fields = {field.alias: field for field in attrs.fields(cls) if field.init}
    problems = []
    for key in value:
        if key not in fields:
            problems.append(Problem(str(key), _unknown_key(str(key), fields)))
    hints = _hints(cls)
    good = {}
    for key, field in fields.items():
        if key in value:
            try:
                good[key] = _convert(value[key], hints[field.name])
            except Invalid as error:
                problems += error.inside(key)
        elif field.default is attrs.NOTHING:
            problems.append(Problem(key, _missing(cls, field, hints[field.name])))

    # The class would stop at the first value that a validator refuses, so each is asked here.
    for key, inner in good.items():
        problems += [Problem(key, text) for text in _refusals(fields[key], inner)]
    if problems:
        raise Invalid(problems)

    # Only checks of several fields together remain.
    try:
        return cls(**good)
    except ConfigError as error:
        raise Invalid([Problem("", text) for text in error.problems]) from error
    except ValueError as error:
        raise _invalid(str(error)) from error
    except Exception as error:
        raise _invalid(reason(error)) from error


def _refusals(field: attrs.Attribute, value: Any) -> list[str]:
    """Return the error messages of the field's validator for a value.

    NaN is refused for every field, and inf for those that do not ask for it (`validators.setting`).
    A field with an attrs converter is left to the class, as its validator expects converted values.
    """
    numbers = value if isinstance(value, list | tuple) else [value]
    for number in numbers:
        infinite = field.metadata.get(INFINITE, False)
        if isinstance(number, float) and not (math.isfinite(number) or (infinite and number > 0)):
            return [f"must be a finite number, got {value!r}"]
    if field.validator is None or field.converter is not None:
        return []
    try:
        field.validator(None, field, value)
    except (ValueError, TypeError) as error:
        return [str(error.args[0] if error.args else error).removeprefix(f"{field.name}: ")]
    except AttributeError:
        pass  # the validator asks the instance, which the class will give it
    return []


def _unknown_key(key: str, known: Mapping[str, Any]) -> str:
    return f"unknown key{did_you_mean(key, known, '`')} (known: {', '.join(known) or 'none'})"


def _missing(cls: type, field: attrs.Attribute, type_: Any) -> str:
    text = f"required, but missing; expected {describe(type_)}"
    doc = field_docs(cls).get(field.name, "")
    if doc:
        text += f" ({doc})".replace("\n", " ")
    return text


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    return get_type_hints(cls)


# --- other types ---


def _convert(value: Any, type_: Any) -> Any:
    """Convert a value to `type_`; an error of another package's hook becomes Invalid."""
    if type_ is Any or type_ is object:
        return value
    try:
        return converter.structure(value, type_)
    except Invalid:
        raise
    except Exception as error:
        raise _invalid(f"expected {describe(type_)}, got {_got(value)} ({error})") from error


def _strict(*accepted: type) -> Callable[[Any, type], Any]:
    """Return a hook that converts values of exactly these types to the field's type.

    A subclass does not count: true is an int in Python, and no integer in a configuration.
    """

    def hook(value: Any, type_: type) -> Any:
        if type(value) not in accepted:
            raise _mismatch(type_, value)
        return type_(value)

    return hook


def _structure_none(value: Any, type_: Any) -> None:
    if value is not None:
        raise _mismatch(type_, value)


def _structure_literal(value: Any, type_: Any) -> Any:
    for choice in get_args(type_):
        if type(choice) is type(value) and choice == value:
            return choice
    raise _mismatch(type_, value)


def _structure_list(value: Any, type_: Any) -> Any:
    """Return a list, set, frozenset, Sequence (as a tuple), tuple[X, ...] or tuple[X, Y]."""
    if not isinstance(value, list | tuple):
        raise _mismatch(type_, value)

    # A bare `list` or `tuple` takes items of any type.
    container = get_origin(type_) or type_
    arms = get_args(type_)
    if container is tuple and arms and arms[-1] is not ...:
        # tuple[X, Y]: a type for each item.
        if len(arms) != len(value):
            raise _invalid(
                f"expected a list of {len(arms)}, got {len(value)} values: {_got(value)}"
            )
    else:
        arms = (arms[0] if arms else Any,) * len(value)

    # Items are keyed by their numbers, so that problems name them: `devices.1`.
    keyed = {}
    for index, pair in enumerate(zip(value, arms, strict=True)):
        keyed[str(index)] = pair
    items = _convert_all(keyed).values()
    return tuple(items) if container is Sequence else container(items)


def _structure_table(value: Any, type_: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise _mismatch(type_, value)
    # A table without types takes any values; its keys are strings in any case.
    arm = (get_args(type_) or (str, Any))[1]
    return _convert_all({str(key): (inner, arm) for key, inner in value.items()})


def _convert_all(keyed: dict[str, tuple[Any, Any]]) -> dict[str, Any]:
    """Return each value of {key: (value, type)} as its type.

    Raises Invalid with the problems of all.
    """
    values = {}
    problems = []
    for key, (value, type_) in keyed.items():
        try:
            values[key] = _convert(value, type_)
        except Invalid as error:
            problems += error.inside(key)
    if problems:
        raise Invalid(problems)
    return values


def _structure_union(value: Any, type_: Any) -> Any:
    """Convert the value to the first member type that takes it; its exact type is tried first.

    If none takes it, raises the problems of the only member that can have been meant, or an error
    that names all members.
    """
    arms = sorted(get_args(type_), key=lambda arm: type(value) is not arm)
    errors = {}
    for arm in arms:
        try:
            return _convert(value, arm)
        except Invalid as error:
            errors[arm] = error

    # No member takes it. A table is meant for a member that is a table, a list for one that is a
    # list.
    meant = []
    if isinstance(value, Mapping):
        meant = [arm for arm in arms if _is_attrs(arm) or _is_table(arm)]
    elif isinstance(value, list | tuple):
        meant = [arm for arm in arms if _is_list(arm)]
    if not meant:
        meant = [arm for arm in arms if not _is_none(arm)]
    raise errors[meant[0]] if len(meant) == 1 else _mismatch(type_, value)


def _is_attrs(type_: Any) -> bool:
    return isinstance(type_, type) and attrs.has(type_)


def _is_literal(type_: Any) -> bool:
    return get_origin(type_) is Literal


def _is_none(type_: Any) -> bool:
    return type_ is type(None)


def _is_list(type_: Any) -> bool:
    return (get_origin(type_) or type_) in (list, tuple, set, frozenset, Sequence)


def _is_table(type_: Any) -> bool:
    return (get_origin(type_) or type_) in (dict, Mapping)


def _is_union(type_: Any) -> bool:
    return get_origin(type_) in (Union, types.UnionType)


def _make_converter() -> cattrs.Converter:
    new = cattrs.Converter(detailed_validation=True)

    # Kinds of types: each hook comes with the test that the types of its kind pass.
    kinds = {
        _is_attrs: _structure_attrs,
        _is_literal: _structure_literal,
        _is_list: _structure_list,
        _is_table: _structure_table,
        _is_union: _structure_union,
        _is_none: _structure_none,
    }
    for passes, hook in kinds.items():
        new.register_structure_hook_func(passes, hook)

    # Single types, each with the types of the values that it takes.
    accepted = {int: (int,), float: (float, int), bool: (bool,), str: (str,)}
    for type_, value_types in accepted.items():
        new.register_structure_hook(type_, _strict(*value_types))
    new.register_structure_hook(Path, lambda value, _: Path(_strict(str)(value, str)))
    return new


converter = _make_converter()
"""The cattrs converter behind `structure`; register a hook for a type of your own here."""


# --- words ---

_WORDS = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "a string",
    type(None): "nothing",
}
"""Type of a field -> its name in messages."""

_TOML = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    list: "list",
    tuple: "list",
    dict: "table",
}
"""Type of a given value -> its name in messages."""


def describe(type_: Any) -> str:
    """Return a type in words: "an integer", "a list", 'one of "a", "b"'."""
    if type_ in _WORDS:
        return _WORDS[type_]
    if _is_literal(type_):
        return "one of " + ", ".join(json.dumps(choice) for choice in get_args(type_))
    if _is_union(type_):
        return " or ".join(describe(arm) for arm in get_args(type_) if not _is_none(arm))
    if _is_list(type_):
        return "a list"
    if _is_table(type_) or _is_attrs(type_):
        return "a table"
    return "a string (a path)" if type_ is Path else getattr(type_, "__name__", str(type_))


def _got(value: Any) -> str:
    """Return a value as text for messages: at most 80 characters, with its type."""
    kind = _TOML.get(type(value), type(value).__name__)
    shown = json.dumps(value) if isinstance(value, bool) else repr(value)
    return f"{shown if len(shown) <= 80 else shown[:77] + '...'} ({kind})"


def _mismatch(type_: Any, value: Any) -> Invalid:
    return _invalid(f"expected {describe(type_)}, got {_got(value)}")


def _invalid(text: str) -> Invalid:
    """Return Invalid with one problem, of the value itself."""
    return Invalid([Problem("", text)])
