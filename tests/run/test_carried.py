"""Responses that outlive a generation phase: run.max_staleness where engines take turns with the training."""

from __future__ import annotations

from functools import partial
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from helpers.driven import Driven, write_checkpoint

from hybridflow.algorithms.grpo import GRPO
from hybridflow.core.errors import HybridFlowError, WorkerError
from hybridflow.core.running import pages as module
from hybridflow.core.running.pages import Pages
from hybridflow.core.running.run import Run
from hybridflow.core.values.batch import Batch
from hybridflow.core.values.weights import Box
from hybridflow.core.workers import gradients
from hybridflow.kit.testing.runs import TinyRun
from hybridflow.settle.stages import overlay

SIZES = {"prompts_per_step": 4, "group_size": 4, "mini_batch_size": 8, "correction": "truncate"}
UPDATES = 2
"""Optimizer steps of a step."""
ROWS = 16
STILL = {"actor": {"optimizer": {"lr": 1e-30}}}
PLACES = {
    "with the training": {},
    "apart": {
        "pools": {"main": [1], "engines": [1]},
        "actor": {"generation": {"pool": "engines"}},
        "run": {"in_flight": "recompute"},
    },
}
"""Where the engines are. One call after the other, those apart generate in the same turns, in the embedded engine."""


def lengths_of(step: int) -> np.ndarray:
    """Tokens of each response of a step."""
    return np.clip(np.random.default_rng(step).lognormal(1.5, 1.0, ROWS), 1, 24).astype(np.int64)


class Tailed(GRPO):
    """Its responses have lengths of their own, and what it has generated is kept."""

    seen: list[Batch]

    def step(self, ctx):
        prompts = ctx.prompts(self.config.prompts_per_step).repeat(self.config.group_size)
        limits = torch.from_numpy(lengths_of(ctx.step))
        sampling = attrs.evolve(ctx.sampling, ignore_stop=True)
        batch = ctx.actor.generate(prompts.with_columns(max_tokens=limits), sampling=sampling)
        self.seen.append(batch)
        batch = batch.join(ctx.reward.score(batch), ctx.actor.logprobs(batch))
        advantages = ctx.compute(self.advantages, batch)
        for mini in self.minibatches(ctx, batch.join(advantages)):
            ctx.actor.update((mini, self.losses()["actor"]))


def tiny(staleness: int, algorithm: dict[str, Any] | None = None, **tables: Any) -> TinyRun:
    run = {"max_staleness": staleness, "samples": 1000, **tables.pop("run", {})}
    table = {"name": "tests.run.test_carried:Tailed", **SIZES, **(algorithm or {})}
    made = TinyRun(table, {"run": run, "sampling": {"max_tokens": 24}, **tables})
    made.algorithm.seen = []
    return made


def drive(staleness: int, steps: int, tables: dict[str, Any], **how: Any):
    """(what was driven, checksums of the weights, rows of each step by column)"""
    with tiny(staleness, **tables) as run:
        driven = Driven(run, steps, **how)
        seen = [
            {name: [row.tolist() for row in batch[name]] for name in names(batch)}
            for batch in run.algorithm.seen[: driven.run.step]
        ]
        return driven, run.checksums(), seen


def names(batch: Batch) -> list[str]:
    return [
        name
        for name in ("response_ids", "weight_version", "rollout_logprobs", "lag")
        if name in batch
    ]


def simulated(staleness: int, steps: int) -> list[list[list[int]]]:
    """For each step, row and token the step in whose turn it is made: one token a row until the step's own are complete."""
    made = [[[] for _ in range(ROWS)] for _ in range(steps)]
    limits = [lengths_of(step + 1).tolist() for step in range(steps)]
    for turn in range(steps):
        while any(len(row) < most for row, most in zip(made[turn], limits[turn], strict=True)):
            for step in range(turn, min(turn + staleness + 1, steps)):
                for row, most in zip(made[step], limits[step], strict=True):
                    if len(row) < most:
                        row.append(turn + 1)
    return made


@pytest.fixture(scope="module")
def synchronous():
    return drive(0, 6, STILL)[2]


@pytest.mark.parametrize(
    ("staleness", "place"),
    [(1, "with the training"), (2, "with the training"), (4, "with the training"), (1, "apart"), (4, "apart")],
)  # fmt: skip
def test_each_token_is_made_in_the_turn_of_a_simulation_and_is_the_synchronous_runs(
    staleness, place, synchronous
):
    driven, _, seen = drive(staleness, 6, overlay(PLACES[place], STILL))
    turns = simulated(staleness, 6)
    for step, rows in enumerate(turns):
        lags = [[step + 1 - turn for turn in row] for row in rows]
        assert seen[step]["lag"] == lags
        assert seen[step]["weight_version"] == [
            [UPDATES * (turn - 1) for turn in row] for row in rows
        ]
        # With weights that do not move the tokens are the same, whatever is generated beside them.
        assert seen[step]["response_ids"] == synchronous[step]["response_ids"]
        for made, same in zip(
            seen[step]["rollout_logprobs"], synchronous[step]["rollout_logprobs"], strict=True
        ):
            np.testing.assert_allclose(made, same, atol=1e-5)

        flat = [lag for row in lags for lag in row]
        metrics = driven.metrics[step]
        assert metrics["actor/staleness"] == pytest.approx(np.mean(flat))
        assert metrics["actor/staleness_max"] == max(flat) <= staleness
        assert metrics["actor/versions_per_sequence"] == pytest.approx(
            np.mean([len(set(row)) for row in lags])
        )
        assert {f"actor/lag{lag}_kl" in metrics for lag in set(flat)} == {True}
    assert max(metrics["actor/staleness_max"] for metrics in driven.metrics) == staleness
    assert driven.said == []


def test_two_runs_are_equal_and_each_drawn_row_is_trained_once():
    once = {"algorithm": {"mini_batch_size": 0}}
    (driven, sums, seen), (_, again, seen_again) = (drive(2, 5, once) for _ in range(2))
    assert sums == again and seen == seen_again
    groups = [[row["group"] for row in rows] for rows in driven.rows]
    assert groups == [[step * 4 + at // 4 for at in range(ROWS)] for step in range(5)]
    assert sums != drive(0, 5, once)[1]


@pytest.mark.parametrize("place", PLACES)
def test_a_resumed_run_has_the_same_bits(tmp_path, place):
    def at_two(run: Run) -> bool:
        if run.step == 2:
            write_checkpoint(run, driven_pages[-1])
        return True

    driven_pages: list[Pages] = []

    class Noted(Pages):
        def __init__(self, *args: Any):
            super().__init__(*args)
            driven_pages.append(self)

    folder = overlay(PLACES[place], {"run": {"folder": str(tmp_path / "run")}})
    whole, sums, seen = drive(2, 6, folder, at_end=at_two, pages=Noted)
    assert any(len(row) > 0 and row[0] > 0 for row in seen[2]["lag"])  # begun before the checkpoint
    resumed, again, rest = drive(2, 6, folder, resume=True)
    assert again == sums and rest == seen[2:]
    timed = ("seconds", "_mb", "_gb", "turn_wait")
    for then, now in zip(whole.metrics[2:], resumed.metrics, strict=True):
        assert {k: v for k, v in then.items() if not any(t in k for t in timed)} == {
            k: v for k, v in now.items() if not any(t in k for t in timed)
        }

    # With a smaller bound, or none, what is older is not taken.
    for staleness in (1, 0) if place == "with the training" else (1,):
        resumed, _, rest = drive(staleness, 6, folder, resume=True)
        assert all(
            metrics.get("actor/staleness_max", 0) <= staleness for metrics in resumed.metrics
        )


@pytest.mark.parametrize("place", PLACES)
def test_validation_between_steps_changes_nothing(place):
    def validated(run: Run) -> bool:
        counters = dict(run.ctx.counters)
        prompts = run.session.rows("train", 0, 4).select(["prompt_ids", "group", "meta"])
        batch = run.ctx.actor.generate(prompts, greedy=True)
        assert set(batch["weight_version"].values.tolist()) == {UPDATES * run.step}
        run.ctx.finish()
        run.ctx.counters.update(counters)
        return True

    tables = PLACES[place]
    assert drive(2, 4, tables, at_end=validated)[1] == drive(2, 4, tables)[1]


def test_a_run_that_ends_early_has_the_state_from_before_the_pages_ahead():
    driven, _, _ = drive(2, 9, {}, at_end=lambda run: run.step < 3)
    before = driven.pages.before()
    assert driven.run.step == 3 and before.counters["samples"] == 3 * ROWS
    assert before.data["train"]["position"] == 12


def test_what_a_page_reads_of_its_own_turn_is_told():
    adaptive = {"name": "grpo", "kl_coef": 0.1, "kl_target": 0.1, "kl_horizon": 200.0}
    driven, _, _ = drive(1, 4, {"algorithm": adaptive})
    assert len(driven.said) == 1 and "for ctx.compute" in driven.said[0]
    assert all(metrics["actor/staleness_max"] <= 1 for metrics in driven.metrics)


@pytest.mark.parametrize("name", ["dapo", "remax", "ppo"])
def test_pages_of_several_kinds_run(name):
    table = {"name": name, "group_size": 4 if name == "dapo" else 1, "mini_batch_size": 0}
    driven, _, _ = drive(2, 4, {"algorithm": table})
    assert len(driven.metrics) == 4
    # DAPO reads scores before it goes on, so that it is generated in its own turn.
    assert any("ctx.reward.score" in said for said in driven.said) == (name == "dapo")
    assert (max(metrics["actor/staleness_max"] for metrics in driven.metrics) == 0) == (
        name == "dapo"
    )


def test_apart_a_page_that_reads_its_scores_is_generated_by_older_weights_too():
    dapo = {"algorithm": {"name": "dapo", "group_size": 4, "mini_batch_size": 0}}
    driven, _, _ = drive(2, 5, overlay(PLACES["apart"], dapo))
    lags = [metrics["actor/staleness_max"] for metrics in driven.metrics]
    assert lags == [0, 1, 2, 2, 2] and driven.said == []


class Told(Pages):
    """Tells of waits that are any length, as where calls overlap."""

    def _waited(self, *args: Any):
        self._serving.overlaps = True
        try:
            return super()._waited(*args)
        finally:
            self._serving.overlaps = False


def test_apart_a_step_tells_how_long_its_end_waits_for_pages_that_read_early(monkeypatch):
    monkeypatch.setattr(module, "TOLD_S", 0.0)
    dapo = {"algorithm": {"name": "dapo", "group_size": 4, "mini_batch_size": 0}}
    driven, _, _ = drive(2, 5, overlay(PLACES["apart"], dapo), pages=Told)
    waits = [metrics.get("end_wait_seconds") for metrics in driven.metrics]
    # The last two steps have none ahead that would read while they are trained.
    assert all(wait > 0 for wait in waits[:3]) and waits[3:] == [None, None]
    [said] = driven.said
    assert said.startswith("step 1 ended ") and "step 3 reads ctx.reward.score before it" in said
    plain, _, _ = drive(2, 4, PLACES["apart"], pages=Told)
    assert plain.said == [] and "end_wait_seconds" not in plain.metrics[0]


def test_the_figures_of_engines_that_never_stop_are_taken_at_the_end_of_the_step_before():
    with tiny(2, **PLACES["apart"]) as run:
        asked = iter(range(100))
        engine_of(run).figures = lambda: {"asked": float(next(asked))}
        driven = Driven(run, steps=3)
    # The engine is asked as it stops for weights, and by the probe of these: before step 1, and after each step.
    assert [metrics["actor/asked"] for metrics in driven.metrics] == [0, 2, 4]


def test_engines_with_other_weights_in_a_later_phase_end_the_run(monkeypatch):
    # A later turn in which anything is generated
    turn = next(
        step
        for step, rows in enumerate(simulated(2, 5), 1)
        if step > 1 and any(step in row for row in rows)
    )
    before = UPDATES * (turn - 1)
    with tiny(2) as run:
        engine = run.worker("actor").engine
        end_update = engine.end_update

        def ends_otherwise():
            end_update()
            if engine.version == before:
                name = "model.layers.0.self_attn.o_proj.weight"
                engine.view(name, Box.full(engine.layout().params[name].shape)).mul_(1.5)

        monkeypatch.setattr(engine, "end_update", ends_otherwise)
        with pytest.raises(
            WorkerError,
            match=f"after {before} steps: logprobs of the rollout engine and of the trainer",
        ):
            Driven(run, steps=5)
        assert run.worker("actor").backend.version == before


def engine_of(run: TinyRun) -> Any:
    rollout = run.session.rollouts.get("actor")
    if rollout is None:
        return run.worker("actor").engine
    process: Any = rollout.engines.pool.processes[0]
    return process.host.workers["actor.rollout"].engine


@pytest.mark.parametrize("place", PLACES)
def test_keys_and_values_of_older_weights_end_the_run(monkeypatch, place):
    def stale(engine) -> None:
        """Let whatever enters later phases have the keys and values that the first weights give."""
        views = [
            engine.view(name, Box.full(param.shape))
            for name, param in engine.layout().params.items()
        ]
        views = [view for view in views if view is not None]  # others have another memory order
        admit, first = engine.decoder.admit, []

        def admits(*args: Any):
            first[:] = first or [view.clone() for view in views]
            present = [view.clone() for view in views]
            for view, old in zip(views, first, strict=True):
                view.copy_(old)
            try:
                return admit(*args)
            finally:
                for view, new in zip(views, present, strict=True):
                    view.copy_(new)

        monkeypatch.setattr(engine.decoder, "admit", admits)

    moving = overlay(PLACES[place], {"actor": {"optimizer": {"lr": 0.01}}})
    with tiny(2, **moving) as run:
        stale(engine_of(run))
        with pytest.raises(
            WorkerError,
            match="logprobs of the rollout engine and of the trainer, of",
        ):
            Driven(run, steps=5)
    assert len(drive(2, 5, moving)[0].metrics) == 5


class Late(Pages):
    """Writes a page more than it may."""

    def _write_ahead(self):
        self.lag += 1
        super()._write_ahead()
        self.lag -= 1


def test_tokens_that_are_too_old_end_the_run():
    with pytest.raises(
        HybridFlowError,
        match="step 3 has trained actor on tokens of its weights after 0 updates",
    ):
        drive(1, 6, {}, pages=Late)


KEPT = overlay(PLACES["apart"], {"run": {"in_flight": "keep"}})


def test_weights_that_come_under_way_keep_the_bound_and_the_keys_and_values(synchronous):
    """By weights that do not move the tokens are the synchronous run's, whatever was under way."""
    driven, _, seen = drive(3, 6, overlay(KEPT, STILL))
    assert [step["response_ids"] for step in seen] == [step["response_ids"] for step in synchronous]
    rows = [row for step in seen for row in step["weight_version"]]
    assert all(row == sorted(row) for row in rows)
    assert any(len(set(row)) > 1 for row in rows)
    lags = [metrics["actor/staleness_max"] for metrics in driven.metrics]
    assert max(lags) == 3


def test_rows_of_several_versions_are_no_mismatch(monkeypatch):
    """Their last tokens come after keys and values of older weights; the probes are compared all the same."""
    fast = {"actor": {"optimizer": {"lr": 0.05}}}
    driven, _, seen = drive(1, 5, overlay(KEPT, fast))
    mixed = [row for step in seen for row in step["weight_version"] if len(set(row)) > 1]
    assert mixed and all(metrics["actor/mismatch_mean"] < 1e-4 for metrics in driven.metrics)
    # What is left out would have ended the run.
    monkeypatch.setattr(gradients, "mismatch", partial(compared_all, gradients.mismatch))
    with pytest.raises(WorkerError, match="differ by"):
        drive(1, 5, overlay(KEPT, fast))


def compared_all(mismatch, rows, logprobs, version, whole_rows):
    return mismatch(rows, logprobs, version)


def test_a_run_with_kept_keys_and_values_goes_on_and_validates(tmp_path):
    """A checkpoint ends what is under way; a validation between two steps is by the newest weights."""

    def at_two(run: Run) -> bool:
        prompts = run.session.rows("train", 0, 4).select(["prompt_ids", "group", "meta"])
        counters = dict(run.ctx.counters)
        batch = run.ctx.actor.generate(prompts, greedy=True)
        assert set(batch["weight_version"].values.tolist()) == {UPDATES * run.step}
        run.ctx.finish()
        run.ctx.counters.update(counters)
        if run.step == 2:
            write_checkpoint(run, noted[-1])
        return True

    noted: list[Pages] = []

    class Noted(Pages):
        def __init__(self, *args: Any):
            super().__init__(*args)
            noted.append(self)

    folder = overlay(overlay(KEPT, STILL), {"run": {"folder": str(tmp_path / "run")}})
    _, _, whole = drive(2, 6, folder, at_end=at_two, pages=Noted)
    resumed, _, rest = drive(2, 6, folder, resume=True)
    assert [step["response_ids"] for step in rest] == [step["response_ids"] for step in whole[2:]]
    assert all(metrics["actor/staleness_max"] <= 2 for metrics in resumed.metrics)
