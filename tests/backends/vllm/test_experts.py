"""A mixture of experts through vLLM: its process makes groups of ranks that a dense model's lacks."""

from __future__ import annotations

from helpers import engine_jobs as jobs
from helpers.installed import needs
from helpers.paths import matrix
from helpers.vllm_boxes import check_boxes


@matrix  # test_planned.py asks the loader for the same boxes
@needs("vllm")
def test_each_rank_takes_its_part_of_every_expert(ranks):
    ranks.renew(2)
    check_boxes(ranks, "qwen3_moe", {})


@needs("vllm")
def test_experts_speak_as_hugging_face_on_two_ranks(ranks):
    found = jobs.two_ranks(ranks, jobs.vllm, "qwen3_moe")
    assert [answer["left"] for answer in found] == [[], []]
