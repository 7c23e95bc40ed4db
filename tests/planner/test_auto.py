"""Auto-mapping as a planner: plans, predictions, problems and what-if of a job."""

from __future__ import annotations

import json
import logging
import re

import pytest
from helpers.configs import OWN_CLUSTER, tiny_run

from hybridflow.core.contracts.planner import STAGES, Line, TextTable
from hybridflow.core.errors import ConfigError
from hybridflow.core.values.units import seconds
from hybridflow.planner.auto import AutoMapping
from hybridflow.settle.launch import load_config, run

CLUSTER = "a100-80gb:1x8"


@pytest.fixture
def job(config):
    [job] = load_config(config, ["pools.main=[8]"])
    return job


def test_a_job_that_is_placed_as_planned_is_predicted_as_planned(config, job):
    plan = AutoMapping().plan(job, CLUSTER)
    [placed] = load_config(config, ["placement=auto", f"placement.cluster={CLUSTER}"])
    predicted = AutoMapping().predict(placed, CLUSTER)
    assert predicted.seconds == pytest.approx(plan.prediction.seconds)
    assert predicted.work == pytest.approx(plan.prediction.work)
    [slow] = load_config(config, ["pools.main=[8]", "actor.layout.tp=8", "critic.layout.tp=8"])
    assert AutoMapping().predict(slow, CLUSTER).seconds > plan.prediction.seconds


def test_bars_are_the_work_and_end_with_the_step(job):
    plan = AutoMapping().plan(job, CLUSTER)
    assert (
        plan.ends[-1]
        == plan.prediction.seconds
        == max(bar.started + bar.seconds for bar in plan.bars)
    )
    for role in ("actor", "critic", "reward"):
        work = [plan.prediction.work.get((role, stage), 0.0) for stage in STAGES]
        assert [bar.seconds for bar in plan.bars if bar.role == role] == work


def test_a_plan_is_explained_beside_its_alternatives(job):
    plan = AutoMapping().plan(job, CLUSTER, alternatives=2, placed=True)
    lines = [block.text for block in plan.explanation if isinstance(block, Line)]
    assert sum(line.startswith("next: ") for line in lines) == 2
    [own] = [line for line in lines if line.startswith("as the config says it: ")]
    assert "(the same)" in own or "%): " in own
    assert plan.cluster.startswith("cluster: 1 x 8 a100-80gb")
    assert AutoMapping().plan(job, CLUSTER, alternatives=0).explanation == ()


def test_problems_are_none_or_why_it_does_not_fit(job):
    assert AutoMapping().problems(job, CLUSTER) == []
    [problem] = AutoMapping().problems(job, "a100-80gb:1x4")
    assert "asks for 8 devices, and there are 4; this fits: " in problem


def test_what_if_tables_the_best_plan_of_each_size(job):
    [table] = AutoMapping().scaling(job, CLUSTER, [2, 4, 8])
    assert isinstance(table, TextTable)
    steps = {row[0]: row[1] for row in table.rows}
    for size in ("2", "4", "8"):
        best = AutoMapping().plan(job, f"a100-80gb:1x{size}").prediction
        assert steps[size] == seconds(best.seconds)
    with pytest.raises(ConfigError, match="12 devices are not whole nodes of 8"):
        AutoMapping().scaling(job, CLUSTER, [12])


def test_a_run_on_cpus_is_warned_of_a_cluster_of_gpus(config, tmp_path, caplog):
    [job] = load_config(config, ["run.device=cpu", "pools.main=[1]"])
    with caplog.at_level(logging.WARNING):
        AutoMapping().predict(job, CLUSTER)
    assert f"placement.cluster '{CLUSTER}' is no cluster of CPUs" in caplog.text
    caplog.clear()
    own = tmp_path / "own.toml"
    own.write_text(OWN_CLUSTER.replace("memory_gb = 4", "memory_gb = 400"))
    with caplog.at_level(logging.WARNING):
        AutoMapping().predict(job, str(own))
    assert not caplog.text


def test_a_run_that_knows_its_cluster_says_what_was_predicted(tmp_path, capsys):
    (tmp_path / "cluster.toml").write_text(OWN_CLUSTER)
    (tmp_path / "tiny.toml").write_text(tiny_run(tmp_path, tmp_path / "cluster.toml"))
    assert run(tmp_path / "tiny.toml").step == 3
    text = capsys.readouterr().out
    assert re.search(
        r"^a step took [\d.]+ m?s \(median\), [\d.]+ m?s were predicted \([+-]\d+%\)$", text, re.M
    )
    for work in ("generation", "training"):
        assert re.search(
            rf"^  actor {work}: [\d.]+ m?s, predicted [\d.]+ m?s \([+-]\d+%\)$", text, re.M
        ), text
    lines = (tmp_path / "runs" / "tiny" / "metrics.jsonl").read_text().splitlines()
    predicted = {json.loads(line)["seconds/predicted"] for line in lines}
    assert len(lines) == 3 and len(predicted) == 1 and predicted.pop() > 0
