"""Run a method of the conformance kit on a part with a planted fault."""

from __future__ import annotations

from typing import Any

import pytest


def caught(kit: type, method: str, *says: str, **fixtures: Any) -> str:
    """The kit's method must fail, and its message contain `says`: what was got, what is expected, what to do."""
    with pytest.raises(AssertionError) as failure:
        getattr(kit(), method)(**fixtures)
    text = str(failure.value)
    for part in ("got:", "expected:", "likely cause:", *says):
        assert part in text, f"{method} does not say {part!r}: {text}"
    return text
