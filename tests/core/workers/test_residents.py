from __future__ import annotations

import pytest

from hybridflow.core.workers.residents import Residents


class Moving:
    """A backend that says what moves: +w, +o in, -w, -o out."""

    def __init__(self, name: str, told: list[str]):
        self.name, self.told = name, told

    def offload(self, parts=("weights", "optimizer")):
        self.told += [f"{self.name} -{part[0]}" for part in parts]

    def onload(self, parts=("weights", "optimizer")):
        self.told += [f"{self.name} +{part[0]}" for part in parts]


@pytest.fixture
def told():
    return []


@pytest.fixture
def residents(told):
    made = Residents()
    for name in ("actor", "ref"):
        made.join(name, Moving(name, told))
    assert told == ["actor -w", "actor -o", "ref -w", "ref -o"]
    told.clear()
    return made


def test_what_a_role_does_in_a_row_moves_once(residents, told):
    residents.enter("actor", ["weights"])
    for _ in range(3):
        residents.enter("actor", ["weights", "optimizer"])
    assert told == ["actor +w", "actor +o"]


def test_others_leave_and_come_back_by_what_is_needed(residents, told):
    residents.enter("actor", ["weights", "optimizer"])
    residents.enter("ref", ["weights"])
    residents.enter("actor", ["weights"])
    assert told == ["actor +w", "actor +o", "actor -w", "actor -o", "ref +w", "ref -w", "actor +w"]


def test_a_role_that_stays_makes_the_others_leave(residents, told):
    residents.enter("ref", ["weights"])
    residents.enter("critic", ["weights", "optimizer"])
    assert told == ["ref +w", "ref -w"]


def test_a_sync_wants_the_weights_alone(residents, told):
    residents.enter("actor", ["weights", "optimizer"])
    residents.enter("actor", ["weights"], alone=True)
    residents.clear()
    residents.clear()
    assert told == ["actor +w", "actor +o", "actor -o", "actor -w"]


def test_a_closed_role_moves_no_more(residents, told):
    residents.enter("actor", ["weights"])
    residents.part("actor")
    residents.part("actor")
    residents.enter("ref", ["weights"])
    assert told == ["actor +w", "ref +w"]
