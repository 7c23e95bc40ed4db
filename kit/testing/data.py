"""DataSourceConformance: a finite sequence of rows that are the same on every access and in every process."""

from __future__ import annotations

import json
from collections.abc import Callable

import attrs
import pytest

from hybridflow.core.contracts.data_source import DataSource
from hybridflow.core.errors import HybridFlowError
from hybridflow.kit.testing.checks import missing_fixture, require, require_raises


class DataSourceConformance:
    """Give a fixture `open_source`: a function () -> a new instance of your DataSource on the same data."""

    rows_read = 50
    """Rows that are looked at, from both ends."""

    @pytest.fixture
    def open_source(self) -> Callable[[], DataSource]:
        return missing_fixture(
            self, "open_source", "a function () -> a new instance of your DataSource"
        )

    def _indices(self, source: DataSource) -> list[int]:
        n = len(source)
        return sorted({*range(min(n, self.rows_read)), *range(max(0, n - self.rows_read), n)})

    def test_rows_are_dicts_of_json_like_fields(self, open_source):
        source = open_source()
        require(
            len(source) > 0,
            got="no rows",
            expected="at least one",
            likely="the fixture's data is empty, or len counts files",
        )
        for i in self._indices(source):
            row = source[i]
            try:
                written = json.loads(json.dumps(row))
            except (TypeError, ValueError) as error:
                written = error
            require(
                isinstance(row, dict) and row and written == row,
                got=f"row {i}: {row!r:.200} ({written if isinstance(written, Exception) else 'changed by JSON'})",
                expected="a dict with string keys; numbers, strings, lists, dicts as values",
                likely="numpy or library types: convert them; a row goes into meta and into logs",
            )

    def test_a_row_is_the_same_on_every_access_and_in_another_instance(self, open_source):
        first, second = open_source(), open_source()
        require(
            len(first) == len(second),
            got=f"{len(first)} and {len(second)} rows of the same data",
            expected="equal lengths",
            likely="rows are sampled or filtered at random",
        )
        indices = self._indices(first)
        forwards = [json.dumps(first[i], sort_keys=True) for i in indices]
        backwards = [json.dumps(second[i], sort_keys=True) for i in reversed(indices)][::-1]
        again = [json.dumps(first[i], sort_keys=True) for i in indices]
        for what, found in (
            ("read backwards from another instance", backwards),
            ("read again", again),
        ):
            differing = [i for i, a, b in zip(indices, forwards, found, strict=True) if a != b]
            require(
                not differing,
                got=f"rows {differing[:5]} differ when {what}",
                expected="row i is row i: a resumed run and every rank's process draw by number",
                likely="rows are shuffled or augmented at random, or read one after the other from a stream",
            )

    def test_changing_a_row_that_was_given_changes_no_later_access(self, open_source):
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
        source = open_source()
        options = {**source.config.options, "no_such_option": 1}
        require_raises(
            lambda: type(source)(attrs.evolve(source.config, options=options)),
            HybridFlowError,
            what="an unknown option",
            likely="read data.options with self.read_options(name=default), which refuses unknown names",
        )
