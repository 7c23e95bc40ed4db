"""A frozen attrs class from tables: strict types, and every problem found at once and named by its dotted key."""

from __future__ import annotations

import functools
import json
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import attrs
import cattrs

from hybridflow.core.config.field_docs import field_docs
from hybridflow.core.errors import ConfigError
from hybridflow.core.names import nearest, reason

T = TypeVar("T")


class Invalid(ValueError):
    """What is wrong inside a value: (dotted key relative to it, sentence) pairs."""

    def __init__(self, problems: list[tuple[str, str]]):
        super().__init__("; ".join(f"{key}: {text}" if key else text for key, text in problems))
        self.problems = problems

    def inside(self, key: str) -> list[tuple[str, str]]:
        """The same problems, seen from the value that has this one under `key`."""
        return [(f"{key}.{inner}" if inner else key, text) for inner, text in self.problems]


def structure(
    data: Any, cls: type[T], path: str = "", problems: list[str] | None = None
) -> T | None:
    """An instance of the attrs class from tables; `path` is the dotted key at which they stand.

    Types are strict: an integer field takes no "3", 3.5 or true; a float field takes integers; TOML arrays become what
    the field says. Appends every problem to `problems` as a sentence that begins with its key, and returns None when
    there was one. Without `problems` raises ConfigError with all of them.
    """
    try:
        return _convert(data, cls)
    except Invalid as error:
        found = error.inside(path) if path else error.problems
    sentences = [f"{key}: {text}" if key else text for key, text in found]
    if problems is None:
        raise ConfigError(sentences)
    problems += sentences
    return None


# --- attrs classes ---


def _structure_attrs(value: Any, cls: Any) -> Any:
    """All problems of a table: unknown keys, missing ones, wrong types, and what the validators say."""
    if isinstance(value, cls):
        return value
    if not isinstance(value, Mapping):
        raise _mismatch(cls, value)
    fields = {field.alias: field for field in attrs.fields(cls) if field.init}
    problems = [(str(key), _unknown_key(str(key), fields)) for key in value if key not in fields]
    hints, good = _hints(cls), {}
    for key, field in fields.items():
        if key in value:
            try:
                good[key] = _convert(value[key], hints[field.name])
            except Invalid as error:
                problems += error.inside(key)
        elif field.default is attrs.NOTHING:
            problems.append((key, _missing(cls, field, hints[field.name])))
    refused = [(key, text) for key, value in good.items() for text in _refusals(fields[key], value)]
    if problems or refused:
        raise Invalid(problems + refused)
    try:
        return cls(**good)
    except ConfigError as error:
        raise Invalid([("", text) for text in error.problems]) from error
    except Exception as error:
        raise Invalid(
            [("", str(error) if isinstance(error, ValueError) else reason(error))]
        ) from error


def _refusals(field: attrs.Attribute, value: Any) -> list[str]:
    """What the field's validator says. A field with an attrs converter is left to the class itself."""
    if field.validator is None or field.converter is not None:
        return []
    try:
        field.validator(None, field, value)
    except (ValueError, TypeError) as error:
        return [str(error.args[0] if error.args else error).removeprefix(f"{field.name}: ")]
    except (
        AttributeError
    ):  # it asks the instance, which there is not yet: the class itself will call it
        return []
    return []


def _unknown_key(key: str, known: Mapping[str, Any]) -> str:
    close = nearest(key, known)
    meant = f"; did you mean `{close}`?" if close else ""
    return f"unknown key{meant} (known: {', '.join(known) or 'none'})"


def _missing(cls: type, field: attrs.Attribute, type_: Any) -> str:
    doc = field_docs(cls).get(field.name, "").replace("\n", " ")
    return f"required, but missing; expected {describe(type_)}" + (f" ({doc})" if doc else "")


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    return get_type_hints(cls)


# --- other types ---


def _convert(value: Any, type_: Any) -> Any:
    """Structure one value; what a hook of somebody else raises becomes Invalid."""
    if type_ is Any or type_ is object:
        return value
    try:
        return converter.structure(value, type_)
    except Invalid:
        raise
    except Exception as error:
        raise Invalid([("", f"expected {describe(type_)}, got {_got(value)} ({error})")]) from error


def _strict(*accepted: type) -> Callable[[Any, type], Any]:
    """A hook that takes values of exactly these types, and makes the field's type of them."""

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
    """list, set, frozenset, Sequence (as a tuple), tuple[X, ...] and tuple[X, Y]."""
    if not isinstance(value, list | tuple):
        raise _mismatch(type_, value)
    made, arms = get_origin(type_) or type_, get_args(type_)
    if made is tuple and arms and arms[-1] is not ...:
        if len(arms) != len(value):
            raise Invalid(
                [("", f"expected a list of {len(arms)}, got {len(value)} values: {_got(value)}")]
            )
    else:
        arms = (arms[0] if arms else Any,) * len(value)
    keyed = {
        str(index): (item, arm) for index, (item, arm) in enumerate(zip(value, arms, strict=True))
    }
    items = _convert_all(keyed).values()
    return tuple(items) if made is Sequence else made(items)


def _structure_table(value: Any, type_: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise _mismatch(type_, value)
    arm = (get_args(type_) or (str, Any))[1]
    return _convert_all({str(key): (inner, arm) for key, inner in value.items()})


def _convert_all(keyed: dict[str, tuple[Any, Any]]) -> dict[str, Any]:
    """Each value by its type, {key: (value, type)}, or Invalid with the problems of all."""
    done, problems = {}, []
    for key, (value, type_) in keyed.items():
        try:
            done[key] = _convert(value, type_)
        except Invalid as error:
            problems += error.inside(key)
    if problems:
        raise Invalid(problems)
    return done


def _structure_union(value: Any, type_: Any) -> Any:
    """The first arm that takes the value, exact types first; the problems of the only arm that could have."""
    arms = sorted(get_args(type_), key=lambda arm: type(value) is not arm)
    errors = {}
    for arm in arms:
        try:
            return _convert(value, arm)
        except Invalid as error:
            errors[arm] = error
    tables = [
        arm for arm in arms if isinstance(value, Mapping) and (_is_attrs(arm) or _is_table(arm))
    ]
    lists = [arm for arm in arms if isinstance(value, list | tuple) and _is_list(arm)]
    meant = tables or lists or [arm for arm in arms if arm is not type(None)]
    raise errors[meant[0]] if len(meant) == 1 else _mismatch(type_, value)


def _is_attrs(type_: Any) -> bool:
    return isinstance(type_, type) and attrs.has(type_)


def _is_list(type_: Any) -> bool:
    return (get_origin(type_) or type_) in (list, tuple, set, frozenset, Sequence)


def _is_table(type_: Any) -> bool:
    return (get_origin(type_) or type_) in (dict, Mapping)


def _is_union(type_: Any) -> bool:
    return get_origin(type_) in (Union, types.UnionType)


def _make_converter() -> cattrs.Converter:
    made = cattrs.Converter(detailed_validation=True)
    made.register_structure_hook_func(_is_attrs, _structure_attrs)
    made.register_structure_hook_func(lambda t: get_origin(t) is Literal, _structure_literal)
    made.register_structure_hook_func(_is_list, _structure_list)
    made.register_structure_hook_func(_is_table, _structure_table)
    made.register_structure_hook_func(_is_union, _structure_union)
    made.register_structure_hook_func(lambda t: t is type(None), _structure_none)
    for type_, accepted in {int: (int,), float: (float, int), bool: (bool,), str: (str,)}.items():
        made.register_structure_hook(type_, _strict(*accepted))
    made.register_structure_hook(Path, lambda value, _: Path(_strict(str)(value, str)))
    return made


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
_TOML = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    list: "list",
    tuple: "list",
    dict: "table",
}


def describe(type_: Any) -> str:
    """A type in words: "an integer", "a list", 'one of "a", "b"'."""
    if type_ in _WORDS:
        return _WORDS[type_]
    if get_origin(type_) is Literal:
        return "one of " + ", ".join(json.dumps(choice) for choice in get_args(type_))
    if _is_union(type_):
        return " or ".join(describe(arm) for arm in get_args(type_) if arm is not type(None))
    if _is_list(type_):
        return "a list"
    if _is_table(type_) or _is_attrs(type_):
        return "a table"
    return "a string (a path)" if type_ is Path else getattr(type_, "__name__", str(type_))


def _got(value: Any) -> str:
    kind = _TOML.get(type(value), type(value).__name__)
    shown = json.dumps(value) if isinstance(value, bool) else repr(value)
    return f"{shown if len(shown) <= 80 else shown[:77] + '...'} ({kind})"


def _mismatch(type_: Any, value: Any) -> Invalid:
    return Invalid([("", f"expected {describe(type_)}, got {_got(value)}")])
