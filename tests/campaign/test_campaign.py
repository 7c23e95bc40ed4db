"""The campaign itself: cases come again by their names, go on where they ended, and what is left is seen."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.waiting import eventually

from campaign import __main__ as module, cases, runs
from campaign.cases import Case, Result, left_behind, marked
from campaign.shrinking import smallest


@pytest.mark.parametrize(
    ("needed", "expected"), [({3}, [3]), ({0, 9}, [0, 9]), ({2, 5, 8}, [2, 5, 8])]
)
def test_a_finding_is_reduced_to_what_it_needs(needed, expected):
    tried = []

    def fails(items):
        tried.append(list(items))
        return needed <= set(items)

    assert smallest(range(10), fails, 100) == expected
    assert len(tried) < 40 and all(items for items in tried)


def test_reducing_ends_with_its_tries():
    tried = []
    found = smallest(range(64), lambda items: not tried.append(items) and 63 in items, 3)
    assert len(tried) == 3 and 63 in found and len(found) < 64


def test_a_case_is_drawn_by_its_name_and_some_of_its_items_can_be_chosen():
    part = module.part_named("runs")
    items = Case.named("runs-3-17").drawn(part)
    kind = part.variant
    again = Case.named("runs-3-17:1,4").drawn(part)
    assert again == [items[1], items[4]] and part.variant == kind
    assert Case.named("runs-3-17:1,4").name == "runs-3-17:1,4"
    assert Case("runs", 3, 18).drawn(part) != items


def test_two_seeds_draw_every_victim_of_every_kind_of_run_many_times():
    counts = dict.fromkeys(runs.VARIANTS, 0)
    kinds: dict[str, int] = {}
    part = runs.Runs()
    for seed in (0, 1):
        for number in range(40):
            items = Case("runs", seed, number).drawn(part)
            counts[part.variant] += 1
            for item in items:
                kinds[item.kind] = kinds.get(item.kind, 0) + 1
    assert min(counts.values()) >= 2
    for kind in ("kill controller", "kill rank", "kill engine", "kill gcs_server", "kill raylet"):
        assert kinds[kind] >= 3, kinds


class Counting:
    """A part whose every third case has a finding that its item 2 makes."""

    name = "programs"

    def draw(self, draws: random.Random) -> list[int]:
        return [0, 1, 2, 3]


@pytest.fixture
def counted(monkeypatch, tmp_path):
    """What go_on does with such cases: (ledger, the names of the cases that were run)."""
    ran = []

    def run(case: Case, limit_s: float) -> Result:
        ran.append(case.name)
        result = Result()
        result.counts["programs"] += 1
        result.back_s["kill rank"] = float(case.number)
        if case.number % 3 == 2 and (case.only is None or 2 in case.only):
            result.problem("it broke")
        return result

    monkeypatch.setattr(Case, "run", run)
    monkeypatch.setattr(module, "part_named", lambda name: Counting())
    times = iter(range(1000))
    monkeypatch.setattr(module.time, "monotonic", lambda: float(next(times)))
    return module.Ledger(tmp_path), ran


def test_it_goes_on_where_it_ended_and_a_finding_has_a_reduced_case(counted, tmp_path, capsys):
    ledger, ran = counted
    # Each look at the clock takes a second: two cases, and then others.
    assert module.go_on(ledger, 0, 6 / 60, ["programs"]) == 0
    first = list(ran)
    assert first == [f"programs-0-{number}" for number in range(len(first))]
    again = module.Ledger(tmp_path)
    assert module.go_on(again, 0, 9 / 60, ["programs"]) == 1
    assert ran[len(first)] == f"programs-0-{len(first)}"
    printed = capsys.readouterr().out
    assert "FOUND\nit broke\nagain: make campaign CASE=programs-0-2:2\n" in printed
    lines = [json.loads(line) for line in (tmp_path / "ledger.jsonl").read_text().splitlines()]
    assert [line["case"] for line in lines] == [f"programs-0-{n}" for n in range(len(lines))]
    assert [line["least"] for line in lines if line["least"]] == ["programs-0-2:2"]
    assert f"| programs | {len(lines)} |" in again.table()
    assert f"| cases with findings | 1 of {len(lines)} |" in again.table()


def test_processes_and_files_that_a_case_leaves_are_seen_and_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(cases, "LEFT_S", 0.3)
    mark = f"test-{os.getpid()}"
    left = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(60)"], env={**os.environ, "MARK": mark}
    )
    eventually(lambda: left.pid in marked(mark, tmp_path))
    (tmp_path / "tmp/ranks").mkdir(parents=True)
    (tmp_path / f"tmp/hybridflow-{os.getuid()}").mkdir()
    process, folder = left_behind(mark, tmp_path)
    assert process.startswith(f"process {left.pid} is left: ") and "time.sleep(60)" in process
    assert folder == "ranks is left in the folder of temporary files"
    assert left.wait() == -9 and not marked(mark, tmp_path)


class LeavesMemory(Counting):
    """A part that forgets a segment."""

    def do(self, items: list[int], folder: object) -> Result:
        Path("/dev/shm/forgotten").touch()
        return Result()


def test_shared_memory_that_a_case_leaves_is_seen_and_is_its_own(monkeypatch, capsys):
    if not cases._apart():
        pytest.skip("no file system can be mounted here")
    monkeypatch.setattr(cases, "LEFT_S", 0.1)
    script = (
        "import os, sys; os.environ['HYBRIDFLOW_TESTS'] = str(os.getpid())\n"
        "from campaign import cases, test_campaign\n"
        "cases.LEFT_S = 0.1\n"
        "cases.Case('programs', 0, 0).answer(test_campaign.LeavesMemory())"
    )
    said = subprocess.run(
        [*cases._apart(), sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": cases._import_path()},
        capture_output=True,
        text=True,
    )
    assert '"problems": ["/dev/shm/forgotten is left"]' in said.stdout, said
    assert not Path("/dev/shm/forgotten").exists()
