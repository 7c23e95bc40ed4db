"""The run behind `hybridflow calibrate`: an algorithm whose step times each verb of its models."""

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
    """One of VERBS."""
    sequences: int
    prompt: int
    """Tokens of each prompt."""
    response: int
    """Tokens of each response."""
    seconds: float
    """Duration of the fastest round."""


Call = tuple[Sample, Callable[[], float]]
"""A sample whose seconds are still 0, and the function that runs the call and returns them."""


@attrs.frozen
class ProbesConfig:
    """The models, lengths and rounds of a calibration."""

    roles: tuple[str, ...] = ()
    """Names of the models that are measured."""
    lengths: tuple[tuple[int, int, int], ...] = ((2, 8, 8),)
    """Sequences, prompt tokens and response tokens of each call."""
    rounds: int = 3
    """Number of measurements of each call; the fastest counts."""
    seconds: float = 80.0
    """After this time no further round begins; the first is always complete."""


class Likelihood(Loss):
    """The negative log-likelihood of the responses; as much work as a policy's loss."""

    def __call__(self, batch, outputs):
        return Term("nll", -outputs["logprobs"])


class Probes(Algorithm):
    """Times all verbs of all roles, round by round.

    A round runs every call once, so that a temporary slowdown of the machine affects all alike.
    """

    Config: ClassVar[type] = ProbesConfig

    def __init__(self, config: ProbesConfig):
        super().__init__(config)
        self.samples: list[Sample] = []

    def roles(self) -> tuple[Role, ...]:
        return tuple(Role(name, trained=True, generates=True) for name in self.config.roles)

    def losses(self):
        return {name: Likelihood() for name in self.config.roles}

    def step(self, ctx: Any) -> None:
        """Fill `samples` with the fastest round of each call."""
        calls: list[Call] = []
        for name in self.config.roles:
            calls += self._calls(ctx, name)

        # First calls allocate and compile: they do not count.
        for _, call in calls:
            call()

        # Then round by round while time is left; a round may end in the middle.
        best = [float("inf")] * len(calls)
        until = time.perf_counter() + self.config.seconds
        for number in range(self.config.rounds):
            for i, (_, call) in enumerate(calls):
                if number and time.perf_counter() > until:
                    break
                best[i] = min(best[i], call())

        self.samples = [
            attrs.evolve(sample, seconds=seconds)
            for (sample, _), seconds in zip(calls, best, strict=True)
        ]

    def _calls(self, ctx: Any, name: str) -> Iterator[Call]:
        """Yield the calls of a role: all verbs, for each of the lengths."""
        handle = getattr(ctx, name)
        for sequences, prompt, response in self.config.lengths:
            batch = made_up(sequences, prompt, response)
            prompts = batch.select(("prompt_ids", "group", "meta"))
            sampling = attrs.evolve(ctx.sampling, max_tokens=response, ignore_stop=True)
            # In this order sync has what train has changed, and generate has nothing to sync.
            for verb in VERBS:
                call = partial(_timed, handle, verb, batch, prompts, sampling)
                yield Sample(name, verb, sequences, prompt, response, 0.0), call


def _timed(handle: Any, verb: str, batch: Batch, prompts: Batch, sampling: SamplingParams) -> float:
    """Return the seconds until the result of one call has arrived."""
    # Results are asked for, as calls return before the work is done.
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


def made_up(sequences: int, prompt: int, response: int, group: int = 1) -> Batch:
    """Return a batch of sequences of random tokens with these lengths, the same each time.

    Every `group` of them have one prompt.
    """
    # Token ids from 3 on: special tokens are left out.
    generator = np.random.default_rng(0)

    def ids(length: int):
        """Return an int64 column of random token ids, `length` in each row."""
        rows = [torch.from_numpy(generator.integers(3, 9, length)) for _ in range(sequences)]
        return tokens(rows, torch.int64)

    owners = np.arange(sequences) // group
    masks = [torch.ones(response, dtype=torch.uint8) for _ in range(sequences)]
    return Batch(
        {
            "prompt_ids": ids(prompt).take(owners),
            "response_ids": ids(response),
            "loss_mask": tokens(masks, torch.uint8),
            "group": torch.from_numpy(owners),
            "meta": [{}] * sequences,
        }
    )
