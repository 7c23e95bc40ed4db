"""Steps that are generated ahead: their order, their bits, and what ends a run that breaks either."""

from __future__ import annotations

import contextlib

import pytest
from helpers.driven import Driven

from hybridflow.algorithms.grpo import GRPO as GRPOPage, GRPOConfig
from hybridflow.core.errors import HybridFlowError, MismatchError, WorkerError
from hybridflow.core.running.pages import Pages
from hybridflow.core.running.run import Run
from hybridflow.core.values.batch import Batch
from hybridflow.core.values.weights import Box
from hybridflow.kit.testing.runs import TinyRun

GRPO = {
    "name": "grpo",
    "prompts_per_step": 8,
    "group_size": 4,
    "mini_batch_size": 16,
    "correction": "truncate",
}
APART = {"pools": {"main": [1], "engines": [1]}, "actor": {"generation": {"pool": "engines"}}}
ALGORITHMS = {
    name: {**GRPO, "name": name, "mini_batch_size": 0, **more}
    for name, more in {
        "cispo": {},
        "dapo": {},
        "dr_grpo": {},
        "gspo": {},
        "ppo": {"group_size": 1},
        "reinforce_pp": {},
        "reinforce_pp_baseline": {},
        "remax": {"group_size": 1},
        "rloo": {},
        "safe_rlhf": {"group_size": 1},
    }.items()
}
COST = {"cost": {"function": "hybridflow.kit.testing.runs:even_tokens"}}


def tiny(algorithm, staleness=1, **tables) -> TinyRun:
    run = {"max_staleness": staleness, "samples": 1000, **tables.pop("run", {})}
    return TinyRun(algorithm, {**APART, "run": run, **tables})


def lags(driven: Driven) -> list[float]:
    found = [metrics["actor/staleness"] for metrics in driven.metrics]
    assert found == [metrics["actor/staleness_max"] for metrics in driven.metrics]
    return found


def plain_loop(tables, steps: int) -> dict[str, str]:
    """Train a page by one copy of the weights while the engines' copy has generated the next."""
    with tiny(tables) as run:
        ctx, algorithm, [rollout] = run.ctx, run.algorithm, run.session.rollouts.values()
        config = algorithm.config
        rollout.ahead = True

        def generated():
            prompts = ctx.prompts(config.prompts_per_step)
            return ctx.actor.generate(prompts.repeat(config.group_size))

        rollout.sync()
        page, ahead = generated(), generated()
        for step in range(1, steps + 1):
            losses = algorithm.losses()
            batch = page.join(ctx.reward.score(page), ctx.actor.logprobs(page))
            if config.kl_coef:
                batch = batch.join(ctx.ref.logprobs(page))
            advantages = ctx.compute(algorithm.advantages, batch)
            for mini in algorithm.minibatches(ctx, batch.join(advantages)):
                ctx.actor.update((mini, losses["actor"]))
            algorithm.kl.follow(advantages, batch.rows)
            ctx.finish()
            rollout.sync()
            page = ahead
            if step + 2 <= steps:
                ahead = generated()
        return run.checksums()


def test_thirty_steps_equal_a_plain_loop_with_two_copies_of_the_weights():
    with tiny(GRPO) as run:
        driven = Driven(run, steps=30)
        assert run.checksums() == plain_loop(GRPO, steps=30)
    assert lags(driven) == [0.0] + [1.0] * 29 and driven.said == []


def test_a_step_tells_how_far_the_policy_has_moved_since():
    with tiny({**GRPO, "mini_batch_size": 0}, sampling={"max_tokens": 4}) as run:
        driven = Driven(run, steps=3)
    first, *later = driven.metrics
    assert "actor/lag1_kl" not in first and abs(first["actor/lag0_kl"]) < 1e-6
    assert first["actor/ess"] == pytest.approx(1.0, abs=1e-5)
    for metrics in later:
        assert "actor/lag0_kl" not in metrics and metrics["actor/lag1_kl"] > 1e-6
        assert 0.5 < metrics["actor/ess"] < 1.0 and "importance_weight_square" not in str(metrics)
        # The probes of the weights that trained
        assert 0 < metrics["actor/mismatch_mean"] < 1e-5


def test_an_engine_that_speaks_with_other_weights_ends_the_run_before_an_update(monkeypatch):
    with tiny(GRPO) as run:
        engine = run.session.pools["engines"].processes[0].host.workers["actor.rollout"].engine
        end_update = engine.end_update

        def ends_otherwise():
            end_update()
            if engine.version == 4:  # after step 2
                name = "model.layers.0.self_attn.o_proj.weight"
                box = Box.full(engine.layout().params[name].shape)
                engine.view(name, box).mul_(1.5)

        monkeypatch.setattr(engine, "end_update", ends_otherwise)
        with pytest.raises(MismatchError, match="64 tokens made by the weights after step 2"):
            Driven(run, steps=4)
        assert run.session.groups["actor"][1].version().result() == 4


def test_without_staleness_a_run_is_its_steps_one_after_the_other():
    with tiny(GRPO, staleness=0) as run:
        driven = Driven(run, steps=4)
        taken = run.checksums()
    with tiny(GRPO, staleness=0) as run:
        for _ in range(4):
            run.step()
        assert run.checksums() == taken
    assert "actor/staleness" not in driven.metrics[0]


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_that_generates_runs_a_step_ahead_and_repeats(name):
    tables = COST if name == "safe_rlhf" else {}
    sums = []
    for _ in range(2):
        with tiny(ALGORITHMS[name], **tables) as run:
            driven = Driven(run, steps=3)
            sums.append(run.checksums())
        assert lags(driven) == [0.0, 1.0, 1.0] and driven.said == []
    assert sums[0] == sums[1]


def test_every_drawn_row_is_trained_in_one_step_once():
    with tiny({**GRPO, "mini_batch_size": 0}) as run:
        driven = Driven(run, steps=5)
        state = run.session.data.state().result()["train"]
    groups = [[row["group"] for row in rows] for rows in driven.rows]
    assert groups == [[step * 8 + at // 4 for at in range(32)] for step in range(5)]
    assert state["position"] == 40


def test_a_page_that_reads_its_own_turn_is_told_of_and_repeats_the_plain_loop():
    adaptive = {**GRPO, "kl_coef": 0.1, "kl_target": 0.1, "kl_horizon": 200.0}
    with tiny(adaptive) as run:
        driven = Driven(run, steps=6)
        assert run.checksums() == plain_loop(adaptive, steps=6)
    assert lags(driven) == [0.0] + [1.0] * 5
    [said] = driven.said
    assert said.startswith("step 2 waited ") and "for ctx.compute, whose result it reads" in said
    waits = ["turn_wait_seconds" in metrics for metrics in driven.metrics]
    assert waits == [False] + [True] * 5


def test_what_is_drawn_after_the_turn_is_of_the_present_weights():
    # With the reward beside the trainer, DAPO's draws after the first wait for its scores.
    hard = {**GRPO, "name": "dapo", "group_size": 2, "mini_batch_size": 0, "max_draws": 3}
    with tiny(hard, reward={"pool": "main"}) as run:
        driven = Driven(run, steps=4)
    draws = [metrics["draws"] for metrics in driven.metrics]
    means = [metrics["actor/staleness"] for metrics in driven.metrics]
    assert max(draws[1:]) > 1 and means[0] == 0.0
    for drawn, mean, metrics in zip(draws[1:], means[1:], driven.metrics[1:], strict=True):
        assert metrics["actor/staleness_max"] == 1.0
        assert mean == 1.0 if drawn == 1 else 0.0 < mean < 1.0
    assert any("ctx.reward.score" in said for said in driven.said)


class Twice(GRPOPage):
    """Reads what it has generated, and generates again before it trains."""

    def step(self, ctx):
        asked = ctx.actor.generate(ctx.prompts(4))
        assert len(ctx.decode(asked)) == 4
        super().step(ctx)


def test_what_is_generated_after_the_turn_is_waited_for_where_engines_never_stop():
    found = []
    for _ in range(2):
        config = GRPOConfig(prompts_per_step=4, group_size=4, correction="truncate")
        with tiny(Twice(config), staleness=2) as run:
            driven = Driven(run, steps=4)
            found.append(run.checksums())
        assert len(driven.metrics) == 4
    assert found[0] == found[1]


def test_validation_between_steps_changes_nothing(tmp_path):
    def validated(run: Run) -> bool:
        ahead = run.ctx.counters["samples"]
        prompts = run.session.rows("train", 0, 4).select(["prompt_ids", "group", "meta"])
        counters = dict(run.ctx.counters)
        batch = run.ctx.actor.generate(prompts, greedy=True)
        assert set(batch["weight_version"].values.tolist()) == {2 * run.step}  # two updates a step
        run.ctx.finish()
        run.ctx.counters.update(counters)
        assert run.ctx.counters["samples"] == ahead
        return True

    with tiny(GRPO) as run:
        Driven(run, steps=4, at_end=validated)
        sums = run.checksums()
    with tiny(GRPO) as run:
        Driven(run, steps=4)
        assert run.checksums() == sums


def test_a_run_that_ends_early_leaves_the_page_ahead_unwritten():
    with tiny(GRPO) as run:
        driven = Driven(run, steps=9, at_end=lambda run: run.step < 3)
        sums, before = run.checksums(), driven.pages.before()
    with tiny(GRPO) as run:
        Driven(run, steps=3)
        assert run.checksums() == sums
        state = run.session.data.state().result()
        assert before.data == state and before.counters == run.ctx.counters
    assert driven.run.step == 3


def test_an_error_of_a_page_that_the_run_does_not_have_is_none(monkeypatch):
    with tiny(GRPO) as run:
        step = type(run.algorithm).step

        def third_breaks(self, ctx):
            if ctx.step == 3:
                raise Breaks
            step(self, ctx)

        monkeypatch.setattr(type(run.algorithm), "step", third_breaks)
        assert Driven(run, steps=5, at_end=lambda run: run.step < 2).run.step == 2


class Breaks(Exception):
    """An error of a page."""


def test_an_error_of_the_page_ahead_comes_at_its_turn(monkeypatch):
    with tiny(GRPO) as run:
        step = run.algorithm.step

        def third_breaks(ctx):
            step(ctx)
            if ctx.step == 3:
                raise Breaks

        monkeypatch.setattr(run.algorithm, "step", third_breaks)
        ended = []
        with pytest.raises(Breaks):
            Driven(run, steps=5, at_end=lambda run: ended.append(run.step) or True)
        assert ended == [1, 2]
        assert run.session.groups["actor"][1].version().result() == 4


def test_a_failed_generation_of_the_page_ahead_comes_when_the_page_before_is_complete(monkeypatch):
    with tiny(GRPO) as run:
        worker = run.session.pools["engines"].processes[0].host.workers["actor.rollout"]
        generate = worker.generate
        calls = []

        def third_fails(batch, sampling, seed):
            calls.append(batch.rows)
            if batch.rows == 32 and calls.count(32) == 3:  # the others are probes
                raise ValueError("no more")
            return generate(batch, sampling, seed)

        monkeypatch.setattr(worker, "generate", third_fails)
        ended = []
        with pytest.raises(WorkerError, match="no more"):
            Driven(run, steps=5, at_end=lambda run: ended.append(run.step) or True)
        assert ended == [1, 2]


def step_of(run: TinyRun, monkeypatch, more) -> None:
    """Let the algorithm's step do more at its end."""
    step = type(run.algorithm).step

    def longer(self, ctx):
        step(self, ctx)
        more(ctx)

    monkeypatch.setattr(type(run.algorithm), "step", longer)


def test_a_sync_waits_for_the_turn_and_leaves_the_order_of_weights(monkeypatch):
    with tiny(GRPO) as run:
        step_of(run, monkeypatch, lambda ctx: ctx.actor.sync().result())
        driven = Driven(run, steps=4)
        sums = run.checksums()
    assert lags(driven) == [0.0, 1.0, 1.0, 1.0]
    with tiny(GRPO) as run:
        Driven(run, steps=4)
        assert run.checksums() == sums


def test_an_update_aside_counts_as_one(monkeypatch):
    def trains_aside(ctx):
        with ctx.aside():
            batch = ctx.actor.generate(ctx.prompts(4))
            advantages = batch.join(ctx.compute(lambda loss_mask: {"advantages": loss_mask}, batch))
            loss = run.algorithm.losses()["actor"]
            ctx.actor.update((advantages.join(ctx.actor.logprobs(batch)), loss))

    with tiny(GRPO) as run:
        step_of(run, monkeypatch, trains_aside)
        driven = Driven(run, steps=3)
        assert run.session.groups["actor"][1].version().result() == 9
    assert len(driven.metrics) == 3


def test_rows_of_an_earlier_step_end_the_run(monkeypatch):
    with tiny({**GRPO, "mini_batch_size": 0, "epochs": 1}) as run:
        kept = []

        def step(self, ctx):
            batch = ctx.actor.generate(ctx.prompts(8).repeat(4))
            batch = batch.join(ctx.reward.score(batch))
            kept.append(batch.join(ctx.compute(self.advantages, batch)))
            ctx.actor.update((kept[max(ctx.step - 2, 0)], self.losses()["actor"]))

        monkeypatch.setattr(type(run.algorithm), "step", step)
        said = "step 3 has trained actor on tokens of its weights after 0 updates, and those of 1 "
        with pytest.raises(HybridFlowError, match=said):
            Driven(run, steps=6)


def test_recording_does_not_bring_about_a_turn(monkeypatch):
    with tiny({**GRPO, "mini_batch_size": 0}) as run:

        def step(self, ctx):
            batch = ctx.actor.generate(ctx.prompts(8).repeat(4))
            batch = batch.join(ctx.reward.score(batch))
            batch = batch.join(ctx.compute(self.advantages, batch))
            # Whose columns are not known before `compute` has returned
            again = Batch.concat([batch.take(slice(0, 16)), batch.take(slice(16, 32))])
            ctx.actor.update((again, self.losses()["actor"]))

        monkeypatch.setattr(type(run.algorithm), "step", step)
        driven = Driven(run, steps=3)
    assert driven.said == [] and lags(driven) == [0.0, 1.0, 1.0]
    assert len(driven.rows[0]) == 32


def test_an_error_of_the_page_before_cannot_be_caught_by_the_next(monkeypatch):
    with tiny({**GRPO, "kl_coef": 0.1, "kl_target": 0.1}) as run:
        follow = run.algorithm.kl.follow

        def catches(advantages, rows):
            with contextlib.suppress(Exception):
                follow(advantages, rows)

        monkeypatch.setattr(run.algorithm.kl, "follow", catches)

        def breaks(run: Run) -> bool:
            if run.step == 2:
                raise Breaks
            return True

        with pytest.raises(Breaks):
            Driven(run, steps=5, at_end=breaks)


class Early(Pages):
    """Publishes the weights of a page that has not ended."""

    def _write_ahead(self):
        for rollout in self.run.session.rollouts.values():
            rollout.sync()
        super()._write_ahead()


class Lost(Pages):
    """Leaves a page out."""

    def _page(self, step):
        return super()._page(step + (step == 3))


class Wrong(Pages):
    """Trains a page before the one before it has ended."""

    def _write_ahead(self):
        self._outbox.ahead = frozenset(self.run.job.pools)
        super()._write_ahead()


class Stale(Pages):
    """Keeps the engines' weights."""

    def _sync(self):
        if self.run.step < 1:
            super()._sync()
        else:
            self._published["actor", self.run.step] = 2 * self.run.step


@pytest.mark.parametrize(
    ("pages", "said"),
    [
        (Early, "step 2 has tokens of the weights of version 2, and they should be of 0"),
        (Lost, "step 4 ends after step 2"),
        (Wrong, "a later step was trained before its turn"),
        (Stale, "step 3 has tokens of the weights of version 0, and they should be of 2"),
    ],
)
def test_a_broken_order_ends_the_run(pages, said):
    with tiny(GRPO) as run, pytest.raises(HybridFlowError, match=said):
        Driven(run, steps=5, pages=pages)


def test_calls_and_bytes_are_those_of_their_step():
    with tiny({**GRPO, "mini_batch_size": 0}) as run:
        calls = []

        def taken(run: Run) -> bool:
            calls.append(run.session.timeline.take(run.step).phases)
            return True

        driven = Driven(run, steps=4, at_end=taken)
    for phases in calls:
        assert {"actor/update", "actor.rollout/generate", "data/draw"} <= set(phases)
    sent = [traffic["sent"] for traffic in driven.traffic[1:]]
    assert max(sent) < 1.2 * min(sent)
