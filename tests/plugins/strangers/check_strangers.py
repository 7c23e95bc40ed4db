"""The strangers' plugins against the suites of their kinds."""

import pytest
from strangers.first import First, FirstConfig
from strangers.greet import Greet
from strangers.halves import Halves
from strangers.ledger import Ledger, LedgerConfig
from strangers.settings import HalvesConfig, StripedConfig
from strangers.striped import Striped
from strangers.tinted import Tinted, TintedConfig

from hybridflow.kit.testing import (
    AlgorithmConformance,
    CommandConformance,
    PlannerConformance,
    RolloutEngineConformance,
    TrackerConformance,
    TrainingBackendConformance,
    one_rank,
)


class TestStriped(TrainingBackendConformance):
    backend, config = Striped, StripedConfig()
    kinds = ("policy",)
    topk = False


class TestHalves(RolloutEngineConformance):
    aborts = sleeps = prefixes = filters = biases = proofs = False
    samples = 500

    @pytest.fixture
    def start(self):
        def make(spec):
            engine = Halves(spec, HalvesConfig(), context)
            engine.start()
            return engine

        with one_rank() as context:
            yield make


class TestTinted(AlgorithmConformance):
    @pytest.fixture
    def algorithm(self):
        return Tinted(TintedConfig())


class TestLedger(TrackerConformance):
    @pytest.fixture
    def make(self):
        return lambda: Ledger(LedgerConfig(file="ledger.txt", metric="reward"))

    def keeps(self, metric):
        return metric == "reward"

    def logged(self, folder):
        lines = (folder / "ledger.txt").read_text().splitlines()
        return {(int(step), "reward"): float(value) for step, value in map(str.split, lines)}


class TestGreet(CommandConformance):
    @pytest.fixture
    def command(self):
        return Greet()


class TestFirst(PlannerConformance):
    @pytest.fixture
    def planner(self):
        return First(FirstConfig())

    @pytest.fixture
    def cluster(self):
        return "2"
