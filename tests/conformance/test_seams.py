"""Our trackers, planner, commands and the example's environment keep the contracts of their kinds."""

from __future__ import annotations

import json
import sys

import pytest
from helpers.paths import ROOT

from hybridflow.backends.trackers.jsonl import JsonlTracker
from hybridflow.backends.trackers.tensorboard import TensorBoardTracker
from hybridflow.core.contracts.environment import Start
from hybridflow.core.plugins import registry
from hybridflow.kit.testing import (
    CommandConformance,
    EnvironmentConformance,
    PlannerConformance,
    TrackerConformance,
)


class TestJsonl(TrackerConformance):
    @pytest.fixture
    def make(self):
        return JsonlTracker

    def logged(self, folder):
        path = folder / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        rows = [json.loads(line) for line in lines]
        return {
            (row["step"], name): value
            for row in rows
            for name, value in row.items()
            if name not in ("step", "timestamp")
        }


class TestTensorBoard(TrackerConformance):
    @pytest.fixture
    def make(self):
        pytest.importorskip("tensorboard")
        return TensorBoardTracker

    def logged(self, folder):
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(folder / "tensorboard"))
        events.Reload()
        names = events.Tags()["scalars"]
        return {(event.step, name): event.value for name in names for event in events.Scalars(name)}


class TestAutoMapping(PlannerConformance):
    @pytest.fixture
    def planner(self):
        return registry().get("planner", "auto-mapping")()

    @pytest.fixture
    def cluster(self):
        return "a100-80gb:1x2"


class TestCommands(CommandConformance):
    @pytest.fixture(
        params=["run", "show", "plan", "calibrate", "reshard", "plugins", "doctor", "new"]
    )
    def command(self, request):
        self.name = request.param
        return registry().get("command", self.name)()

    def summary(self, command):
        return registry().descriptor("command", self.name).capabilities.summary


class TestCalculator(EnvironmentConformance):
    @pytest.fixture
    def make(self, monkeypatch):
        monkeypatch.syspath_prepend(str(ROOT / "examples"))
        import calculator_tool

        yield calculator_tool.Calculator
        sys.modules.pop("calculator_tool", None)


class TestMaze(EnvironmentConformance):
    @pytest.fixture
    def make(self, monkeypatch):
        monkeypatch.syspath_prepend(str(ROOT / "examples"))
        import maze

        yield maze.Maze
        sys.modules.pop("maze", None)

    @staticmethod
    def start(prompt="go", seed=0, **meta):
        return Start(prompt, {"seed": 3 + seed, **meta}, seed)

    def test_every_maze_can_be_left_by_what_is_said_of_it(self, make):
        """A walk that knows only which sides are open, depth first, comes to the exit."""
        for seed in range(30):
            maze = make()
            said = maze.reset(Start("go", {"seed": seed}, 0))
            at, seen, path = (0, 0), {(0, 0)}, []
            back = {"n": "s", "s": "n", "e": "w", "w": "e"}
            for _ in range(40):
                sides = said.text.split(">")[0].lower()
                beside = {side: maze.beside(at, side) for side in sides}
                new = [side for side in sides if beside[side] not in seen]
                step = new[0] if new else back[path.pop()]
                path += [step] if new else []
                at = beside[step]
                seen.add(at)
                said = maze.step(self.turn(step))
                if said.done:
                    break
            assert said.done and said.reward == 1.0, seed
