"""Validators of attrs fields: attrs.field(default=1.0, validator=positive). None passes, for fields of type X | None.

Each raises ValueError with the field, what it must be, what was got, and what to do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs

Validator = Callable[[Any, attrs.Attribute, Any], None]


def validator(accepts: Callable[[Any], bool], must: str, advice: str) -> Validator:
    """One that takes None and what `accepts` says; `must` and `advice` are for its message."""

    def validate(instance: Any, attribute: attrs.Attribute, value: Any) -> None:
        if value is not None and not accepts(
            value
        ):  # a NaN is accepted by none: comparisons with it are false
            raise ValueError(f"{attribute.name}: must be {must}, got {value!r}; {advice}")

    return validate


positive: Validator = validator(lambda value: value > 0, "above 0", "give a number above 0")
"""value > 0."""

non_negative: Validator = validator(
    lambda value: value >= 0, "0 or more", "give 0 to turn it off, or a positive number"
)
"""value >= 0."""

fraction: Validator = validator(
    lambda value: 0 < value <= 1, "above 0 and at most 1", "give a fraction, 1 for all"
)
"""0 < value <= 1."""

share: Validator = validator(
    lambda value: 0 <= value <= 1, "from 0 to 1", "give 0 to turn it off, or a fraction"
)
"""0 <= value <= 1."""


def at_least(smallest: float) -> Validator:
    """value >= smallest."""
    return validator(
        lambda value: value >= smallest, f"at least {smallest}", f"give {smallest} or more"
    )
