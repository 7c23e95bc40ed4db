"""Everything that ships keeps the contracts, tested by the kit that third parties use."""

from __future__ import annotations

import pytest

from hybridflow.backends.data.arithmetic import ArithmeticSource
from hybridflow.backends.data.jsonl import JsonlSource
from hybridflow.backends.data.parquet import ParquetSource
from hybridflow.backends.fsdp.backend import FSDPBackend
from hybridflow.backends.fsdp.config import FSDPConfig
from hybridflow.backends.inline.runtime import InlineRuntime
from hybridflow.backends.rewards.exact_match import ExactMatch
from hybridflow.backends.rewards.math import MathReward
from hybridflow.core.contracts.data_source import DataConfig
from hybridflow.core.contracts.protocol import Protocol
from hybridflow.core.contracts.reward import FunctionReward
from hybridflow.core.values.parallel import ParallelLayout
from hybridflow.kit.testing import (
    DataSourceConformance,
    ProtocolConformance,
    RewardConformance,
    RuntimeConformance,
    TrainingBackendConformance,
    sample,
)
from hybridflow.kit.testing.runs import even_tokens


class TestProtocols(ProtocolConformance):
    @pytest.fixture(
        params=[Protocol.ONE_TO_ALL, Protocol.THREE_D, Protocol.PP_ONLY, Protocol.PP_AS_DP],
        ids=lambda protocol: protocol.name,
    )
    def protocol(self, request):
        return request.param


class TestAllToAll(ProtocolConformance):
    @pytest.fixture
    def protocol(self):
        return Protocol.ALL_TO_ALL

    def argument(self, value, shape):
        return [value] * shape.layout.world


class TestRankZero(ProtocolConformance):
    returns_input = True

    @pytest.fixture
    def protocol(self):
        return Protocol.RANK_ZERO


class TestDP(ProtocolConformance):
    layouts = (ParallelLayout(), ParallelLayout(dp=2), ParallelLayout(dp=5))

    @pytest.fixture
    def protocol(self):
        return Protocol.DP


class TestMicroDP(ProtocolConformance):
    generations = ((1, 1), (1, 2), (2, 1), (2, 2))

    @pytest.fixture
    def protocol(self):
        return Protocol.MICRO_DP


class TestFSDP(TrainingBackendConformance):
    backend, config = FSDPBackend, FSDPConfig()


class TestFSDPWithExperts(TestFSDP):
    architectures = ("qwen3_moe",)
    kinds = ("policy",)
    layouts = ()


class TestInline(RuntimeConformance):
    collectives = processes = False

    @pytest.fixture
    def runtime(self):
        runtime = InlineRuntime()
        runtime.start()
        yield runtime
        runtime.shutdown()


class TestRay(RuntimeConformance):
    replaces = True

    @pytest.fixture
    def runtime(self, ray_runtime):
        return ray_runtime


class TestExactMatch(RewardConformance):
    @pytest.fixture
    def reward(self):
        return ExactMatch()

    def expected(self):
        return [
            (sample("42"), 1.0),
            (sample(" 42\n"), 1.0),
            (sample("042"), 0.0),
            (sample(""), 0.0),
        ]


class TestMath(RewardConformance):
    @pytest.fixture(scope="class")
    def reward(self):
        return MathReward()

    def expected(self):
        return [(sample("so it is \\boxed{42}"), 1.0), (sample("84/2"), 1.0), (sample("41"), 0.0)]


class TestAFunction(RewardConformance):
    @pytest.fixture
    def reward(self):
        return FunctionReward(even_tokens)


class TestArithmetic(DataSourceConformance):
    @pytest.fixture
    def open_source(self):
        return lambda: ArithmeticSource(DataConfig(source="arithmetic"))


class TestJsonl(DataSourceConformance):
    @pytest.fixture
    def open_source(self, tmp_path):
        (tmp_path / "rows.jsonl").write_text(
            '{"prompt": "a", "n": 1}\n{"prompt": "b", "tags": ["x", {"y": null}]}\n'
        )
        return lambda: JsonlSource(DataConfig(source="jsonl", path=str(tmp_path / "rows.jsonl")))


class TestParquet(DataSourceConformance):
    @pytest.fixture
    def open_source(self, tmp_path):
        arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        table = arrow.table(
            {"prompt": ["a", "b", "c"], "tags": [["x"], [], ["y", "z"]], "score": [1.5, 2.0, None]}
        )
        parquet.write_table(table, tmp_path / "rows.parquet")
        return lambda: ParquetSource(
            DataConfig(source="parquet", path=str(tmp_path / "rows.parquet"))
        )
