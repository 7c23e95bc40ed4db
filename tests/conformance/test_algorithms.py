"""Every algorithm that ships under the kit that third parties use."""

from __future__ import annotations

import pytest

from hybridflow.algorithms.cispo import CISPO, CISPOConfig
from hybridflow.algorithms.cost_model import CostModel, CostModelConfig
from hybridflow.algorithms.dapo import DAPO, DAPOConfig
from hybridflow.algorithms.dpo import DPO, DPOConfig
from hybridflow.algorithms.dr_grpo import DrGRPO, DrGRPOConfig
from hybridflow.algorithms.grpo import GRPO, GRPOConfig
from hybridflow.algorithms.gspo import GSPO, GSPOConfig
from hybridflow.algorithms.ppo import PPO, PPOConfig
from hybridflow.algorithms.reinforce_pp import (
    ReinforcePP,
    ReinforcePPBaseline,
    ReinforcePPBaselineConfig,
    ReinforcePPConfig,
)
from hybridflow.algorithms.remax import ReMax, ReMaxConfig
from hybridflow.algorithms.reward_model import RewardModel, RewardModelConfig
from hybridflow.algorithms.rloo import RLOO, RLOOConfig
from hybridflow.algorithms.safe_rlhf import SafeRLHF, SafeRLHFConfig
from hybridflow.algorithms.sft import SFT, SFTConfig
from hybridflow.kit.testing import AlgorithmConformance
from hybridflow.kit.testing.runs import TABLES

PAIRS = {
    "data": {
        "source": "helpers.pair_rows:RightAndWrong", "answer": "{chosen}", "response": "{chosen}",
        "rejected": "{rejected}", "unsafe": ["chosen_unsafe", "rejected_unsafe"],
    },
    "actor": {"micro_batch_tokens": 30},
}  # fmt: skip
COSTS = {
    "cost": {"function": "hybridflow.kit.testing.runs:even_tokens"},
    "reward": {"function": "helpers.pair_rows:odd_tokens"},
}


class TestPPO(AlgorithmConformance):
    @pytest.fixture
    def algorithm(self):
        return PPO(
            PPOConfig(
                prompts_per_step=8, mini_batch_size=4, epochs=2, kl_target=0.1, entropy_coef=0.01
            )
        )


class TestGRPO(AlgorithmConformance):
    @pytest.fixture
    def algorithm(self):
        return GRPO(GRPOConfig(prompts_per_step=4, group_size=4))


class TestGRPOWithEverything(AlgorithmConformance):
    """Off-policy, with the KL to a reference, dual clip and the correction for the rollout engine."""

    @pytest.fixture(params=["truncate", "mask"])
    def algorithm(self, request):
        return GRPO(
            GRPOConfig(
                prompts_per_step=4, group_size=4, mini_batch_size=8, kl_coef=0.1, dual_clip=3.0, entropy_coef=0.01,
                how="token-mean", correction=request.param, correction_level="sequence",
            )
        )  # fmt: skip


class TestSFT(AlgorithmConformance):
    @pytest.fixture
    def algorithm(self):
        return SFT(SFTConfig(batch_size=8))


class TestRLOO(AlgorithmConformance):
    @pytest.fixture
    def algorithm(self):
        return RLOO(RLOOConfig(prompts_per_step=4, kl_target=0.01, kl_horizon=100.0))


class TestReMax(AlgorithmConformance):
    @pytest.fixture(params=[1, 2])
    def algorithm(self, request):
        return ReMax(ReMaxConfig(prompts_per_step=8, group_size=request.param, epochs=2))


class TestReinforcePP(AlgorithmConformance):
    @pytest.fixture
    def algorithm(self):
        return ReinforcePP(ReinforcePPConfig(prompts_per_step=8, mini_batch_size=4))


class TestReinforcePPBaseline(AlgorithmConformance):
    @pytest.fixture
    def algorithm(self):
        return ReinforcePPBaseline(ReinforcePPBaselineConfig(prompts_per_step=4, group_size=4))


class TestDrGRPO(AlgorithmConformance):
    @pytest.fixture
    def algorithm(self):
        return DrGRPO(DrGRPOConfig(prompts_per_step=4, group_size=4, length=4))


class TestDAPO(AlgorithmConformance):
    @pytest.fixture
    def algorithm(self):
        return DAPO(
            DAPOConfig(prompts_per_step=4, group_size=4, mini_batch_size=8, overlong_cache=2)
        )


class TestGSPO(AlgorithmConformance):
    @pytest.fixture
    def algorithm(self):
        return GSPO(GSPOConfig(prompts_per_step=4, group_size=4, mini_batch_size=8))


class TestCISPO(AlgorithmConformance):
    @pytest.fixture
    def algorithm(self):
        return CISPO(CISPOConfig(prompts_per_step=4, group_size=4, mini_batch_size=8))


class TestSafeRLHF(AlgorithmConformance):
    @pytest.fixture
    def algorithm(self):
        return SafeRLHF(
            SafeRLHFConfig(
                prompts_per_step=8, cost_limit=0.2, pretrain_coef=0.1, pretrain_batch_size=4
            )
        )

    def tables(self):
        return {**COSTS, "pretrain": TABLES["data"]}


class TestPPOWithoutAReference(AlgorithmConformance):
    @pytest.fixture
    def algorithm(self):
        return PPO(PPOConfig(prompts_per_step=8, kl_coef=0.0))


class TestDPO(AlgorithmConformance):
    @pytest.fixture
    def algorithm(self):
        return DPO(DPOConfig(pairs_per_step=4, mini_batch_size=4))

    def tables(self):
        return PAIRS


class TestRewardModel(AlgorithmConformance):
    @pytest.fixture
    def algorithm(self):
        return RewardModel(RewardModelConfig(pairs_per_step=4, margin=0.5))

    def tables(self):
        return {**PAIRS, "reward": TABLES["actor"]}


class TestCostModel(AlgorithmConformance):
    @pytest.fixture
    def algorithm(self):
        return CostModel(CostModelConfig(pairs_per_step=4))

    def tables(self):
        return {**PAIRS, "cost": TABLES["actor"]}
