"""Resharding: weights from any layout to any other. Planned and priced first (plan), then moved bucket by bucket (exchange)."""

from hybridflow.core.resharding.gather import gather_plan
from hybridflow.core.resharding.plan import ReshardError, ReshardPlan, Transfer, plan_reshard

__all__ = ["ReshardError", "ReshardPlan", "Transfer", "gather_plan", "plan_reshard"]
