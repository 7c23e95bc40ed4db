"""Answers of a child process, and the layout that they make."""

from __future__ import annotations

import sys

import pytest
import torch

from hybridflow.core.errors import ModelError
from hybridflow.core.values.parallel import ParallelLayout, generation_layout
from hybridflow.core.values.weights import Box
from hybridflow.kit import planned
from hybridflow.kit.planned import TracedRanks, ask_child

CHILD = """
import os, pathlib, sys
from hybridflow.kit.planned import TracedRanks, answer
pathlib.Path({log!r}).open("a").write("asked ")
def ask(rows):
    if rows == 0:
        raise ValueError("no rows, no model")
    if rows < 0:
        print("it has died", file=sys.stderr)
        os._exit(3)
    return TracedRanks({{"w": (rows,)}}, {{}}, (), {{}})
answer(ask)
"""


@pytest.fixture
def child(tmp_path, monkeypatch):
    log = tmp_path / "log"
    (tmp_path / "loader_child.py").write_text(CHILD.format(log=str(log)))
    monkeypatch.setenv("PYTHONPATH", ":".join([str(tmp_path), *filter(None, sys.path)]))
    monkeypatch.setattr(planned, "_answers", {})
    return log


def test_a_child_is_asked_once_for_equal_requests(child):
    for rows in (4, 4, 5):
        assert ask_child("loader_child", "engine", {"rows": rows}).shapes == {"w": (rows,)}
    assert child.read_text() == "asked asked "


def test_a_childs_error_and_its_death_are_told(child):
    with pytest.raises(ModelError, match=r"engine does not take.*ValueError: no rows, no model"):
        ask_child("loader_child", "engine", {"rows": 0})
    with pytest.raises(ModelError, match="exit status 3: it has died"):
        ask_child("loader_child", "engine", {"rows": -1})


def test_ranks_of_one_place_take_the_same_boxes_in_every_replica():
    top, bottom = Box((0, 0), (2, 4)), Box((2, 0), (4, 4))
    ranks = TracedRanks({"w": (4, 4)}, {}, ({"w": (top,)}, {"w": (bottom,)}), {})
    layout = ranks.layout(
        generation_layout(ParallelLayout(tp=4), tp=2, grouping="zero-redundancy"), torch.float32
    )
    # Groups [0, 2] and [1, 3].
    assert {rank: held["w"] for rank, held in layout.held.items()} == {
        0: (top,),
        1: (top,),
        2: (bottom,),
        3: (bottom,),
    }
    assert layout.nbytes(3) == 2 * 4 * 4
    assert ranks.shape().params() == ranks.params(torch.bfloat16)
