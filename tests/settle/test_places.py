"""Pools and sizes in a config's tables: dropped, and replaced by those of a plan."""

from __future__ import annotations

import pytest

from hybridflow.settle.places import forget_places, replace_places, says_auto


@pytest.mark.parametrize(
    "tables, auto",
    [
        ({"placement": {"name": "auto", "cluster": "a100-80gb:1x8"}}, True),
        ({"placement": {"name": "given"}}, False),
        ({"placement": {"cluster": "a100-80gb:1x8"}}, False),
        ({"placement": "auto"}, False),  # not expanded yet
        ({}, False),
    ],
)
def test_a_placement_is_left_to_a_planner_when_it_is_named_auto(tables, auto):
    assert says_auto(tables) is auto


def given() -> dict:
    return {
        "pools": {"main": [2], "engines": [1]},
        "run": {"pool": "of no meaning here"},
        "actor": {
            "pool": "main",
            "layout": {"tp": 2, "order": "dp-tp-cp-pp"},
            "generation": {"tp": 2, "pool": "engines", "keep": False},
            "micro_batch_tokens": 7,
        },
        "critic": {"layout": {"pp": 1, "tp": 1, "dp": 2, "cp": 1, "ep": 2}},
        "reward": "exact_match",
    }


def test_what_is_forgotten_are_pools_and_sizes_and_nothing_else():
    tables = given()
    forget_places(tables)
    assert tables == {
        "run": {"pool": "of no meaning here"},
        "actor": {
            "layout": {"order": "dp-tp-cp-pp"},
            "generation": {"keep": False},
            "micro_batch_tokens": 7,
        },
        "critic": {},  # its layout had sizes alone
        "reward": "exact_match",
    }


def test_a_pool_of_the_wrong_type_is_forgotten_too():
    tables = {"reward": {"function": "math", "pool": [1]}}
    forget_places(tables)
    assert tables == {"reward": {"function": "math"}}


def test_pools_on_cpus_and_the_rewards_in_them_stay():
    tables = given()
    judges = {"devices": [4], "device": "cpu"}
    tables["pools"]["judges"] = judges
    tables |= {
        "reward": {"function": "math", "pool": "judges"},
        "cost": {"function": "math", "pool": "main"},
    }
    forget_places(tables)
    assert tables["pools"] == {"judges": judges}
    assert (tables["reward"]["pool"], "pool" in tables["cost"]) == ("judges", False)
    replace_places(tables, {"pools": {"main": [4]}, "actor": {"pool": "main"}})
    assert tables["pools"] == {"main": [4], "judges": judges}
    assert tables["reward"]["pool"] == "judges"


def test_a_plan_brings_pools_and_sizes_and_leaves_the_rest():
    tables = given()
    plan = {
        "pools": {"main": [4]},
        "actor": {"pool": "main", "layout": {"tp": 4}, "generation": {"tp": 1}},
        "critic": {"pool": "main", "layout": {"dp": 4}},
        "ref": {"pool": "main", "layout": {"dp": 4}},  # it has no table of its own in the file
    }
    replace_places(tables, plan)
    assert tables["pools"] == {"main": [4]}
    assert tables["actor"]["layout"] == {"order": "dp-tp-cp-pp", "tp": 4}
    assert tables["actor"]["generation"] == {"keep": False, "tp": 1}
    assert tables["actor"]["micro_batch_tokens"] == 7
    assert tables["critic"] == tables["ref"] == {"pool": "main", "layout": {"dp": 4}}
    assert tables["reward"] == "exact_match"


def test_what_is_put_there_is_not_the_plans_own():
    tables = given()
    plan = {"pools": {"main": [4]}, "critic": {"layout": {"dp": 4}}}
    replace_places(tables, plan)
    tables["pools"]["main"].append(9)
    tables["critic"]["layout"]["dp"] = 9
    assert plan == {"pools": {"main": [4]}, "critic": {"layout": {"dp": 4}}}
