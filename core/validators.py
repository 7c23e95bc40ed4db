"""Validators of attrs fields, as in attrs.field(default=1.0, validator=positive).

Each raises ValueError with the field, the condition, the actual value, and a remedy. None always
passes, for fields of type X | None.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs

Validator = Callable[[Any, attrs.Attribute, Any], None]


def validator(accepts: Callable[[Any], bool], must: str, advice: str) -> Validator:
    """Make a validator that takes None and the values that `accepts` takes.

    `must` and `advice` are parts of its message: the condition, and the remedy.
    """

    def validate(instance: Any, attribute: attrs.Attribute, value: Any) -> None:
        # No validator here accepts NaN, because every comparison with it is false.
        if value is not None and not accepts(value):
            raise ValueError(f"{attribute.name}: must be {must}, got {value!r}; {advice}")

    return validate


# Ranges that many settings share.

positive: Validator = validator(lambda value: value > 0, "above 0", "give a number above 0")
"""Takes value > 0."""

non_negative: Validator = validator(
    lambda value: value >= 0, "0 or more", "give 0 to turn it off, or a positive number"
)
"""Takes value >= 0."""

fraction: Validator = validator(
    lambda value: 0 < value <= 1, "above 0 and at most 1", "give a fraction, 1 for all"
)
"""Takes 0 < value <= 1."""

share: Validator = validator(
    lambda value: 0 <= value <= 1, "from 0 to 1", "give 0 to turn it off, or a fraction"
)
"""Takes 0 <= value <= 1."""


FOLDER_NAME = "a folder's name: 1 to 200 bytes, without / and \\, not beginning with a dot"
"""What `is_folder_name` demands, in words."""


def is_folder_name(name: str) -> bool:
    """Return whether a text names one folder, and cannot lead out of the one around it."""
    # A hidden file such as .lock is not to be met by it; file systems take 255 bytes.
    return (
        0 < len(name.encode(errors="replace")) <= 200
        and name.isprintable()
        and not name.startswith(".")
        and not set(name) & set("/\\")
    )


folder_name: Validator = validator(
    is_folder_name,
    FOLDER_NAME,
    "give another name, such as sums-2 (the folder around it is run.folder)",
)
"""Takes the names that `is_folder_name` does."""


def at_least(smallest: float) -> Validator:
    """Make a validator that takes value >= smallest."""
    return validator(
        lambda value: value >= smallest, f"at least {smallest}", f"give {smallest} or more"
    )


INFINITE = "infinite"
"""Key in the metadata of a field that takes inf; settings of all others are finite."""


def setting(default: Any, validator: Validator, infinite: bool = False) -> Any:
    """Make a field with a default and a validator; `infinite`: whether it takes inf."""
    return attrs.field(default=default, validator=validator, metadata={INFINITE: infinite})
