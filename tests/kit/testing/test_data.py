"""Every invariant of DataSourceConformance notices the fault that it is for."""

from __future__ import annotations

import random

import numpy as np
from helpers.expect import caught, each_fault, each_invariant

from hybridflow.core.contracts.data_source import DataConfig, DataSource
from hybridflow.kit.testing import DataSourceConformance

CONFIG = DataConfig(source="rows")


class Rows(DataSource):
    def __init__(self, config: DataConfig = CONFIG):
        super().__init__(config)
        self.read_options()
        self.rows = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(9)]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return dict(self.rows[i])


class Empty(Rows):
    def __len__(self):
        return 0


class NumpyFields(Rows):
    def __getitem__(self, i):
        return {"prompt": "x", "length": np.int64(i)}


class TupleFields(Rows):
    def __getitem__(self, i):
        return {"prompt": "x", "parts": (i, i)}


class NumberedFields(Rows):
    def __getitem__(self, i):
        return {0: "x"}


class NoFields(Rows):
    def __getitem__(self, i):
        return {}


class RandomLength(Rows):
    def __len__(self):
        return random.getrandbits(62)


class Shuffled(Rows):
    def __init__(self, config: DataConfig = CONFIG):
        super().__init__(config)
        random.shuffle(self.rows)


class Streamed(Rows):
    at = -1

    def __getitem__(self, i):
        self.at += 1
        return dict(self.rows[self.at % 9])


class OwnDicts(Rows):
    def __getitem__(self, i):
        return self.rows[i]


class AnyOption(Rows):
    def read_options(self, **defaults):
        return {}


FAULTS = {
    "test_rows_are_dicts_of_json_like_fields": [
        Empty,
        NumpyFields,
        TupleFields,
        NumberedFields,
        NoFields,
    ],
    "test_a_row_is_the_same_on_every_access_and_in_another_instance": [
        RandomLength,
        Shuffled,
        Streamed,
    ],
    "test_changing_a_row_that_was_given_changes_no_later_access": [OwnDicts],
    "test_unknown_options_are_refused": [AnyOption],
}


@each_fault(DataSourceConformance, FAULTS)
def test_the_fault_is_noticed(fault, method):
    caught(DataSourceConformance, method, open_source=fault)


@each_invariant(DataSourceConformance)
def test_a_good_source_passes(method):
    getattr(DataSourceConformance(), method)(Rows)


class LastRowIsBad(Rows):
    """Longer than what is read from one end."""

    def __getitem__(self, i):
        return {"prompt": "x"} if i < 8 else {"prompt": np.int64(i)}


def test_rows_are_looked_at_from_both_ends():
    class Few(DataSourceConformance):
        rows_read = 2

    caught(Few, "test_rows_are_dicts_of_json_like_fields", open_source=LastRowIsBad)
