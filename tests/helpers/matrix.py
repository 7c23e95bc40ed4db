"""Which cases of a matrix run: by default a slice that has every row and every column, all with `make matrix`."""

from __future__ import annotations

import os

import pytest

EVERY = bool(os.environ.get("HYBRIDFLOW_MATRIX"))
matrix = pytest.mark.skipif(not EVERY, reason="of the whole matrix: make matrix")
