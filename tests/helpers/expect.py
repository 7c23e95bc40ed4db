"""Run the methods of the conformance kit on parts with planted faults."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import pytest


def caught(kit: type, method: str, **fixtures: Any) -> None:
    """The kit's method must fail, and say what it got, what it expected, and a likely cause."""
    with pytest.raises(AssertionError) as failure:
        getattr(kit(), method)(**fixtures)
    for part in ("got:", "expected:", "likely cause:"):
        assert part in str(failure.value), f"{method} does not say {part!r}: {failure.value}"


def each_fault(
    kit: type, faults: Mapping[str, Collection[Any]], besides: Collection[str] = ()
) -> pytest.MarkDecorator:
    """Parametrizes `fault` and `method` with `faults`: method -> parts that it must notice.

    Every method that the kit has itself must be there, or among those `besides`, which are tested otherwise.
    """
    assert invariants(kit) == {*faults, *besides}, "an invariant without a fault"
    cases = [
        pytest.param(
            fault, method, id=f"{getattr(fault, '__name__', type(fault).__name__)}-{method}"
        )
        for method, found in faults.items()
        for fault in found
    ]
    return pytest.mark.parametrize(("fault", "method"), cases)


def each_invariant(kit: type) -> pytest.MarkDecorator:
    """Parametrizes `method` with the kit's own and inherited tests."""
    methods = [name for name in dir(kit) if name.startswith("test_")]
    return pytest.mark.parametrize("method", methods)


def invariants(kit: type) -> set[str]:
    """The tests that a class of the kit has itself, without those that it inherits."""
    return {name for name in vars(kit) if name.startswith("test_")}
