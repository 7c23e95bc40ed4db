"""DataSourceConformance: rows are the same on every access and in every process."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import pytest

from hybridflow.core.contracts.data_source import DataSource
from hybridflow.core.errors import HybridFlowError
from hybridflow.kit.testing.checks import missing_fixture, require, require_raises


class DataSourceConformance:
    """Subclass it and give a fixture `open_source`.

    It is a function () -> a new instance of your DataSource; all instances read the same data.
    """

    rows_read = 50
    """Number of rows that are read at each end of the data."""

    @pytest.fixture
    def open_source(self) -> Callable[[], DataSource]:
        """The author's function that opens the data once more."""
        return missing_fixture(
            self, "open_source", "a function () -> a new instance of your DataSource"
        )

    def _indices(self, source: DataSource) -> list[int]:
        """Return the numbers of the first and the last `rows_read` rows, in order."""
        length = len(source)
        first = range(min(length, self.rows_read))
        last = range(max(0, length - self.rows_read), length)
        return sorted({*first, *last})

    def test_rows_are_dicts_of_json_like_fields(self, open_source):
        """There are rows, and each comes back from JSON as it was."""
        source = open_source()
        require(
            len(source) > 0,
            got="no rows",
            expected="at least one",
            likely="the fixture's data is empty, or len counts files",
        )

        for i in self._indices(source):
            # JSON turns tuples into lists, and keys that are not strings into strings.
            row = source[i]
            written: Any = None
            problem: object = "changed by JSON"
            try:
                written = json.loads(json.dumps(row))
            except (TypeError, ValueError) as error:
                problem = error

            require(
                isinstance(row, dict) and row and written == row,
                got=f"row {i}: {row!r:.200} ({problem})",
                expected="a dict with string keys; numbers, strings, lists, dicts as values",
                likely="numpy or library types: convert them; a row goes into meta and into logs",
            )

    def test_a_row_is_the_same_on_every_access_and_in_another_instance(self, open_source):
        """Neither the order of reading nor an earlier access changes a row."""
        first = open_source()
        second = open_source()
        require(
            len(first) == len(second),
            got=f"{len(first)} and {len(second)} rows of the same data",
            expected="equal lengths",
            likely="rows are sampled or filtered at random",
        )

        indices = self._indices(first)
        forwards = _texts(first, indices)
        backwards = _texts(second, indices[::-1])[::-1]
        again = _texts(first, indices)
        for what, texts in (
            ("read backwards from another instance", backwards),
            ("read again", again),
        ):
            pairs = zip(indices, forwards, texts, strict=True)
            differing = [i for i, before, after in pairs if before != after]

            require(
                not differing,
                got=f"rows {differing[:5]} differ when {what}",
                expected="row i is row i: a resumed run and every rank's process draw by number",
                likely="rows are shuffled or augmented at random, or read one after the other from "
                "a stream",
            )

    def test_changing_a_row_that_was_given_changes_no_later_access(self, open_source):
        """The caller may write into a row: the source keeps its own."""
        source = open_source()
        before = json.dumps(source[0], sort_keys=True)

        row = source[0]
        for key in list(row):
            row[key] = "changed"
        require(
            json.dumps(source[0], sort_keys=True) == before,
            got="a row that keeps what its reader wrote into it",
            expected="a new dict on every access",
            likely="the source gives its own dict; return dict(row)",
        )

    def test_unknown_options_are_refused(self, open_source):
        """An option that the source does not know raises a HybridFlowError."""
        source = open_source()
        options = {**source.config.options, "no_such_option": 1}
        require_raises(
            lambda: type(source)(attrs.evolve(source.config, options=options)),
            HybridFlowError,
            what="an unknown option",
            likely="read data.options with self.read_options(name=default), which refuses unknown "
            "names",
        )


def _texts(source: DataSource, indices: Sequence[int]) -> list[str]:
    """Return the JSON of these rows, read in this order."""
    return [json.dumps(source[i], sort_keys=True) for i in indices]
