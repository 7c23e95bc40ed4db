"""Coefficients that adapt from step to step.

An algorithm keeps one and saves its `state_dict` in every checkpoint.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from typing import Any

import torch


class AdaptiveKL:
    """Proportional controller of the KL coefficient beta (arXiv:1909.08593, section 2.2).

        beta <- beta (1 + clip(kl / target - 1, -0.2, 0.2) n / horizon)

    `init`: the first beta; `target`: the wanted KL in nats, per token or per sequence like the KL
    that `update` gets; `horizon`: the number of sequences over which beta adapts. Raises ValueError
    if one of them is not a positive finite number.
    """

    def __init__(self, init: float, target: float, horizon: float):
        _check_positive("AdaptiveKL", init=init, target=target, horizon=horizon)
        self.value = float(init)
        self.target = float(target)
        self.horizon = float(horizon)

    def update(self, kl: float, n: int) -> float:
        """Move beta by the mean KL `kl` of a step, measured on `n` sequences; return the new beta.

        Raises ValueError if kl is not finite, n is negative, or n >= 5 horizon: a step may lower
        beta by the fraction 0.2 n / horizon, which must stay below 1.
        """
        kl = float(kl)
        if not math.isfinite(kl):
            raise ValueError(f"AdaptiveKL.update: kl must be a finite number, got {kl}")
        if not 0 <= n < 5 * self.horizon:
            raise ValueError(
                "AdaptiveKL.update: n must be at least 0 and below "
                f"5 * horizon = {5 * self.horizon:g}, got {n}: "
                "one step could make the coefficient negative; raise horizon"
            )

        # Clipped, so that one odd step moves beta by a fifth of n / horizon at most.
        error = min(max(kl / self.target - 1.0, -0.2), 0.2)
        self.value *= 1.0 + error * n / self.horizon
        return self.value

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs: the coefficient."""
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from the state of a checkpoint."""
        self.value = float(state["value"])


class LagrangeMultiplier:
    """The multiplier lam of the cost constraint E[cost] <= limit (arXiv:2310.12773).

    It is ascended in its logarithm, by the excess e = mean raw cost over the window - limit:

        log l <- min(log l + lr l e, log maximum)
        lam    = min(l exp(damping e), maximum)

    Costs follow lam with a delay, so that l alone would oscillate. The damping is the proportional
    term of PID Lagrangian methods (arXiv:2007.03964), in the logarithm; without it lam = l, as in
    the paper.

    `init`: the first lam, in (0, maximum]; `lr`: step size (> 0); `limit`: the highest acceptable
    mean cost, of any sign; `maximum`: upper bound of lam; `window`: how many of the latest
    sequences the mean is taken over (>= 1); `damping`: >= 0. Raises ValueError if one of them is
    out of its range.
    """

    def __init__(
        self,
        init: float,
        lr: float,
        limit: float,
        maximum: float,
        window: int,
        damping: float = 0.0,
    ):
        # Checked one after the other, so that the message names the setting.
        _check_positive("LagrangeMultiplier", init=init, lr=lr, maximum=maximum, window=window)
        if init > maximum:
            raise ValueError(
                "LagrangeMultiplier: init must not exceed maximum, "
                f"got init={init}, maximum={maximum}"
            )
        if window != int(window):
            raise ValueError(
                f"LagrangeMultiplier: window must be a whole number of sequences, got {window}"
            )
        if not math.isfinite(limit):
            raise ValueError(f"LagrangeMultiplier: limit must be a finite number, got {limit}")
        if not (math.isfinite(damping) and damping >= 0):
            raise ValueError(
                f"LagrangeMultiplier: damping must be a finite number of at least 0, got {damping}"
            )

        self.log_value = math.log(init)
        """log l."""
        self.lr = float(lr)
        self.limit = float(limit)
        self.maximum = float(maximum)
        self.damping = float(damping)
        self.costs: deque[float] = deque(maxlen=int(window))
        """The window: raw costs of the latest sequences."""

    @property
    def value(self) -> float:
        """lam."""
        # The exponent is compared, since exp of a large one overflows.
        exponent = self.log_value + self.damping * self.excess
        return self.maximum if exponent >= math.log(self.maximum) else math.exp(exponent)

    @property
    def excess(self) -> float:
        """Mean cost over the window less the limit; 0 while the window is empty."""
        if not self.costs:
            return 0.0
        return math.fsum(self.costs) / len(self.costs) - self.limit

    def update(self, costs: torch.Tensor | Iterable[float]) -> float:
        """Add the raw costs (without KL) of a step's sequences, [B], and return the new lam.

        Without any cost nothing changes. Raises ValueError, and changes nothing, if a cost is not
        finite.
        """
        if isinstance(costs, torch.Tensor):
            costs = costs.detach().double().flatten().tolist()

        # All are checked before any enters the window.
        values = [float(cost) for cost in costs]
        infinite = [cost for cost in values if not math.isfinite(cost)]
        if infinite:
            raise ValueError(
                "LagrangeMultiplier.update: costs must be finite, "
                f"got {len(infinite)} that are not: {infinite[:3]}"
            )

        # lr l excess is the gradient step on log l, since d l / d log l = l.
        if values:
            self.costs.extend(values)
            ascent = self.lr * math.exp(self.log_value) * self.excess
            self.log_value = min(self.log_value + ascent, math.log(self.maximum))
        return self.value

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint: log l and the window."""
        return {"log_value": self.log_value, "costs": list(self.costs)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from the state of a checkpoint, cut to this object's maximum and window."""
        self.log_value = min(float(state["log_value"]), math.log(self.maximum))
        costs = [float(cost) for cost in state["costs"]]
        self.costs = deque(costs, maxlen=self.costs.maxlen)


def _check_positive(owner: str, **values: float) -> None:
    """Raise ValueError unless all values are positive and finite."""
    for name, value in values.items():
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"{owner}: {name} must be a positive finite number, got {value}")
