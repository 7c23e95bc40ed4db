"""The docstrings under the fields of a class.

`hybridflow show`, error messages and the reference of the settings print them.
"""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import sys
import types
from collections.abc import Mapping
from typing import Any


@functools.cache
def field_docs(cls: type) -> Mapping[str, str]:
    """Return {field: the docstring under it}, base classes included.

    Python keeps no such docstrings, so they are read from the source; the mapping is empty where
    the source is not available.
    """
    # The class itself comes last, so that its docstrings replace those of its bases.
    docs: dict[str, str] = {}
    for owner in reversed(cls.__mro__):
        body = getattr(_class_node(owner), "body", [])
        for field, below in itertools.pairwise(body):
            if (
                isinstance(field, ast.AnnAssign)
                and isinstance(field.target, ast.Name)
                and _is_text(below)
            ):
                docs[field.target.id] = inspect.cleandoc(below.value.value)
    return types.MappingProxyType(docs)


def _is_text(node: Any) -> bool:
    """Return whether a statement is a bare string."""
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def _class_node(cls: type) -> ast.AST | None:
    """Return the `class` statement of a class, found by its qualified name, if there is one."""
    try:
        node: Any = _module_node(cls.__module__)
    except (OSError, TypeError, KeyError, SyntaxError):
        return None

    # Outer.method.<locals>.Inner: each part is looked for inside the one before.
    for part in cls.__qualname__.split("."):
        if part != "<locals>":
            inner = (
                child
                for child in ast.walk(node)
                if isinstance(child, ast.ClassDef | ast.FunctionDef) and child.name == part
            )
            node = next(inner, ast.Pass())
    return node if isinstance(node, ast.ClassDef) else None


@functools.cache
def _module_node(name: str) -> ast.Module:
    return ast.parse(inspect.getsource(sys.modules[name]))
