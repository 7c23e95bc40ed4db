"""Coefficients that adapt from step to step: an algorithm keeps one and saves its `state_dict` in every checkpoint."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from typing import Any

import torch


class AdaptiveKL:
    """Proportional controller of the KL coefficient beta (arXiv:1909.08593, section 2.2).

    beta <- beta (1 + clip(kl / target - 1, -0.2, 0.2) n / horizon)

    `init`: the first beta (> 0); `target`: the wanted KL, in nats, in the unit of the KL that `update`
    gets; `horizon`: sequences over which beta adapts. Raises ValueError if one of them is not a positive finite number.
    """

    def __init__(self, init: float, target: float, horizon: float):
        _check_positive("AdaptiveKL", init=init, target=target, horizon=horizon)
        self.value = float(init)
        self.target, self.horizon = float(target), float(horizon)

    def update(self, kl: float, n: int) -> float:
        """`kl`: the measured mean KL of the step, in the unit of `target`; `n`: sequences that it was measured on.
        Returns the new beta. Raises ValueError if kl is not finite, or if n >= 5 horizon could take beta to 0 or less.
        """
        kl = float(kl)
        if not math.isfinite(kl):
            raise ValueError(f"AdaptiveKL.update: kl must be a finite number, got {kl}")
        if not 0 <= n < 5 * self.horizon:
            raise ValueError(
                f"AdaptiveKL.update: n must be at least 0 and below 5 * horizon = {5 * self.horizon:g}, got {n}: "
                "one step could make the coefficient negative; raise horizon"
            )
        error = min(max(kl / self.target - 1.0, -0.2), 0.2)
        self.value *= 1.0 + error * n / self.horizon
        return self.value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = float(state["value"])


class LagrangeMultiplier:
    """The multiplier lam of the cost constraint E[cost] <= limit, ascended in its logarithm (arXiv:2310.12773).

    log l <- min(log l + lr l (mean raw cost over the window - limit), log maximum)
    lam = min(l exp(damping (mean raw cost over the window - limit)), maximum)

    Costs answer to lam with a delay, so that l alone swings; the second line is the proportional term of PID Lagrangian
    methods (arXiv:2007.03964), in the logarithm. 0, its default, leaves lam = l, the paper's.

    `init`: the first lam, in (0, maximum]; `lr`: step size (> 0); `limit`: the highest acceptable mean cost, any sign;
    `maximum`: upper bound of lam; `window`: how many of the latest sequences the mean is taken over (>= 1);
    `damping`: >= 0.
    Raises ValueError if one of them is out of its range.
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
        _check_positive("LagrangeMultiplier", init=init, lr=lr, maximum=maximum, window=window)
        if init > maximum:
            raise ValueError(
                f"LagrangeMultiplier: init must not exceed maximum, got init={init}, maximum={maximum}"
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
        self.lr, self.limit, self.maximum, self.damping = (
            float(lr),
            float(limit),
            float(maximum),
            float(damping),
        )
        self.costs: deque[float] = deque(maxlen=int(window))

    @property
    def value(self) -> float:
        exponent = self.log_value + self.damping * self.excess
        return self.maximum if exponent >= math.log(self.maximum) else math.exp(exponent)

    @property
    def excess(self) -> float:
        """Mean cost over the window less the limit; 0 without any."""
        return math.fsum(self.costs) / len(self.costs) - self.limit if self.costs else 0.0

    def update(self, costs: torch.Tensor | Iterable[float]) -> float:
        """`costs`: [B], the raw cost (no KL in it) of each sequence of the step; they join the window. Returns the new
        lam; without any cost nothing changes. Raises ValueError, and changes nothing, if a cost is not finite."""
        if isinstance(costs, torch.Tensor):
            costs = costs.detach().double().flatten().tolist()
        new = [float(cost) for cost in costs]
        bad = [cost for cost in new if not math.isfinite(cost)]
        if bad:
            raise ValueError(
                f"LagrangeMultiplier.update: costs must be finite, got {len(bad)} that are not: {bad[:3]}"
            )
        if new:
            self.costs.extend(new)
            ascent = self.lr * math.exp(self.log_value) * self.excess
            self.log_value = min(self.log_value + ascent, math.log(self.maximum))
        return self.value

    def state_dict(self) -> dict[str, Any]:
        return {"log_value": self.log_value, "costs": list(self.costs)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.log_value = min(float(state["log_value"]), math.log(self.maximum))
        self.costs = deque((float(cost) for cost in state["costs"]), maxlen=self.costs.maxlen)


def _check_positive(owner: str, **values: float) -> None:
    for name, value in values.items():
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"{owner}: {name} must be a positive finite number, got {value}")
