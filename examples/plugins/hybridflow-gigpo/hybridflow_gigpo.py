"""GiGPO: GRPO over episodes, and inside each group over the actions taken in states that recur (arXiv:2505.10978)."""

from __future__ import annotations

import attrs
import torch

from hybridflow.algorithms import functional as F
from hybridflow.algorithms.grpo import GRPO, GRPOConfig


@attrs.frozen
class GiGPOConfig(GRPOConfig):
    """Group-in-group policy optimisation. Needs an [environment], whose answers name their states."""

    step_weight: float = 1.0
    """omega: weight of the advantage of a step beside that of its episode."""
    gamma: float = 0.95
    """Discount per turn of the rewards that follow a step."""
    how: str = "token-mean"
    """The mean of the loss, as of every policy-gradient algorithm."""


class GiGPO(GRPO):
    """GRPO with one thing changed, the advantages; its `step` is GRPO's.

    A = A_episode + omega A_step. A step is compared with those that its group took in the same state.
    """

    Config = GiGPOConfig

    def advantages(
        self,
        scores,
        group,
        loss_mask,
        turn,
        turn_rewards,
        turn_states,
        old_logprobs=None,
        ref_logprobs=None,
    ):
        made = super().advantages(scores, group, loss_mask, old_logprobs, ref_logprobs)
        steps, compared = step_advantages(
            turn_rewards, turn_states, group, self.config.gamma, self.config.scale, scores.isnan()
        )
        per_token = steps.gather(1, turn.long().clamp(0, steps.shape[1] - 1)) * loss_mask
        made["advantages"] = made["advantages"] + self.config.step_weight * per_token
        return {**made, "compared_steps": compared}


def step_advantages(rewards, states, group, gamma, scale="std", failed=None):
    """(advantage of each turn [B, most turns], 0 where there is none; share of turns whose state recurred in their group).

    rewards, states: per row a list with an entry per turn; group: int64 [B]; failed: bool [B], rows that are left out.
    """
    returns, keys, places = [], [], []
    for row, (earned, visited) in enumerate(zip(rewards, states, strict=True)):
        if failed is not None and failed[row]:
            continue
        to_go = 0.0
        for number in reversed(range(len(earned))):
            to_go = earned[number] + gamma * to_go
            returns.append(to_go)
            keys.append((int(group[row]), visited[number]))
            places.append((row, number))
    if not keys:  # no turn was taken: openings filled the responses
        return torch.zeros(len(rewards), 1), 0.0
    numbers = {key: n for n, key in enumerate(dict.fromkeys(keys))}
    of = torch.tensor([numbers[key] for key in keys], dtype=torch.int64)
    found = F.group_normalized(torch.tensor(returns), of, scale)
    steps = torch.zeros(len(rewards), max(len(r) for r in rewards))
    rows, turns = torch.tensor(places).unbind(1)
    steps[rows, turns] = found
    sizes = torch.bincount(of, minlength=len(numbers))
    return steps, float((sizes[of] > 1).float().mean())
