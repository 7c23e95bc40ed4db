"""What the tests of rollout engines share: weights for an engine, requests, and what an author says of theirs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise

import numpy as np
import pytest
import torch

from hybridflow.core.contracts.rollout import Completion, Request, RolloutEngine, SamplingParams
from hybridflow.core.values.weights import Box
from hybridflow.kit.testing.checks import missing_fixture, require_close
from hybridflow.kit.testing.models import Reference, reference

PROMPTS = ([5], [1, 2, 3, 4, 5, 6, 7], [9, 9, 30], [5, 17, 11, 2])


def give_weights(
    engine: RolloutEngine,
    parameters: Mapping[str, torch.Tensor],
    version: int,
    pieces: int = 1,
    end: bool = True,
) -> None:
    """An update with these canonical parameters, each in `pieces` boxes along its first dimension."""
    engine.begin_update(version)
    for name in engine.layout().params:
        whole = parameters[name]
        cuts = np.linspace(0, len(whole), min(pieces, len(whole)) + 1).astype(int).tolist()
        for start, stop in pairwise(cuts):
            box = Box((start, *(0 for _ in whole.shape[1:])), (stop, *whole.shape[1:]))
            engine.receive(name, box, whole[start:stop])
    if end:
        engine.end_update()


def requests(
    prompts: Sequence[Sequence[int]], sampling: SamplingParams, first_seed: int = 100
) -> list[Request]:
    """One per prompt, ids in no particular order, each with a seed of its own."""
    return [
        Request(
            7 * ((at * 5 + 3) % 101) + at,
            np.asarray(p, dtype=np.int64),
            sampling,
            seed=first_seed + at,
        )
        for at, p in enumerate(prompts)
    ]


class EngineBase:
    """Flags, the fixture `start`, and helpers."""

    architectures: Sequence[str] = ("qwen2", "llama")
    width = 32
    """Of the models: heads have a quarter of it, and not every kernel takes heads of 8."""
    aborts = True
    """Whether `abort` ends running requests."""
    sleeps = True
    """Whether `sleep` and `wake` do something."""
    prefixes = True
    """Whether a request may carry a response prefix (partial rollouts, turns)."""
    filters = True
    """Whether top_k, top_p and min_p are followed."""
    biases = True
    """Whether logit_bias is followed."""
    boxes = True
    """Whether `receive` takes parts of a parameter (False: whole parameters alone)."""
    tolerance = 2e-3
    """Of logprobs, in nats: what the rollout engine and the trainer may compute differently."""
    samples = 2000
    """Sequences drawn for the tests of distributions."""

    @pytest.fixture
    def start(self) -> Callable[..., RolloutEngine]:
        return missing_fixture(self, "start", "a function ModelSpec -> your engine, started")

    def speaking(
        self, start: Callable[..., RolloutEngine], ref: Reference, version: int = 3
    ) -> RolloutEngine:
        engine = start(ref.spec)
        give_weights(engine, ref.parameters, version)
        return engine

    def references(self) -> Iterator[Reference]:
        for architecture in self.architectures:
            yield reference(architecture, width=self.width)

    def _logprobs(
        self, ref: Reference, prompt, done: Completion, temperature: float, more: str = ""
    ) -> None:
        with torch.no_grad():
            expected = ref.outputs(
                torch.tensor(prompt), torch.from_numpy(done.response_ids), temperature
            )["logprobs"]
        require_close(
            torch.as_tensor(done.logprobs),
            expected,
            self.tolerance,
            what=f"logprobs after {list(prompt)} at temperature {temperature}",
            likely=more
            or "logprobs are of another position, of other weights, or of logits before the temperature (they are of "
            "softmax(logits / temperature); at temperature 0 of softmax(logits))",
        )

    def _run(
        self,
        engine: RolloutEngine,
        prompts,
        first_seed: int = 100,
        max_tokens: int = 12,
        **sampling,
    ) -> list[Completion]:
        return engine.generate(
            requests(prompts, SamplingParams(max_tokens=max_tokens, **sampling), first_seed)
            if prompts
            else []
        )

    def _ids(self, done: Sequence[Completion]) -> list[list[int]]:
        return [c.response_ids.tolist() for c in done]
