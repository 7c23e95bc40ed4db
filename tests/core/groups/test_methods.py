"""How a group calls each method of a worker: as `register` was told, and the annotations say."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from hybridflow.core.contracts.protocol import Protocol, RankZero
from hybridflow.core.contracts.worker import Worker, register
from hybridflow.core.errors import PluginError
from hybridflow.core.groups.methods import methods_of
from hybridflow.core.values.batch import Batch

if TYPE_CHECKING:
    from decimal import Decimal


class Base(Worker):
    @register()
    def plain(self, batch: Batch) -> Batch:
        return batch

    @register("ONE_TO_ALL", same_rows=False, reads=("x",), writes=("y",))
    def told(self, batch: Batch) -> float:
        return 0.0

    def unregistered(self) -> Batch: ...


class Derived(Base):
    @register(Protocol.RANK_ZERO, reads=lambda batch, column="x": [column, "z"])
    def told(self, batch: Batch, column: str = "x") -> float:
        return 1.0

    @register(RankZero)
    def unseen(self, batch: Decimal) -> Batch:
        """Its annotations cannot be resolved here."""

    @register()
    def silent(self, batch):
        return batch


def test_only_registered_methods_are_called_each_as_it_was_told():
    found = methods_of(Base)
    assert list(found) == ["plain", "told"]
    plain, told = found["plain"], found["told"]
    assert (plain.protocol, plain.returns_batch, plain.same_rows) == (Protocol.THREE_D, True, True)
    assert (plain.reads, plain.writes) == (None, None)
    assert told.protocol == Protocol.ONE_TO_ALL
    assert not told.returns_batch and not told.same_rows
    assert (told.reads, told.writes) == (("x",), ("y",))


def test_a_derived_class_has_the_methods_of_its_base_and_its_own_on_top():
    found = methods_of(Derived)
    assert list(found) == ["plain", "silent", "told", "unseen"]
    assert found["told"].protocol == Protocol.RANK_ZERO and found["told"].writes is None


def test_annotations_that_cannot_be_resolved_count_as_they_are_written():
    found = methods_of(Derived)
    assert found["unseen"].returns_batch and isinstance(found["unseen"].protocol, RankZero)
    assert not found["silent"].returns_batch


def test_the_columns_to_send_are_all_or_named_or_follow_from_the_call():
    found = methods_of(Derived) | {"base": methods_of(Base)["told"]}
    batch = Batch({})
    assert found["plain"].columns([batch], {}) is None
    assert found["base"].columns([batch], {}) == ("x",)
    assert found["told"].columns([batch], {}) == ["x", "z"]
    assert found["told"].columns([batch], {"column": "y"}) == ["y", "z"]


def test_the_columns_of_a_result_are_promised_where_the_call_tells_them():
    class Tells(Worker):
        @register(writes=lambda batch, column: [column])
        def score(self, batch: Batch, column: str) -> Batch: ...

    batch = Batch({})
    assert methods_of(Tells)["score"].promised([batch], {"column": "s"}) == ("s",)
    assert methods_of(Base)["told"].promised([batch], {}) == ("y",)
    assert methods_of(Base)["plain"].promised([batch], {}) is None


def test_a_protocol_that_is_not_there_is_named_when_the_group_is_made():
    class Wrong(Worker):
        @register("THREE_DD")
        def nothing(self) -> None: ...

    with pytest.raises(PluginError, match="unknown protocol 'THREE_DD'"):
        methods_of(Wrong)
