"""Failures of the kit: messages have the actual value, the expected one, and the likely cause."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

E = TypeVar("E", bound=BaseException)


def require(holds: Any, *, got: Any, expected: Any, likely: str) -> None:
    """Raise AssertionError, with the other three arguments as its message, unless `holds`."""
    __tracebackhide__ = True
    if not holds:
        raise AssertionError(f"\n  got: {got}\n  expected: {expected}\n  likely cause: {likely}")


def require_close(
    got: torch.Tensor,
    expected: torch.Tensor,
    tolerance: float,
    *,
    what: str,
    likely: str,
    relative: bool = False,
) -> None:
    """Require that two tensors have the same shape and that no two entries differ by more.

    The allowed absolute difference is `tolerance`, or with `relative` `tolerance` times the largest
    expected entry. The message names the worst entry, by its index in the flattened tensor.
    """
    __tracebackhide__ = True
    require(
        tuple(got.shape) == tuple(expected.shape),
        got=f"{what} of shape {tuple(got.shape)}",
        expected=f"shape {tuple(expected.shape)}",
        likely=likely,
    )
    if not got.numel():
        return

    values = got.detach().double().cpu()
    references = expected.detach().double().cpu()
    allowed = tolerance
    if relative:
        # The constant lets a tensor of zeros be compared with itself.
        allowed = tolerance * (float(references.abs().max()) + 1e-12)

    # A NaN is infinitely far away, so that argmax names it.
    distances = (values - references).abs().nan_to_num(nan=torch.inf)
    worst = int(distances.argmax())
    value = float(values.flatten()[worst])
    reference = float(references.flatten()[worst])
    require(
        float(distances.max()) <= allowed,
        got=f"{what}: {value:.7g} at entry {worst} of shape {tuple(got.shape)}",
        expected=f"{reference:.7g} within {allowed:.2g}",
        likely=likely,
    )


def require_raises(call: Callable[[], Any], kind: type[E], *, what: str, likely: str) -> E:
    """Require that `call()` raises an error of `kind`, and return the error."""
    __tracebackhide__ = True
    try:
        result = call()
    except kind as error:
        return error
    except Exception as error:
        require(
            False,
            got=f"{what} raised {error!r}",
            expected=f"a {kind.__name__} that says what to do",
            likely=likely,
        )
        raise AssertionError from error

    require(False, got=f"{what} gave {result!r:.200}", expected=f"a {kind.__name__}", likely=likely)
    # require has raised; this line tells the type checker that nothing is returned here.
    raise AssertionError


def missing_fixture(owner: object, name: str, gives: str) -> Any:
    """Raise NotImplementedError for a fixture that the author of the subclass must define."""
    raise NotImplementedError(
        f"{type(owner).__name__} needs a pytest fixture `{name}` that gives {gives}"
    )
