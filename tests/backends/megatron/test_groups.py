"""A role's process groups are made of its own layout."""

from __future__ import annotations

import pytest
from helpers.megatron_jobs import groups_of

from hybridflow.core.values.parallel import ParallelLayout

pytest.importorskip("megatron.core")

NAMES = ("tp", "pp", "dp", "mp", "cp", "embd", "pos_embd", "intra_dist_opt", "dp_cp", "ep")


def test_ranks_of_two_pipelines_of_two_tensor_parallel_ranks(ranks):
    found = ranks(groups_of, 4, ParallelLayout(tp=2, pp=2), NAMES)
    assert [own["tp"] for own in found] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [own["pp"] for own in found] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    for rank, own in enumerate(found):
        assert own["mp"] == own["intra_dist_opt"] == [0, 1, 2, 3]
        assert own["embd"] == own["pp"]  # its ends are all of it
        assert all(own[name] == [rank] for name in ("dp", "dp_cp", "cp", "ep", "pos_embd"))


def test_the_ends_of_a_pipeline_share_the_embedding_and_the_stages_between_do_not(ranks):
    found = ranks(groups_of, 4, ParallelLayout(pp=4), NAMES)
    assert [own["embd"] for own in found] == [[0, 3], [1], [2], [0, 3]]
    assert all(own["pp"] == own["mp"] == [0, 1, 2, 3] for own in found)


def test_the_order_of_the_layout_is_that_of_the_groups(ranks):
    found = ranks(groups_of, 4, ParallelLayout(tp=2, dp=2, order="dp-tp-cp-pp"), NAMES)
    assert [own["dp"] for own in found] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [own["tp"] for own in found] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert all(own["embd"] == [rank] for rank, own in enumerate(found))


def test_one_rank_is_alone_in_every_group(ranks):
    [own] = ranks(groups_of, 1, ParallelLayout(), NAMES)
    assert set(map(tuple, own.values())) == {(0,)}
