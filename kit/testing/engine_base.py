"""The part that all tests of rollout engines share: weights, requests, and an author's flags."""

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

PROMPTS = (
    [5],
    [1, 2, 3, 4, 5, 6, 7],
    [9, 9, 30],
    [5, 17, 11, 2],
)
"""Token ids of the prompts that most tests use; their lengths differ, so a batch is ragged."""


def give_weights(
    engine: RolloutEngine,
    parameters: Mapping[str, torch.Tensor],
    version: int,
    pieces: int = 1,
    end: bool = True,
) -> None:
    """Update the engine's weights with these canonical parameters.

    Each parameter goes in `pieces` boxes along its first dimension (fewer where it is shorter).
    Without `end` the update stays open.
    """
    engine.begin_update(version)
    for name in engine.layout().params:
        values = parameters[name]
        others = values.shape[1:]
        count = min(pieces, len(values))
        ends = np.linspace(0, len(values), count + 1).astype(int)

        # A box covers all of the other dimensions.
        for start, stop in pairwise(ends.tolist()):
            box = Box((start, *(0 for _ in others)), (stop, *others))
            engine.receive(name, box, values[start:stop])
    if end:
        engine.end_update()


def requests(
    prompts: Sequence[Sequence[int]], sampling: SamplingParams, first_seed: int = 100
) -> list[Request]:
    """Return one request per prompt, with unordered ids and a seed of its own each."""
    batch = []
    for i, prompt in enumerate(prompts):
        # These do not rise with i, and no two of them are equal.
        identity = 7 * ((i * 5 + 3) % 101) + i
        ids = np.asarray(prompt, dtype=np.int64)
        batch.append(Request(identity, ids, sampling, seed=first_seed + i))
    return batch


class EngineBase:
    """Flags of the engine under test, the fixture `start`, and helpers."""

    architectures: Sequence[str] = ("qwen2", "llama")
    """Model types, of Hugging Face's configs, that the tests start the engine with."""
    width = 32
    """Hidden size of the models. A head has a quarter of it; some kernels take no heads of 8."""
    aborts = True
    """Whether `abort` ends running requests."""
    sleeps = True
    """Whether `sleep` and `wake` do something."""
    prefixes = True
    """Whether a request may carry a response prefix (partial rollouts, turns)."""
    filters = True
    """Whether the engine follows top_k, top_p and min_p."""
    biases = True
    """Whether the engine follows logit_bias."""
    boxes = True
    """Whether `receive` takes parts of a parameter; False: only complete parameters."""
    proofs = True
    """Whether `proof` says which parameters an update has brought, and sums up their values."""
    tolerance = 2e-3
    """Absolute tolerance of logprobs, in nats: rollout engines and trainers round differently."""
    samples = 2000
    """Number of sequences that the tests of distributions draw."""

    @pytest.fixture
    def start(self) -> Callable[..., RolloutEngine]:
        """The author's function that starts an engine without weights."""
        return missing_fixture(self, "start", "a function ModelSpec -> your engine, started")

    def speaking(
        self, start: Callable[..., RolloutEngine], ref: Reference, version: int = 3
    ) -> RolloutEngine:
        """Return a started engine with the reference's weights, as version `version`."""
        engine = start(ref.spec)
        give_weights(engine, ref.parameters, version)
        return engine

    def references(self) -> Iterator[Reference]:
        """Yield a policy of each of the architectures, of hidden size `width`."""
        for architecture in self.architectures:
            yield reference(architecture, width=self.width)

    def _logprobs(
        self, ref: Reference, prompt, done: Completion, temperature: float, more: str = ""
    ) -> None:
        """Require that a completion's logprobs are those of one forward pass of the reference.

        `more` is the likely cause in the message, where it is not the usual one.
        """
        response = torch.from_numpy(done.response_ids)
        with torch.no_grad():
            outputs = ref.outputs(torch.tensor(prompt), response, temperature)

        require_close(
            torch.as_tensor(done.logprobs),
            outputs["logprobs"],
            self.tolerance,
            what=f"logprobs after {list(prompt)} at temperature {temperature}",
            likely=more
            or "logprobs are of another position, of other weights, or of logits before the "
            "temperature (they are of softmax(logits / temperature); at temperature 0 of "
            "softmax(logits))",
        )

    def _run(
        self,
        engine: RolloutEngine,
        prompts,
        first_seed: int = 100,
        max_tokens: int = 12,
        **sampling,
    ) -> list[Completion]:
        """Return the completions of these prompts; `sampling` are fields of SamplingParams."""
        batch = []
        if prompts:
            params = SamplingParams(max_tokens=max_tokens, **sampling)
            batch = requests(prompts, params, first_seed)
        return engine.generate(batch)

    def _ids(self, done: Sequence[Completion]) -> list[list[int]]:
        """Return the response tokens of each completion."""
        return [completion.response_ids.tolist() for completion in done]
