"""How the kit fails: what was got, what is expected, and the likely cause, so that an author knows what to change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

E = TypeVar("E", bound=BaseException)


def require(holds: Any, *, got: Any, expected: Any, likely: str) -> None:
    """Raise AssertionError with the three unless `holds`."""
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
    """Equal shapes, and no entry farther away than `tolerance` (times the largest expected entry if `relative`)."""
    __tracebackhide__ = True
    require(
        tuple(got.shape) == tuple(expected.shape),
        got=f"{what} of shape {tuple(got.shape)}",
        expected=f"shape {tuple(expected.shape)}",
        likely=likely,
    )
    if not got.numel():
        return
    a, b = got.detach().double().cpu(), expected.detach().double().cpu()
    allowed = tolerance * (float(b.abs().max()) + 1e-12) if relative else tolerance
    off = (a - b).abs().nan_to_num(nan=torch.inf)
    worst = int(off.argmax())
    require(
        float(off.max()) <= allowed,
        got=f"{what}: {float(a.flatten()[worst]):.7g} at entry {worst} of shape {tuple(got.shape)}",
        expected=f"{float(b.flatten()[worst]):.7g} within {allowed:.2g}",
        likely=likely,
    )


def require_raises(call: Callable[[], Any], kind: type[E], *, what: str, likely: str) -> E:
    """The error of `kind` that `call()` raises."""
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
    raise AssertionError


def missing_fixture(owner: object, name: str, gives: str) -> Any:
    """What a base class's fixture raises until the author gives it."""
    raise NotImplementedError(
        f"{type(owner).__name__} needs a pytest fixture `{name}` that gives {gives}"
    )
