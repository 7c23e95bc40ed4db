"""Calls a function in a process of its own: the fake device is registered for a whole process."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any


def fresh(function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)`, of a module of tests/helpers or of ours."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *args).result(timeout=200)
