"""What a step asks of its models, from the step itself."""

from __future__ import annotations

import attrs
import pytest

from hybridflow.core.contracts.algorithm import Algorithm
from hybridflow.core.contracts.role import Role
from hybridflow.core.plugins import registry
from hybridflow.planner import trace
from hybridflow.planner.calibration.probes import Likelihood
from hybridflow.planner.trace import TraceError, read_early, trace_step


class Filtered(Algorithm):
    """Scores responses whose mask its own work has made, and reads the scores."""

    Config = None

    def roles(self):
        return (Role("actor", trained=True, generates=True), Role("reward", "reward"))

    def step(self, ctx):
        batch = ctx.actor.generate(ctx.prompts(4))
        masked = batch.join(ctx.compute(lambda loss_mask: {"loss_mask": 0 * loss_mask}, batch))
        assert ctx.reward.score(masked)["scores"].rows == 4


class Asks(Algorithm):
    """Asks about its prompts in its own words, and reads what is answered."""

    Config = None

    def roles(self):
        return (Role("actor", trained=True, generates=True),)

    def step(self, ctx):
        asked = ctx.encode([f"{text}?" for text in ctx.decode(ctx.prompts(6), "prompt_ids")])
        assert len(ctx.decode(ctx.actor.generate(asked))) == 6


def calls(name: str, **settings) -> dict[tuple[str, str], tuple[int, int]]:
    found = registry().get("algorithm", name)
    return {
        (t.role, t.verb): (t.sequences, t.times)
        for t in trace_step(found(found.Config(**settings)))
    }


def test_ppo_generates_once_reads_with_four_models_and_trains_two():
    assert calls("ppo", prompts_per_step=64, mini_batch_size=16, epochs=2, kl_coef=0.1) == {
        ("actor", "generate"): (64, 1),
        ("reward", "infer"): (64, 1),
        ("ref", "infer"): (64, 1),
        ("actor", "infer"): (64, 1),
        ("critic", "infer"): (64, 1),
        ("actor", "train"): (16, 8),
        ("critic", "train"): (16, 8),
    }


def test_remax_generates_twice_and_grpo_has_no_critic():
    assert calls("remax", prompts_per_step=32)["actor", "generate"] == (32, 2)
    grpo = calls("grpo", prompts_per_step=8, group_size=4)
    assert grpo == {
        ("actor", "generate"): (32, 1),
        ("reward", "infer"): (32, 1),
        ("actor", "train"): (32, 1),
    }


def test_what_a_page_reads_of_its_own_turn_is_found():
    def early(name: str, *beside: str, **settings) -> tuple[str, ...]:
        found = registry().get("algorithm", name)
        trained = {"actor", "critic", "cost_critic", "ref", "compute", *beside}
        return read_early(found(found.Config(**settings)), trained)

    group = {"prompts_per_step": 8, "group_size": 4}
    assert early("grpo", "reward", "data", **group) == ()
    assert early("grpo", kl_coef=0.1, kl_target=0.1, **group) == ("compute",)
    assert early("dapo", **group) == () and early("dapo", "reward", **group) == ("reward.score",)
    assert early("safe_rlhf", "reward", "cost", prompts_per_step=8) == ("cost.score",)


def test_a_call_elsewhere_waits_with_the_results_that_it_needs():
    assert read_early(Filtered(None), {"compute"}) == ("reward.score",)
    assert read_early(Filtered(None), ()) == ()


def test_texts_are_written_and_read():
    [task] = trace_step(Asks(None))
    assert (task.role, task.verb, task.sequences, task.prompts) == ("actor", "generate", 6, None)
    assert read_early(Asks(None), {"actor", "data"}) == ()


def test_rows_of_a_group_have_one_prompt():
    found = registry().get("algorithm", "grpo")
    tasks = trace_step(found(found.Config(prompts_per_step=8, group_size=4)))
    assert {t.verb: t.prompts for t in tasks} == {"generate": 8, "infer": 8, "train": 8}
    found = registry().get("algorithm", "ppo")
    assert {t.prompts for t in trace_step(found(found.Config(prompts_per_step=8)))} == {None}


def test_safe_rlhf_has_six_models():
    found = calls("safe_rlhf", prompts_per_step=64)
    assert {role for role, _ in found} == {
        "actor",
        "critic",
        "cost_critic",
        "ref",
        "reward",
        "cost",
    }


def test_an_unequal_last_mini_batch_is_a_task_of_its_own():
    found = registry().get("algorithm", "ppo")
    tasks = trace_step(found(found.Config(prompts_per_step=40, mini_batch_size=16)))
    assert [(t.sequences, t.times) for t in tasks if (t.role, t.verb) == ("actor", "train")] == [
        (16, 2),
        (8, 1),
    ]


@pytest.mark.parametrize("name", registry().names("algorithm"))
def test_every_algorithm_can_be_followed(name):
    found = registry().get("algorithm", name)
    algorithm = found(found.Config())
    tasks = trace_step(algorithm)
    trained = {r.name for r in algorithm.roles() if r.trained}
    assert {t.role for t in tasks if t.verb == "train"} == trained
    assert {t.role for t in tasks} == {r.name for r in algorithm.roles()}
    updates = algorithm.updates_per_step()
    role = "actor" if "actor" in trained else next(iter(trained))
    if updates is not None:
        assert sum(t.times for t in tasks if (t.role, t.verb) == (role, "train")) == updates


class Waits(Algorithm):
    """Waits for what its calls report, as a step may."""

    Config = attrs.make_class("Config", [])

    def roles(self):
        return (Role("actor", trained=True, generates=True),)

    def step(self, ctx):
        batch = ctx.actor.generate(ctx.prompts(4))
        before = ctx.actor.loss(batch, Likelihood()).result()
        after = ctx.actor.update((batch, Likelihood())).result()
        ctx.log(**before.values(), **after.values())
        ctx.actor.sync().result()


def test_a_step_may_wait_for_what_its_calls_report():
    tasks = {(t.verb, t.sequences, t.times) for t in trace_step(Waits(None))}
    assert tasks == {("generate", 4, 1), ("infer", 4, 1), ("train", 4, 1)}


class Odd(Algorithm):
    """Its step looks at what only a real run has."""

    Config = attrs.make_class("Config", [])

    def roles(self):
        return (Role("actor", trained=True, generates=True),)

    def step(self, ctx):
        batch = ctx.actor.generate(ctx.prompts(4))
        assert batch["meta"].values[0]["answer"] == "4"


def test_a_step_that_cannot_be_followed_says_why():
    with pytest.raises(
        TraceError,
        match=r"Odd\.step .* KeyError: 'answer'",
    ):
        trace_step(Odd(None))


class Endless(Odd):
    """It waits for a score that nobody makes up."""

    def step(self, ctx):
        score = 0.0
        while score < 2.0:
            ctx.actor.generate(ctx.prompts(4))


class Debugged(Odd):
    def step(self, ctx):
        print("shown in the run alone")
        breakpoint()
        ctx.actor.generate(ctx.prompts(4))


def test_a_step_without_an_end_is_given_up(monkeypatch):
    monkeypatch.setattr(trace, "MOST_CALLS", 1_500)
    with pytest.raises(TraceError, match="1,500 calls"):
        trace_step(Endless(None))


def test_a_step_prints_nothing_and_stops_for_no_debugger(capsys):
    [task] = trace_step(Debugged(None))
    assert (task.role, task.sequences) == ("actor", 4)
    assert capsys.readouterr().out == ""
