"""What `plan` says of steps that overlap: where engines should be, and by how much they may lag."""

from __future__ import annotations

import re

import numpy as np
import pytest
from helpers.configs import printed

from hybridflow.cli.plan import unplaced_jobs
from hybridflow.core.errors import ConfigError
from hybridflow.kit.recording import SAMPLES, RecordedTable
from hybridflow.planner import ahead as module
from hybridflow.planner.ahead import Lengths, Way, lengths_of, recommended
from hybridflow.planner.jobs import plan_job
from hybridflow.planner.overlap import Engines, Timing

AHEAD = ("run.max_staleness=1", "algorithm.correction=truncate")


def test_without_tails_and_overlap_a_step_is_the_plans_own(config):
    """The simulation of events beside the formula of a step, which is written apart."""
    jobs, _ = unplaced_jobs(config, AHEAD)
    plan = plan_job(jobs[0], "a100-80gb:1x8")
    best = plan.best()
    longest = plan.work.workload.response_tokens
    lengths = Lengths(np.full(10, longest), "equal")
    role, rows = module._generating(plan)
    way = module._beside(plan, best, role, lengths)
    way.time(lengths.of(rows), plan.work.workload.prompt_tokens)
    # All sequences are decoded at once there, so that none waits for another.
    assert rows <= way.engines.places * way.engines.replicas
    assert way.timings[0].step == pytest.approx(best.seconds, rel=0.01)
    assert way.timings[0].trainer_busy == pytest.approx(
        (best.stages[1] + best.stages[2]) / best.seconds, abs=0.01
    )


def test_a_plan_compares_bounds_and_splits_where_steps_may_overlap(config):
    assert "max_staleness" not in printed(config, cluster="a100-80gb:2x8")
    text = printed(config, AHEAD, cluster="a100-80gb:2x8")
    assert "steps that overlap (run.max_staleness), lognormal lengths" in text
    rows = re.findall(r"^(beside the training|on 8),.*?((?:\s+[\d.]+ m?s){4})$", text, re.M)
    assert [where for where, _ in rows] == ["beside the training", "on 8"]
    found = re.search(
        r"recommended: run.max_staleness = (\d), .*?: ([\d.]+) s, ([\d.]+) times", text
    )
    times = [float(time) for _, row in rows for time in re.findall(r"[\d.]+", row)]
    assert float(found[2]) in times and float(found[2]) <= min(times) * 1.2
    assert float(found[3]) == pytest.approx(times[0] / float(found[2]), rel=0.02)


def test_what_is_not_known_is_said_and_the_plan_stands(config, tmp_path):
    text = printed(config, (*AHEAD, f"placement.lengths={tmp_path}"), cluster="a100-80gb:1x8")
    assert "a step takes" in text and "has no recorded samples of training" in text


def way(where: str, **seconds: float) -> Way:
    timings = {int(key[1:]): Timing(one, 1.0, 1.0) for key, one in seconds.items()}
    return Way(where, True, Engines(1, 1, 1.0), 1.0, 0.0, timings)


def test_a_larger_bound_must_gain_something():
    # 1.03 x 10 = 10.3, 1.03^2 x 9.9 = 10.5, 1.03^4 x 9.5 = 10.7
    slow = way("a", k0=20.0, k1=10.0, k2=9.9, k4=9.5)
    assert recommended([slow]) == (slow, 1)
    fast = way("b", k0=20.0, k1=19.0, k2=9.6, k4=9.5)
    assert recommended([slow, fast]) == (fast, 2)
    assert recommended([way("c", k0=5.0, k1=5.0, k2=5.0, k4=5.0)])[1] == 0


def test_lengths_are_a_runs_own_or_assumed(tmp_path):
    table = RecordedTable(tmp_path, SAMPLES, 2**20)
    table.begin(0)
    rows = ((1, "train", 10), (1, "validation", 90), (2, "train", 30))
    table.add([{"step": step, "data": data, "tokens": tokens} for step, data, tokens in rows])
    table.flush()
    found = lengths_of(str(tmp_path), 100)
    assert sorted(found.known.tolist()) == [10, 30] and found.mean == 20.0
    assert set(found.of(50)(3).tolist()) == {10, 30}
    assert found.of(50)(3).tolist() == found.of(50)(3).tolist()

    assumed = lengths_of(None, 2000)
    assert assumed.known.min() >= 1 and assumed.known.max() <= 2000
    # A quarter of the limit, of which the cut at the limit takes a little.
    assert assumed.mean == pytest.approx(500, rel=0.1) and "assumed" in assumed.said
    with pytest.raises(ConfigError, match="has no recorded samples"):
        lengths_of(str(tmp_path / "none"), 100)
