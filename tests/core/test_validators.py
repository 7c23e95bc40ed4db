"""Validators accept what they say, and name the field, what it must be, what was got and what to do."""

from __future__ import annotations

import attrs
import pytest

from hybridflow.core.validators import at_least, fraction, non_negative, positive, share, validator

NAN = float("nan")
INF = float("inf")


@pytest.mark.parametrize(
    "check, must, good, bad",
    [
        (positive, "above 0", [1, 1e-9, INF, None], [0, -1, NAN]),
        (non_negative, "0 or more", [0, 1, None], [-1, NAN]),
        (fraction, "above 0 and at most 1", [1e-9, 1, None], [0, 1.01, NAN]),
        (share, "from 0 to 1", [0, 0.5, 1, None], [-0.01, 1.01, NAN]),
        (at_least(2), "at least 2", [2, 3, None], [1, NAN]),
    ],
    ids=["positive", "non_negative", "fraction", "share", "at_least"],
)
def test_a_validator_names_the_field_what_it_must_be_what_was_got_and_what_to_do(
    check, must, good, bad
):
    cls = attrs.make_class("Made", {"size": attrs.field(validator=check)}, frozen=True)
    for value in good:
        assert cls(value).size is value
    for value in bad:
        with pytest.raises(ValueError, match=rf"^size: must be {must}, got {value}; give "):
            cls(value)


def test_one_of_ones_own_is_a_condition_and_words():
    even = validator(lambda value: value % 2 == 0, "even", "give a multiple of 2")
    cls = attrs.make_class("Made", {"size": attrs.field(validator=even)})
    assert cls(4).size == 4
    assert cls(None).size is None
    with pytest.raises(ValueError, match=r"^size: must be even, got 3; give a multiple of 2$"):
        cls(3)
