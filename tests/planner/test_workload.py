"""What a step asks of its models, and a model as the planner sees it."""

from __future__ import annotations

import attrs
import pytest
from helpers.planned import changed, laid_out, planned

from hybridflow.core.errors import ConfigError
from hybridflow.kit.huggingface.shapes import llama_shape
from hybridflow.planner import Task, Workload

SHAPE = llama_shape(64, 3, 4, 2, 16, 128, 1000)
ACTOR = planned("actor", SHAPE, trained=True, rollout_bytes=2)
CRITIC = planned("critic", SHAPE, head="value")
TASKS = (
    Task("actor", "train", 8, 4),
    Task("actor", "train", 2),
    Task("actor", "infer", 8),
    Task("critic", "infer", 8),
)


def test_tasks_of_a_role_and_verb_are_found():
    workload = Workload(TASKS, 5, 7)
    assert workload.of("actor", "train") == TASKS[:2]
    assert workload.of("critic", "train") == () == workload.of("ref", "infer")
    assert workload.tokens == 12


def test_a_task_has_a_stage_and_something_to_do():
    with pytest.raises(ValueError, match="verb"):
        Task("actor", "think", 8)
    with pytest.raises(ValueError, match="sequences: must be at least 1"):
        Task("actor", "train", 0)


@pytest.mark.parametrize(
    ("tasks", "models", "said"),
    [
        ((Task("cost", "infer", 8),), (ACTOR,), "(models: actor)"),
        ((Task("critic", "train", 8),), (CRITIC,), "trains 'critic', which is frozen"),
        ((), (ACTOR, ACTOR), "two models are called 'actor'"),
        ((), (), "there is no model to place"),
    ],
    ids=["unknown", "frozen", "twice", "none"],
)
def test_a_workload_that_does_not_fit_the_models_is_refused(tasks, models, said):
    with pytest.raises(ConfigError) as caught:
        Workload(tasks, 16, 16).check(models)
    assert said in str(caught.value)


def test_everything_that_does_not_fit_is_told_at_once():
    tasks = (*TASKS, Task("critic", "train", 8), Task("cost", "infer", 8))
    with pytest.raises(ConfigError) as caught:
        Workload(tasks, 16, 16).check((ACTOR, ACTOR, CRITIC))
    assert len(caught.value.problems) == 3
    Workload(TASKS, 16, 16).check((ACTOR, CRITIC))


def test_logits_are_of_the_vocabulary_that_a_rank_has():
    assert (ACTOR.logits_of_a_token(1), ACTOR.logits_of_a_token(4)) == (1000, 250)
    assert CRITIC.logits_of_a_token(1) == 0  # it has one number a token


def test_the_cache_of_a_token_has_a_key_and_a_value_of_each_layer():
    assert ACTOR.cache_bytes == 2 * 3 * (2 * 16) * 2  # 2 key/value heads of 16, 2 bytes each
    assert changed(ACTOR, rollout_bytes=4).cache_bytes == 2 * ACTOR.cache_bytes


def test_the_backend_says_which_layouts_it_takes():
    picky = changed(ACTOR, takes=lambda layout: layout.tp == 2)
    assert picky.takes(laid_out(1, 2, 1)) and not picky.takes(laid_out(1, 1, 2))
    assert ACTOR.takes(laid_out(1, 1, 2))


def test_a_prompt_that_sequences_share_is_computed_once():
    """By hand: 4 prompts of 10 tokens for 16 responses of 20, and as many again without groups."""
    tasks = (
        Task("actor", "generate", 16, prompts=4),
        Task("actor", "train", 16, prompts=4),
        Task("actor", "infer", 16),
    )
    sharing = attrs.evolve(ACTOR, shares_prompts=True)
    alone = Workload(tasks[:2], 10, 20)
    assert alone.prompts_per_sequence == 4 / 16
    assert alone.computed(sharing) == (4 * 10 + 16 * 20) / 16
    # 4 prompts of 10 x 10 / 2 pairs, and 16 responses that see 10 tokens each and half of 20.
    assert alone.attended(sharing) == pytest.approx((4 * 50 + 16 * 20 * 20) / (4 * 10 + 16 * 20))
    assert Workload(tasks, 10, 20).prompts_per_sequence == 20 / 32
    # A backend that does not, and groups of one.
    assert (alone.computed(ACTOR), alone.attended(ACTOR)) == (30, 15)
    single = Workload(tasks[2:], 10, 20)
    assert (single.computed(sharing), single.attended(sharing)) == (30, 15)
    assert alone.shares(sharing)
    assert not alone.shares(ACTOR)
    assert not single.shares(sharing)
