"""What a run tells on the console, to trackers and to observers."""

from __future__ import annotations

import json
import math
from datetime import UTC, datetime

import attrs
import pytest
import torch
from helpers.jobs import reporter

from hybridflow.core.contracts.planner import Prediction
from hybridflow.core.contracts.tracker import Tracker
from hybridflow.core.errors import HybridFlowError
from hybridflow.core.job.job import Chosen
from hybridflow.core.plugins import registry
from hybridflow.core.values.metrics import Metrics
from hybridflow.settle.predictions import Comparison

MEANS = {"actor/response_length": (40.0, 16.0), "kl": (0.5, 2.0)}
RESPONSES = Metrics(MEANS, {"actor/largest": 3.0})
"""16 responses of 40 tokens in all."""


def quiet(run) -> None:
    """Nothing was sent and nothing took time so far."""
    run.session.runtime.traffic.take()
    run.session.timeline.take()


def logged(run) -> list[dict]:
    lines = (run.job.folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_it_begins_with_what_runs_where_and_on_how_many_rows(run_of, tiny):
    run = run_of()
    report, out = reporter(run, tiny)
    report.prepared = attrs.evolve(
        report.prepared, dropped={"train": 3, "validation": 0}, notes=("few tokens",)
    )
    with report:
        report.begin(0, {"actor": 1_500_000})
        report.begin(4, {"actor": 1_500_000, "ref": 250_000})
    first, dropped, *rest = out.getvalue().splitlines()
    rows = "grpo on 256 train rows, 6 validation rows; folder"
    assert first == f"conformance: {rows} {run.job.folder}"
    assert dropped.startswith("3 train rows ") and "data.max_prompt_tokens" in dropped
    resumed = "parameters: actor 1.5M, ref 0.2M; resuming after step 4"
    assert rest == ["note: few tokens", "parameters: actor 1.5M", resumed]


def test_a_step_s_figures_are_counted_out(run_of, tiny):
    run = run_of()
    report, out = reporter(run, tiny, steps=2)
    quiet(run)
    run.step = 2
    with report:
        values = report.step(run, RESPONSES, 2.0)
    assert (values["actor/response_length"], values["kl"]) == (2.5, 0.25)
    assert values["actor/largest"] == 3.0
    assert (values["tokens_per_second"], values["sequences_per_second"]) == (20.0, 8.0)
    assert (values["bytes/controller"], values["bytes/per_sequence"]) == (0.0, 0.0)
    assert values["seconds/step"] == 2.0 and "seconds/predicted" not in values
    line = "conformance step 2/2  length 2.5  kl 0.25  tok/s 20  B/seq 0  2.00 s ()"
    assert out.getvalue().splitlines()[-1] == line


def test_reward_and_length_come_before_the_loss(run_of, tiny):
    run = run_of()
    report, out = reporter(run, tiny, steps=1)
    run.step = 1
    names = ("actor/loss", "actor/entropy", "actor/response_length", "reward/scores")
    report.step(run, Metrics.of(**dict.fromkeys(names, 0.5)), 1.0)
    assert "step 1/1  reward 0.5  length 0.5  loss 0.5  entropy 0.5  " in out.getvalue()


def test_tokens_add_up_and_the_rest_of_the_run_is_estimated(run_of, tiny, monkeypatch):
    run = run_of()
    report, out = reporter(run, tiny, steps=12)
    run.tokens = 100  # of before a resume
    now = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    with report:
        report.begin(8, {"actor": 1})
        found = []
        for run.step, seconds in ((9, 50.0), (10, 5.0), (11, 7.0), (12, 6.0)):
            now[0] += seconds
            found.append(report.step(run, RESPONSES, 0.5))
    assert [values["tokens_total"] for values in found] == [140.0, 180.0, 220.0, 260.0]
    # The first step warms up: then 5 s for one step, 12 s for two, 18 s for three.
    etas = [values.get("eta_seconds") for values in found]
    assert etas == [None, 10.0, 6.0, 0.0]
    lines = [line for line in out.getvalue().splitlines() if " step " in line and "/12" in line]
    assert [line.partition("  eta ")[2] for line in lines] == ["", "0:00:10", "0:00:06", ""]


def test_a_step_has_the_bytes_and_the_seconds_of_its_calls(run_of, tiny):
    run = run_of()
    report, out = reporter(run, tiny, steps=1)
    quiet(run)
    prompts = run.ctx.prompts(4)
    doubled = run.ctx.compute(lambda group: {"doubled": 2 * group}, prompts)["doubled"]
    assert torch.equal(doubled.values, 2 * prompts["group"].values)
    run.ctx.finish()
    run.step = 1
    values = report.step(run, RESPONSES, 1.0)
    kinds = [value for name, value in values.items() if name.startswith("bytes/")]
    total = values["bytes/controller"]
    assert total > 0 and values["bytes/per_sequence"] == total / 16
    assert sum(kinds) == pytest.approx(2 * total + total / 16)  # each kind, and these two
    assert values["seconds/data/draw"] > 0 and values["seconds/tasks/compute"] > 0
    assert "tasks/" in out.getvalue()
    again = report.step(run, Metrics(), 1.0)
    assert again["bytes/controller"] == 0.0 and "seconds/data/draw" not in again


def test_without_a_terminal_lines_are_rare_but_the_last_step_has_one(run_of, tiny):
    run = run_of()
    report, out = reporter(run, tiny, steps=5)
    for run.step in range(1, 6):
        report.step(run, Metrics.of(kl=run.step), 0.5)
    assert [line.split()[2] for line in out.getvalue().splitlines()] == ["1/5", "5/5"]


def test_a_terminal_has_a_bar_instead(run_of, tiny):
    run = run_of()
    report, out = reporter(run, tiny, terminal=True, steps=2)
    with report:
        report.begin(0, {"actor": 1})
        run.step = 1
        report.step(run, Metrics.of(kl=0.25), 0.5)
    assert "kl 0.25  0.50 s" in out.getvalue() and "step 1/2" not in out.getvalue()


def test_trackers_get_steps_and_validations_and_one_that_is_not_there_is_left_out(run_of, tiny):
    run = run_of()
    run.job.folder.mkdir(exist_ok=True)
    run.job = attrs.evolve(run.job, trackers=(Chosen("jsonl"), Chosen("no-such-tracker")))
    report, out = reporter(run, tiny, steps=9)
    with report:
        report.begin(0, {"actor": 1})
        assert len(report.trackers) == 1
        for run.step in (1, 2, 3):
            report.step(run, Metrics.of(kl=run.step), 0.5)
        report.begin(2, {"actor": 1})  # a restart: step 3 is done again
        [tracker] = report.trackers
        run.step = 3
        report.step(run, Metrics.of(kl=7.0), 0.5)
        report.validation(run, {"validation/score": 0.625, "validation/seconds": 9.0})
    assert "tracker 'no-such-tracker' is left out: " in out.getvalue()
    rows = [(row["step"], row.get("kl")) for row in logged(run)]
    assert rows == [(1, 1.0), (2, 2.0), (3, 7.0), (3, None)]
    assert logged(run)[-1]["validation/score"] == 0.625
    said = [line for line in out.getvalue().splitlines() if "step 3" in line]
    assert said[-1] == "conformance step 3: validation: score 0.625"
    with pytest.raises(ValueError, match="closed file"):
        tracker.log(4, {})


def test_a_reached_goal_is_told_with_the_steps_that_it_saved(run_of, tiny):
    run = run_of(stop_at=0.5, name="held-out")
    report, out = reporter(run, tiny, steps=9)
    run.step = 3
    run.validations[3] = {"validation/score": 0.5}
    report.validation(run, {"validation/score": 0.5})
    assert out.getvalue().splitlines() == [
        "conformance step 3: held-out: score 0.5",
        "conformance: the score has reached validation.stop_at = 0.5, after step 3 of 9",
    ]


def mismatching(report, run, mean: float) -> None:
    run.step += 1
    report.step(run, Metrics.of(**{"actor/mismatch_mean": mean}), 0.5)


def test_a_mismatch_is_told_once_until_it_is_over(run_of, tiny):
    run = run_of()
    report, out = reporter(run, tiny, steps=100, mismatch_warn=0.1)
    for mean in (0.05, 0.2, 0.3, 0.1, float("nan"), 0.05):
        mismatching(report, run, mean)
    said = [line for line in out.getvalue().splitlines() if "mismatch_warn" in line]
    assert [line.split(":")[0] for line in said] == ["step 2", "step 5"]
    assert "differ, actor's by 0.2 nats on average, more than 0.1" in said[0]


def test_the_warning_begins_at_a_fifth_of_the_limit_and_knows_nan_beside_numbers(run_of, tiny):
    run = run_of()
    report, out = reporter(run, tiny)
    models = {name: attrs.evolve(report.job.models["actor"]) for name in ("actor", "other")}
    for name, stop in (("actor", 0.05), ("other", math.inf)):
        spec = attrs.evolve(models[name].spec, mismatch_stop=stop)
        models[name] = attrs.evolve(models[name], spec=spec)
    report.job = attrs.evolve(report.job, models=models)
    for actor, other in ((0.0099, 9.0), (0.0101, 9.0), (0.0, 0.0), (0.0, float("nan"))):
        run.step += 1
        means = {"actor/mismatch_mean": actor, "other/mismatch_mean": other}
        report.step(run, Metrics.of(**means), 0.5)
    said = [line for line in out.getvalue().splitlines() if "mismatch_warn" in line]
    assert len(said) == 2
    assert "actor's by 0.0101 nats on average, more than 0.01 (" in said[0]
    assert "other's by nan nats" in said[1]


def test_predictions_stand_beside_the_steps_and_are_compared_at_the_end(run_of, tiny):
    run = run_of()
    report, out = reporter(run, tiny, steps=2)
    report.ended()
    assert out.getvalue() == ""
    report.observers = [Comparison(Prediction(4.0))]
    for run.step in (1, 2):
        assert report.step(run, Metrics(), 2.0)["seconds/predicted"] == 4.0
    report.ended()
    last = out.getvalue().splitlines()[-1]
    assert last == "a step took 2.00 s (median), 4.00 s were predicted (+100%)"


def said_in(run) -> list[str]:
    """The lines of the log without their times, which are checked."""
    lines = (run.job.folder / "console.log").read_text().splitlines()
    times = [
        datetime.strptime(line[:19], "%Y-%m-%d %H:%M:%S").replace(tzinfo=UTC) for line in lines
    ]
    assert all(abs((datetime.now(UTC) - time).total_seconds()) < 60 for time in times)
    return [line[20:] for line in lines]


def test_what_is_said_is_logged_with_a_line_of_progress_a_minute(run_of, tiny):
    run = run_of()
    report, _ = reporter(run, tiny, terminal=True, steps=4)
    with report:
        report.say("one\ntwo [red]")
        for run.step in (1, 2, 4):
            report.step(run, RESPONSES, 2.0)
    first, *rest = said_in(run)
    assert first.startswith("conformance: grpo on 256 train rows")
    assert rest[:2] == ["one", "two [red]"]
    assert [line.split("  ")[0] for line in rest[2:]] == [
        "conformance step 1/4",
        "conformance step 4/4",
    ]


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (HybridFlowError("no such row; add one"), ["no such row; add one"]),
        (KeyboardInterrupt(), ["interrupted"]),
        (ZeroDivisionError("nobody expected it"), ["Traceback (most recent call last):"]),
    ],
)
def test_the_error_that_ends_a_run_is_the_last_of_the_log(run_of, tiny, error, said):
    run = run_of()
    report, _ = reporter(run, tiny)
    with pytest.raises(type(error)), report:
        raise error
    lines = said_in(run)
    assert lines[1:2] == said
    assert len(lines) == 2 or lines[-1] == "ZeroDivisionError: nobody expected it"


def test_a_log_that_cannot_be_written_ends_no_run(run_of, tiny, monkeypatch):
    run = run_of()
    (run.job.folder / "console.log").symlink_to("/dev/full")
    report, out = reporter(run, tiny)
    with report:
        report.say("said all the same")
        report.say("and again")
    begun, told, *rest = out.getvalue().splitlines()
    assert begun.startswith("conformance: grpo on")
    assert told == "console.log ends here: OSError: [Errno 28] No space left on device"
    assert rest == ["said all the same", "and again"]


def test_a_log_that_cannot_be_opened_is_told(run_of, tiny):
    run = run_of()
    (run.job.folder / "console.log").mkdir(parents=True)
    report, out = reporter(run, tiny)
    with report:
        report.say("said all the same")
    told = out.getvalue().splitlines()[0]
    assert told.startswith("console.log is left out: IsADirectoryError: ")


class Unreachable(Tracker):
    """One whose server is not there in steps 1, 2 and 4."""

    def start(self, folder, step):
        self.got: list[int] = []

    def log(self, step, metrics):
        if step != 3:
            raise ConnectionError("no route to the server")
        self.got.append(step)

    def close(self):
        assert self.got == [3]


class NeverStarts(Tracker):
    def start(self, folder, step):
        raise ImportError("no such library")

    def log(self, step, metrics):
        raise AssertionError("it was left out")


def test_a_tracker_that_fails_is_told_and_stops_nothing(run_of, tiny, monkeypatch):
    theirs = {"unreachable": Unreachable, "never": NeverStarts}
    get = registry().get
    monkeypatch.setattr(registry(), "get", lambda kind, name: theirs.get(name) or get(kind, name))
    run = run_of()
    run.job = attrs.evolve(run.job, trackers=tuple(map(Chosen, ("jsonl", *theirs))))
    report, out = reporter(run, tiny)
    with report:
        report.begin(0, {"actor": 1})
        for run.step in (1, 2, 3, 4):
            report.step(run, RESPONSES, 2.0)
    assert [row["step"] for row in logged(run)] == [1, 2, 3, 4]
    said = [line for line in out.getvalue().splitlines() if line.startswith(("tracker", "Unreach"))]
    assert said == [
        "tracker 'never' is left out: it does not start: ImportError: no such library",
        *(
            f"Unreachable lost the metrics of step {step}: ConnectionError: no route to the server; "
            "the run goes on, and it gets what comes later"
            for step in (1, 4)
        ),
    ]
