"""Every algorithm that ships under the kit that third parties use."""

from __future__ import annotations

import pytest
from helpers.paths import EVERY

from hybridflow.algorithms.cispo import CISPO, CISPOConfig
from hybridflow.algorithms.cost_model import CostModel, CostModelConfig
from hybridflow.algorithms.dapo import DAPO, DAPOConfig
from hybridflow.algorithms.dpo import DPO, DPOConfig
from hybridflow.algorithms.dppo import DPPO, DPPOConfig
from hybridflow.algorithms.dr_grpo import DrGRPO, DrGRPOConfig
from hybridflow.algorithms.gmpo import GMPO, GMPOConfig
from hybridflow.algorithms.grpo import GRPO, GRPOConfig
from hybridflow.algorithms.gspo import GSPO, GSPOConfig
from hybridflow.algorithms.opo import OPO, OPOConfig
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
from hybridflow.algorithms.sapo import SAPO, SAPOConfig
from hybridflow.algorithms.sft import SFT, SFTConfig
from hybridflow.core.contracts.algorithm import Algorithm
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


EVERYTHING = dict(
    prompts_per_step=4, group_size=4, mini_batch_size=8, kl_coef=0.1, dual_clip=3.0, entropy_coef=0.01, how="token-mean",
    correction_level="sequence",
)  # fmt: skip
"""Off-policy, with the KL to a reference, dual clip and the correction for the rollout engine."""
GROUPS = dict(prompts_per_step=4, group_size=4)
OFF_POLICY = dict(prompts_per_step=4, group_size=4, mini_batch_size=8)
OURS = [
    PPO(
        PPOConfig(prompts_per_step=8, mini_batch_size=4, epochs=2, kl_target=0.1, entropy_coef=0.01)
    ),
    PPO(PPOConfig(prompts_per_step=8, kl_coef=0.0)),
    GRPO(GRPOConfig(**GROUPS)),
    GRPO(GRPOConfig(**EVERYTHING, correction="truncate")),
    GRPO(GRPOConfig(**EVERYTHING, correction="mask")),
    SFT(SFTConfig(batch_size=8)),
    RLOO(RLOOConfig(prompts_per_step=4, kl_target=0.01, kl_horizon=100.0)),
    ReMax(ReMaxConfig(prompts_per_step=8, group_size=1, epochs=2)),
    ReMax(ReMaxConfig(prompts_per_step=8, group_size=2, epochs=2)),
    ReinforcePP(ReinforcePPConfig(prompts_per_step=8, mini_batch_size=4)),
    ReinforcePPBaseline(ReinforcePPBaselineConfig(**GROUPS)),
    DrGRPO(DrGRPOConfig(**GROUPS, length=4)),
    DAPO(DAPOConfig(**OFF_POLICY, overlong_cache=2)),
    GSPO(GSPOConfig(**OFF_POLICY)),
    CISPO(CISPOConfig(**OFF_POLICY)),
    SAPO(SAPOConfig(**OFF_POLICY)),
    GMPO(GMPOConfig(**OFF_POLICY)),
    DPPO(DPPOConfig(**OFF_POLICY)),
    OPO(OPOConfig(**GROUPS)),
]

AHEAD = [OURS[0], OURS[3], OURS[12]]
"""Those that run a step ahead, and with carried responses, by default: PPO, GRPO with everything, and DAPO."""


def anew(algorithm: Algorithm) -> Algorithm:
    """One that has no state of another test."""
    return type(algorithm)(algorithm.config)


class TestOurs(AlgorithmConformance):
    @pytest.fixture(params=OURS, ids=lambda algorithm: type(algorithm).__name__)
    def algorithm(self, request):
        test = request.node.originalname
        if test == "test_it_runs_a_step_ahead" and not EVERY and request.param not in AHEAD:
            pytest.skip("of the whole matrix: make matrix")
        return anew(request.param)


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


class TestPairs(AlgorithmConformance):
    @pytest.fixture(
        params=[
            DPO(DPOConfig(pairs_per_step=4, mini_batch_size=4)),
            RewardModel(RewardModelConfig(pairs_per_step=4, margin=0.5)),
            CostModel(CostModelConfig(pairs_per_step=4)),
        ],
        ids=lambda algorithm: type(algorithm).__name__,
    )
    def algorithm(self, request):
        self.models = {"RewardModel": ["reward"], "CostModel": ["cost"]}.get(
            type(request.param).__name__, []
        )
        return anew(request.param)

    def tables(self):
        return {**PAIRS, **dict.fromkeys(self.models, TABLES["actor"])}
