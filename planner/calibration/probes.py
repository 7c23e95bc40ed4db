"""What `hybridflow calibrate` runs on a machine: an algorithm whose only step takes the time of its models' verbs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, ClassVar

import attrs
import numpy as np
import torch

from hybridflow.core.contracts.algorithm import Algorithm
from hybridflow.core.contracts.loss import Loss, Term
from hybridflow.core.contracts.role import Role
from hybridflow.core.contracts.rollout import SamplingParams
from hybridflow.core.values.batch import Batch
from hybridflow.core.values.columns import tokens

VERBS = ("infer", "train", "sync", "generate")


@attrs.frozen
class Sample:
    """One call of a role, and how long it took."""

    role: str
    verb: str
    """infer, train, sync or generate."""
    sequences: int
    prompt: int
    """Tokens of each."""
    response: int
    seconds: float
    """The best of the rounds."""


@attrs.frozen
class ProbesConfig:
    """[algorithm] of a calibration."""

    roles: tuple[str, ...] = ()
    lengths: tuple[tuple[int, int, int], ...] = ((2, 8, 8),)
    """(sequences, prompt tokens, response tokens) of each call."""
    rounds: int = 3
    """The best of so many counts."""
    seconds: float = 80.0
    """After so long no further round is begun; the first is always made."""


class Likelihood(Loss):
    """Of the responses; as much work as a policy's loss."""

    def __call__(self, batch, outputs):
        return Term("nll", -outputs["logprobs"])


class Probes(Algorithm):
    """Rounds over all roles, verbs and lengths, so that what disturbs the machine for a while disturbs all of them."""

    Config: ClassVar[type] = ProbesConfig

    def __init__(self, config: ProbesConfig):
        super().__init__(config)
        self.samples: list[Sample] = []

    def roles(self) -> tuple[Role, ...]:
        return tuple(Role(name, trained=True, generates=True) for name in self.config.roles)

    def losses(self):
        return {name: Likelihood() for name in self.config.roles}

    def step(self, ctx: Any) -> None:
        calls = [call for name in self.config.roles for call in self._calls(ctx, name)]
        for _, call in calls:
            call()
        best = [float("inf")] * len(calls)
        until = time.perf_counter() + self.config.seconds
        for round_ in range(self.config.rounds):
            for at, (_, call) in enumerate(calls):
                if round_ and time.perf_counter() > until:
                    break
                best[at] = min(best[at], call())
        self.samples = [
            attrs.evolve(what, seconds=s) for (what, _), s in zip(calls, best, strict=True)
        ]

    def _calls(self, ctx: Any, name: str) -> Iterator[tuple[Sample, Callable[[], float]]]:
        handle = getattr(ctx, name)
        for sequences, prompt, response in self.config.lengths:
            batch = made_up(sequences, prompt, response)
            prompts = batch.select(("prompt_ids", "group", "meta"))
            sampling = attrs.evolve(ctx.sampling, max_tokens=response, ignore_stop=True)
            for verb in VERBS:  # sync has what train has changed, and so generate nothing to sync
                call = partial(_timed, handle, verb, batch, prompts, sampling)
                yield Sample(name, verb, sequences, prompt, response, 0.0), call


def _timed(handle: Any, verb: str, batch: Batch, prompts: Batch, sampling: SamplingParams) -> float:
    """Seconds until the result is there."""
    started = time.perf_counter()
    if verb == "infer":
        handle.logprobs(batch)[handle.role.column]
    elif verb == "train":
        handle.update((batch, Likelihood())).result()
    elif verb == "sync":
        handle.sync().result()
    else:
        handle.generate(prompts, sampling=sampling)["response_ids"]
    return time.perf_counter() - started


def made_up(sequences: int, prompt: int, response: int) -> Batch:
    generator = np.random.default_rng(0)

    def ids(length: int):
        return tokens(
            [torch.from_numpy(generator.integers(3, 9, length)) for _ in range(sequences)],
            torch.int64,
        )

    ones = tokens([torch.ones(response, dtype=torch.uint8) for _ in range(sequences)], torch.uint8)
    return Batch(
        {
            "prompt_ids": ids(prompt),
            "response_ids": ids(response),
            "loss_mask": ones,
            "group": torch.arange(sequences),
            "meta": [{}] * sequences,
        }
    )
