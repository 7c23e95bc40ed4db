"""Validators of attrs fields: attrs.field(default=1.0, validator=positive). None passes, for fields of type X | None.

Each raises ValueError with the field, what it must be, what was got, and what to do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs

Validator = Callable[[Any, attrs.Attribute, Any], None]


def _validator(accepts: Callable[[Any], bool], must: str, advice: str) -> Validator:
    def validate(instance: Any, attribute: attrs.Attribute, value: Any) -> None:
        if value is not None and not accepts(value):  # a NaN is accepted by none: comparisons with it are false
            raise ValueError(f"{attribute.name}: must be {must}, got {value!r}; {advice}")

    return validate


positive: Validator = _validator(lambda value: value > 0, "above 0", "give a number above 0")
"""value > 0."""

positive_figure: Validator = _validator(
    lambda value: 0 < value < float("inf"), "above 0 and finite", "give the figure of the data sheet"
)
"""0 < value < infinity."""

non_negative: Validator = _validator(
    lambda value: value >= 0, "0 or more", "give 0 to turn it off, or a positive number"
)
"""value >= 0."""

fraction: Validator = _validator(lambda value: 0 < value <= 1, "above 0 and at most 1", "give a fraction, 1 for all")
"""0 < value <= 1."""

share: Validator = _validator(lambda value: 0 <= value <= 1, "from 0 to 1", "give 0 to turn it off, or a fraction")
"""0 <= value <= 1."""


def at_least(smallest: float) -> Validator:
    """value >= smallest."""
    return _validator(lambda value: value >= smallest, f"at least {smallest}", f"give {smallest} or more")
