"""The contract of rollout engines: token in, token out; requests go in, finished sequences stream out."""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, ClassVar, Self

import attrs
import numpy as np
import torch

from hybridflow.core.contracts.capabilities import EngineCapabilities
from hybridflow.core.contracts.footprint import EngineLimits
from hybridflow.core.contracts.worker import RankContext
from hybridflow.core.errors import HybridFlowError
from hybridflow.core.values.model import ModelSpec
from hybridflow.core.values.model_shape import ModelShape
from hybridflow.core.values.parallel import GenerationLayout
from hybridflow.core.values.weights import Box, WeightLayout

MAX_BIAS = 1e9
"""Of a token's logit_bias, either way: what float32 still holds after a small temperature."""


def _pairs(
    biases: Mapping[int, float] | Iterable[tuple[int, float]],
) -> tuple[tuple[int, float], ...]:
    if not biases:
        return ()
    given = biases.items() if isinstance(biases, Mapping) else biases
    return tuple(sorted((operator.index(token), float(bias)) for token, bias in given))


@attrs.frozen
class SamplingParams:
    """How the response of one request is sampled.

    The order is logit_bias, temperature, min_p, top_k, top_p; each looks at what the ones before it left,
    renormalised, so the nucleus is top_p of what min_p and top_k leave.
    """

    max_tokens: int = 256
    """Length limit of the response, in tokens; a response cut here has finish_reason "length"."""
    temperature: float = 1.0
    """Softmax temperature; 0 is greedy."""
    top_p: float = 1.0
    """Nucleus: the smallest set of tokens whose probability reaches top_p; 1 is off."""
    top_k: int = 0
    """Only the k most likely tokens; 0 is off."""
    min_p: float = 0.0
    """Only tokens whose probability, after bias and temperature, is at least min_p times that of the most likely one;
    0 is off, 1 is the largest."""
    logit_bias: tuple[tuple[int, float], ...] = attrs.field(default=(), converter=_pairs)
    """(token, bias) pairs, each bias added to that token's logit before the temperature; of greedy sampling too. Takes a
    mapping or pairs, keeps pairs in the order of tokens, so that equal biases compare equal. At most 1e9 either way: -1e9
    for a token that must not come."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the response; the stop token is part of it (finish_reason "stop")."""
    ignore_stop: bool = False
    """Go on to max_tokens whatever is sampled (benchmarks)."""

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


@attrs.frozen(eq=False)
class Request:
    """One sequence to generate. Equal prompts next to each other are prefilled once."""

    id: int
    prompt_ids: np.ndarray
    """int64 [P], P >= 1."""
    sampling: SamplingParams
    seed: int = 0
    """Seed of this sequence: the same seed, prompt and weights give the same tokens, whatever else is in the batch and
    on however many ranks (a uniform number is derived from (seed, position); no generator state is kept)."""
    prefix_ids: np.ndarray | None = None
    """int64 [K]: response tokens made earlier (partial rollouts, multi-turn); generation goes on after them."""
    prefix_logprobs: np.ndarray | None = None
    """float32 [K]; without, 0."""
    prefix_versions: np.ndarray | None = None
    """int64 [K]; without, -1."""
    extras: Mapping[str, Any] = attrs.field(factory=dict)
    """The row's values of the columns that the engine declares (EngineCapabilities.extras)."""

    def context(self) -> np.ndarray:
        """int64 [P + K]: what the next token follows."""
        if self.prefix_ids is None or len(self.prefix_ids) == 0:
            return self.prompt_ids
        return np.concatenate([self.prompt_ids, self.prefix_ids])

    def prefix(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Copies: ids int64 [K], logprobs float32 [K], versions int64 [K]; K = 0 without a prefix."""
        ids = np.array(() if self.prefix_ids is None else self.prefix_ids, np.int64)
        logprobs, versions = np.zeros(len(ids), np.float32), np.full(len(ids), -1, np.int64)
        if self.prefix_logprobs is not None:
            logprobs[:] = self.prefix_logprobs
        if self.prefix_versions is not None:
            versions[:] = self.prefix_versions
        return ids, logprobs, versions

    def ended_before(self) -> str | None:
        """The finish reason of a request whose prefix is already a whole response."""
        prefix, sampling = self.prefix_ids, self.sampling
        if (
            prefix is not None
            and len(prefix)
            and not sampling.ignore_stop
            and prefix[-1] in sampling.stop_token_ids
        ):
            return "stop"
        return "length" if (0 if prefix is None else len(prefix)) >= sampling.max_tokens else None


@attrs.frozen(eq=False)
class Completion:
    """A finished sequence. All arrays have length T, the number of response tokens, a prefix included."""

    id: int
    response_ids: np.ndarray
    """int64 [T]."""
    logprobs: np.ndarray
    """float32 [T]: log softmax(logits / temperature) of each sampled token, with temperature 0 log softmax(logits).
    The logits are the model's: logit_bias, min_p, top_k and top_p say what is drawn, and do not change logprobs."""
    weight_version: np.ndarray
    """int64 [T]: the version of the weights that made each token."""
    finish_reason: str
    """"stop", "length" or "abort"."""


class EngineSettings:
    """Base of a rollout engine's `Config`: what can be said of it before it starts, and without its library."""

    start_timeout_s: float | None = None
    """Seconds until it must have started; None: it may take for ever."""

    @property
    def own_process(self) -> bool:
        """Whether it runs in a process of its own, not in the worker's. A setting of that name says it as well."""
        return False

    def limits(self) -> EngineLimits:
        """What it takes of a device, for planning."""
        return EngineLimits()

    def one_of(self, engines: int) -> Self:
        """The same settings for one of several engines that share a device (`hybridflow calibrate`)."""
        return self

    def problems(self) -> list[str]:
        """Settings that cannot work together, each as "setting: what, and what to do"."""
        return []

    def planned_layout(
        self, shape: ModelShape, generation: GenerationLayout, dtype: torch.dtype
    ) -> WeightLayout:
        """Which boxes each rank will ask for. As it stands: everything, on every rank."""
        held = {name: (Box.full(param.shape),) for name, param in shape.params(dtype).items()}
        ranks = sorted(generation.replica_of)
        return WeightLayout(shape.params(dtype), dict.fromkeys(ranks, held), shape.ties)


def engine_settings(config: Any) -> EngineSettings:
    """An engine's config where it says what it needs, else what the base says."""
    return config if isinstance(config, EngineSettings) else EngineSettings()


class RolloutEngine(ABC):
    """Generates with its own copy of the weights, on the ranks of one generation replica.

    Life: `__init__`, `start`, then any number of [`begin_update`, `receive`..., `end_update`], `submit`/`generate`.
    An engine that never got weights, or whose update was begun and not ended, refuses to generate.
    """

    Config: ClassVar[type | None] = None
    """Its settings: a frozen attrs class derived from EngineSettings."""
    capabilities: ClassVar[EngineCapabilities] = EngineCapabilities()
    """Of a plugin that is registered in one line; a Descriptor has its own."""

    @classmethod
    def build(
        cls, model: ModelSpec, config: Any, context: RankContext, logs: str | None = None
    ) -> RolloutEngine:
        """The engine, not started: in this process, or whatever stands for one in a process of its own, whose log goes into
        the folder `logs`."""
        return cls(model, config, context)

    def __init__(self, model: ModelSpec, config: Any, context: RankContext):
        """`model`: what it generates with; `config`: this engine's own Config; `context`: its rank, layouts and device."""
        self.model, self.config, self.context = model, config, context
        self.version: int | None = None
        self.updating = False

    @abstractmethod
    def start(self) -> None:
        """Build the model's structure and its weight storage. Weights arrive by an update."""

    @abstractmethod
    def submit(self, requests: Sequence[Request]) -> Iterator[Completion]:
        """Yield completions as they finish (any order). All of them are yielded exactly once."""

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Submit and wait: completions in the order of the requests."""
        done = {c.id: c for c in self.submit(requests)}
        return [done[r.id] for r in requests]

    @abstractmethod
    def layout(self) -> WeightLayout:
        """Which boxes of each canonical (Hugging Face) parameter every rank's engine holds: all of context.layout's ranks,
        in replicas as context.generation says."""

    def view(self, name: str, box: Box) -> torch.Tensor | None:
        """A writeable view of this rank's storage for a box that it holds; None where there is none (opaque)."""
        return None

    continuous: ClassVar[bool] = False
    """Whether `add` and `step` work: requests may come while others run (kit.continuous.ContinuousEngine)."""

    inflight: bool = False
    """Whether weights may be updated while sequences run: their later tokens carry the new version."""

    def add(self, request: Request) -> None:
        """Take a request beside those that run; `step` gives its completion."""
        raise NotImplementedError(f"{type(self).__name__} takes requests by submit alone")

    def step(self) -> list[Completion]:
        """Work for a while; the completions of requests that have ended."""
        raise NotImplementedError(f"{type(self).__name__} takes requests by submit alone")

    @property
    def busy(self) -> bool:
        """Whether `step` has something to do that somebody waits for."""
        raise NotImplementedError(f"{type(self).__name__} takes requests by submit alone")

    def disown(self) -> None:  # noqa: B027
        """Nobody waits for what runs any more: it ends before the next request enters."""

    @classmethod
    def environment(cls, device: torch.device) -> dict[str, str]:
        """Variables for this engine's process, where it has one of its own (kit/hosting/hosted.py)."""
        return {}

    def figures(self) -> dict[str, float]:
        """What the engine has to tell of itself since the last call (metrics of generation, largest over ranks)."""
        return {}

    def close(self) -> None:  # noqa: B027
        """Give back what outlives the object (processes, files); safe to call twice."""

    lends: ClassVar[bool] = False
    """Whether `lend` works: a trainer in the same process may keep its weights in this engine's storage."""

    def lend(self, name: str) -> None:
        """The view of this whole parameter holds the trainer's own weights from now on.

        They count as received in every update, and `sleep` must not drop them. They change when the trainer steps, so
        whoever generates syncs first.
        """
        raise NotImplementedError(f"{type(self).__name__} lends no storage")

    def read(self, name: str, box: Box) -> torch.Tensor:
        """The stored values of a box that this rank holds, to be compared with what was sent."""
        if (view := self.view(name, box)) is None:
            raise HybridFlowError(
                f"{type(self).__name__} gives no view of {name}; set sync.verify = false"
            )
        return view

    def begin_update(self, version: int) -> None:
        self.updating, self._next_version = True, version

    @abstractmethod
    def receive(self, name: str, box: Box, tensor: torch.Tensor) -> None:
        """Take the values of one box of a canonical parameter."""

    def end_update(self) -> None:
        self.version, self.updating = self._next_version, False

    def check_updating(self, what: str) -> None:
        """Raise when weights come, or an update ends, that was not begun."""
        if not self.updating:
            raise HybridFlowError(
                f"{what} outside an update of the rollout engine; call begin_update first"
            )

    def abort(self, ids: Iterable[int] | None = None) -> None:
        """End running requests early (all of them without ids); each is yielded with finish_reason "abort"."""
        raise NotImplementedError(f"{type(self).__name__} cannot abort")

    def sleep(self) -> None:  # noqa: B027
        """Give up memory between generation phases, where the engine can."""

    def wake(self) -> None:  # noqa: B027
        """Undo `sleep`; the weights need an update if `sleep` dropped them."""

    def check_ready(self) -> None:
        """Raise when generation would run on missing or half-updated weights."""
        if self.updating:
            raise HybridFlowError(
                f"the weight update to version {self._next_version} was begun and not ended, so the rollout engine may "
                "hold mixed weights; sync again before generating"
            )
        if self.version is None:
            raise HybridFlowError(
                "the rollout engine has no weights yet; sync the actor before generating"
            )


def check_requests(requests: Sequence[Request], max_positions: int | None, vocab: int) -> None:
    """Raises HybridFlowError naming the first request that cannot be served."""
    seen: set[int] = set()
    good: set[int] = (
        set()
    )  # ids of the SamplingParams whose biases were looked at: many requests share one
    for r in requests:
        problem = _problem(r, max_positions)
        if problem is None and r.sampling.logit_bias and id(r.sampling) not in good:
            problem = _bias_problem(r.sampling, vocab)
            good.add(id(r.sampling))
        if r.id in seen:
            problem = "its id is used twice in one call"
        if problem:
            raise HybridFlowError(f"request {r.id}: {problem}")
        seen.add(r.id)
    arrays = [a for r in requests for a in (r.prompt_ids, r.prefix_ids) if a is not None and len(a)]
    if arrays:
        ids = np.concatenate(arrays)
        if ids.min() < 0 or ids.max() >= vocab:
            culprit = next(
                r
                for r in requests
                if _outside(r.prompt_ids, vocab) or _outside(r.prefix_ids, vocab)
            )
            raise HybridFlowError(
                f"request {culprit.id}: a token id lies outside the vocabulary of {vocab}"
            )


def _outside(ids: np.ndarray | None, vocab: int) -> bool:
    return ids is not None and len(ids) > 0 and bool(ids.min() < 0 or ids.max() >= vocab)


def _problem(r: Request, max_positions: int | None) -> str | None:
    s = r.sampling
    if len(r.prompt_ids) == 0:
        return "the prompt is empty"
    if max_positions is not None and len(r.prompt_ids) + s.max_tokens > max_positions:
        return (
            f"{len(r.prompt_ids)} prompt tokens and max_tokens {s.max_tokens} exceed the model's "
            f"max_position_embeddings {max_positions}"
        )
    in_range = (
        s.temperature >= 0
        and 0 < s.top_p <= 1
        and s.top_k >= 0
        and 0 <= s.min_p <= 1
        and s.max_tokens >= 0
    )
    if not in_range:
        return (
            f"temperature {s.temperature}, top_p {s.top_p}, top_k {s.top_k}, min_p {s.min_p}, max_tokens {s.max_tokens}; "
            "allowed are temperature >= 0, 0 < top_p <= 1, top_k >= 0, 0 <= min_p <= 1, max_tokens >= 0"
        )
    for name, column in (
        ("prefix_logprobs", r.prefix_logprobs),
        ("prefix_versions", r.prefix_versions),
    ):
        if column is not None and len(column) != (0 if r.prefix_ids is None else len(r.prefix_ids)):
            return f"{name} has {len(column)} entries, not one for each token of prefix_ids"
    return None


def _bias_problem(sampling: SamplingParams, vocab: int) -> str | None:
    tokens = [token for token, _ in sampling.logit_bias]
    if outside := [t for t in tokens if not 0 <= t < vocab]:
        return (
            f"logit_bias has the tokens {outside[:5]}, which lie outside the vocabulary of {vocab}"
        )
    if twice := [a for a, b in pairwise(tokens) if a == b]:
        return f"logit_bias has the tokens {twice[:5]} twice; give one bias for each"
    for token, bias in sampling.logit_bias:
        if not abs(bias) <= MAX_BIAS:  # a NaN too
            return f"logit_bias of token {token} is {bias}; give a number from {-MAX_BIAS:g} to {MAX_BIAS:g}"
    return None
