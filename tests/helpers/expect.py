"""Run the methods of the conformance kit on parts with planted faults."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest


def caught(kit: type, method: str, *says: str, **fixtures: Any) -> str:
    """The kit's method must fail, and its message contain `says`: got, expected, what to do."""
    with pytest.raises(AssertionError) as failure:
        getattr(kit(), method)(**fixtures)
    text = str(failure.value)
    for part in ("got:", "expected:", "likely cause:", *says):
        assert part in text, f"{method} does not say {part!r}: {text}"
    return text


def each_fault(faults: Mapping[str, Mapping[type, str]]) -> pytest.MarkDecorator:
    """Parametrizes `fault`, `method`, `says`. `faults`: method -> part with a fault -> message."""
    cases = [
        pytest.param(fault, method, says, id=f"{fault.__name__}-{method}")
        for method, found in faults.items()
        for fault, says in found.items()
    ]
    return pytest.mark.parametrize(("fault", "method", "says"), cases)


def each_invariant(kit: type) -> pytest.MarkDecorator:
    """Parametrizes `method` with the kit's own and inherited tests."""
    methods = [name for name in dir(kit) if name.startswith("test_")]
    return pytest.mark.parametrize("method", methods)


def invariants(kit: type) -> set[str]:
    """The tests that a class of the kit has itself, without those that it inherits."""
    return {name for name in vars(kit) if name.startswith("test_")}
