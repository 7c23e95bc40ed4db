"""Packed rows give every loss of every algorithm the figures and gradients of padded ones."""

from __future__ import annotations

import pytest
from helpers.faulty_backends import builder
from helpers.packed_rows import LOSSES, same_packed_and_padded


@pytest.mark.parametrize("name", LOSSES)
def test_packed_rows_train_as_padded_ones(name):
    with builder() as build:
        same_packed_and_padded(build, LOSSES[name])
