"""The contract of rollout engines: tokens in, tokens out.

Requests go in, and finished sequences stream out. The engine holds its own copy of the weights,
which the trainer's weight sync brings up to date.
"""

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
from hybridflow.core.contracts.footprint import EngineLimits, EngineRoom
from hybridflow.core.contracts.worker import RankContext
from hybridflow.core.errors import HybridFlowError
from hybridflow.core.validators import fraction, non_negative, setting, share
from hybridflow.core.values.checksum import checksum, totals
from hybridflow.core.values.model import ModelSpec
from hybridflow.core.values.model_shape import ModelShape
from hybridflow.core.values.parallel import GenerationLayout
from hybridflow.core.values.weights import Box, WeightLayout

Wanted = Mapping[str, tuple[torch.dtype, tuple[Box, ...]]]
"""The request of a rank's proof: parameter -> the dtype in which it is sent, and the boxes."""
Proof = Mapping[str, tuple[int | None, int | None]]
"""Parameter -> the last version that updated all of it (None: an earlier one), and the checksum of
the wanted boxes (None: they cannot be read back)."""
MAX_BIAS = 1e9
"""Largest absolute logit_bias: float32 still holds it after division by a small temperature."""


def _pairs(
    biases: Mapping[int, float] | Iterable[tuple[int, float]],
) -> tuple[tuple[int, float], ...]:
    """Return biases as pairs by ascending token, so that equal biases compare equal."""
    if not biases:
        return ()
    pairs = biases.items() if isinstance(biases, Mapping) else biases
    return tuple(sorted((operator.index(token), float(bias)) for token, bias in pairs))


def check_biases(instance: Any, attribute: Any, pairs: Any) -> None:
    """Raise ValueError for bad (token, bias) pairs, which come in the order of tokens."""
    # A token that comes twice has itself for a neighbour.
    tokens = [token for token, _ in pairs]
    if repeated := [token for token, next_token in pairwise(tokens) if token == next_token]:
        raise ValueError(
            f"{attribute.name}: has the tokens {repeated[:5]} twice; give one bias for each"
        )
    for token, bias in pairs:
        if not abs(bias) <= MAX_BIAS:  # false for a NaN, too
            raise ValueError(
                f"{attribute.name}: token {token} has the bias {bias}; "
                f"give a number from {-MAX_BIAS:g} to {MAX_BIAS:g}"
            )


@attrs.frozen
class SamplingParams:
    """Sampling parameters of one request. Raises ValueError for invalid ones.

    The order is logit_bias, temperature, min_p, top_k, top_p. Each filter works on the renormalised
    distribution that those before it leave.
    """

    # Length
    max_tokens: int = setting(256, non_negative)
    """Length limit of the response, in tokens; a response cut here has finish_reason "length"."""

    # The distribution that tokens are drawn from
    temperature: float = setting(1.0, non_negative)
    """Softmax temperature; 0 is greedy."""
    top_p: float = setting(1.0, fraction)
    """Nucleus: the smallest set of tokens whose probability reaches top_p; 1 is off."""
    top_k: int = setting(0, non_negative)
    """Only the k most likely tokens; 0 is off."""
    min_p: float = setting(0.0, share)
    """Only tokens whose probability, after bias and temperature, is at least min_p times that of
    the most likely one; 0 is off, 1 is the largest."""
    logit_bias: tuple[tuple[int, float], ...] = attrs.field(
        default=(), converter=_pairs, validator=check_biases
    )
    """(token, bias) pairs: each bias is added to its token's logit before the temperature, in
    greedy sampling too. Takes a mapping or pairs, and keeps pairs in the order of tokens. Biases
    are between -1e9 and 1e9; -1e9 excludes a token."""

    # The end of the response
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the response; the stop token is part of it (finish_reason "stop")."""
    ignore_stop: bool = False
    """Whether to go on to max_tokens whatever is sampled (for benchmarks)."""

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken each time."""
        return self.temperature == 0.0


@attrs.frozen(eq=False)
class Request:
    """One sequence to generate. Equal prompts next to each other are prefilled once."""

    # The prompt, and how it is continued
    id: int
    prompt_ids: np.ndarray
    """Tokens of the prompt, int64 [P], P >= 1."""
    sampling: SamplingParams
    seed: int = 0
    """Seed of this sequence. The same seed, prompt and weights give the same tokens, whatever else
    is in the batch and on however many ranks: each token's uniform number is derived from (seed,
    position), and no generator state is kept."""

    # A prefix of the response that was made earlier (partial rollouts, several turns)
    prefix_ids: np.ndarray | None = None
    """Tokens of the prefix, int64 [K]; generation goes on after them."""
    prefix_logprobs: np.ndarray | None = None
    """Log-probabilities of the prefix, float32 [K]; None stands for 0."""
    prefix_versions: np.ndarray | None = None
    """Weight versions that made the prefix, int64 [K]; None stands for -1."""
    extras: Mapping[str, Any] = attrs.field(factory=dict)
    """The row's values of the columns that the engine declares (EngineCapabilities.extras)."""

    def context(self) -> np.ndarray:
        """Return the tokens that the next one follows, int64 [P + K]."""
        if self.prefix_ids is None or len(self.prefix_ids) == 0:
            return self.prompt_ids
        return np.concatenate([self.prompt_ids, self.prefix_ids])

    def prefix(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return copies of the prefix: ids int64, logprobs float32, versions int64, each [K].

        K is 0 without a prefix.
        """
        ids = np.array(() if self.prefix_ids is None else self.prefix_ids, np.int64)

        logprobs = np.zeros(len(ids), np.float32)
        if self.prefix_logprobs is not None:
            logprobs[:] = self.prefix_logprobs

        versions = np.full(len(ids), -1, np.int64)
        if self.prefix_versions is not None:
            versions[:] = self.prefix_versions
        return ids, logprobs, versions

    def ended_before(self) -> str | None:
        """Return the finish reason if the prefix is already a whole response, else None."""
        prefix = self.prefix_ids
        sampling = self.sampling
        if (
            prefix is not None
            and len(prefix)
            and not sampling.ignore_stop
            and prefix[-1] in sampling.stop_token_ids
        ):
            return "stop"

        length = 0 if prefix is None else len(prefix)
        return "length" if length >= sampling.max_tokens else None


@attrs.frozen(eq=False)
class Completion:
    """A finished sequence. T is the number of response tokens, a prefix included."""

    id: int
    """The request's id."""
    response_ids: np.ndarray
    """Tokens of the response, int64 [T]."""
    logprobs: np.ndarray
    """log softmax(logits / temperature) of each sampled token, float32 [T]; with temperature 0
    log softmax(logits). The logits are the model's own: logit_bias, min_p, top_k and top_p do not
    change logprobs."""
    weight_version: np.ndarray
    """Version of the weights that made each token, int64 [T]."""
    finish_reason: str
    """"stop", "length" or "abort"."""


class EngineSettings:
    """Base of a rollout engine's `Config`, with properties that are known before it starts.

    It must not need the engine's library.
    """

    switches: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    """Settings that trade memory for time -> the values that a planner tries; the last one takes
    the least memory of a device that the engine has to itself."""
    start_timeout_s: float | None = None
    """Seconds within which the engine must start; None sets no limit."""

    @classmethod
    def defaults_on(cls, device: str, hf_config: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the defaults that depend on `device` ("cpu", "cuda"), by setting.

        hf_config: the fields of the model's config. Other defaults are those of the fields.
        """
        return {}

    @property
    def own_process(self) -> bool:
        """Whether the engine runs in a process of its own, not in the worker's.

        A Config may replace this property by a field `own_process`.
        """
        return False

    @property
    def torch_allocates(self) -> bool:
        """Whether the engine's memory on a GPU is torch's in the worker's process, and only that.

        Torch may then map the memory of that process in segments that grow, which leaves fewer
        gaps; libraries that move memory by themselves (vLLM's sleep mode) do not allow it.
        """
        return False

    @property
    def varies(self) -> str:
        """Why two runs on GPUs may differ in bits though torch's algorithms are deterministic.

        "" where they do not (run.deterministic).
        """
        return "it does not say that its bits repeat (EngineSettings.varies)"

    def up_to(self, tokens: int) -> Self:
        """Return the settings for requests of at most `tokens`, a prompt with its response.

        It is called for runs on GPUs, where an engine reserves memory by its longest sequence. A
        limit that is set explicitly is kept.
        """
        return self

    def limits(self, device: str = "cuda") -> EngineLimits:
        """Return the engine's limits on a device of a kind ("cpu", "cuda"), for planning."""
        return EngineLimits()

    def lent_params(self, shape: ModelShape, device: str) -> int:
        """Return the number of parameters whose storage a trainer may use too (`sync.alias`).

        That is a trainer on one rank, whose weights have the engine's dtype.
        """
        return 0

    def within(self, room: EngineRoom) -> Self:
        """Return settings with which the engine takes no more of a device than `room`.

        It is called for runs on a GPU before the engine is built. Limits of the settings that are
        smaller are kept. By default the settings are returned unchanged.
        """
        return self

    def one_of(self, engines: int) -> Self:
        """Return settings for each of `engines` engines on one device (`hybridflow calibrate`)."""
        return self

    def problems(self, model: ModelSpec, generation: GenerationLayout, device: str) -> list[str]:
        """Return why these settings, model and layout cannot work together on a kind of device.

        It is called before a run. Each is a sentence, with what to do.
        """
        return []

    def planned_layout(
        self, shape: ModelShape, generation: GenerationLayout, dtype: torch.dtype
    ) -> WeightLayout:
        """Return the boxes that each rank will hold; by default every rank holds everything."""
        params = shape.params(dtype)
        boxes = {name: (Box.full(param.shape),) for name, param in params.items()}
        ranks = sorted(generation.replica_of)
        return WeightLayout(params, dict.fromkeys(ranks, boxes), shape.ties)


def engine_settings(config: Any) -> EngineSettings:
    """Return an engine's config if it derives from EngineSettings, else the defaults."""
    return config if isinstance(config, EngineSettings) else EngineSettings()


class RolloutEngine(ABC):
    """Generates with its own copy of the weights, on the ranks of one generation replica.

        __init__ -> start -> begin_update -> receive ... -> end_update -> generate or submit
                                  ^                                               |
                                  +------------ the trained weights are newer ----+

    Without weights, and between `begin_update` and `end_update`, the engine refuses to generate.
    """

    Config: ClassVar[type | None] = None
    """Its settings: a frozen attrs class derived from EngineSettings."""
    capabilities: ClassVar[EngineCapabilities] = EngineCapabilities()
    """Capabilities of a plugin that is registered in one line; a Descriptor has its own."""

    # --- construction, start and end ---

    @classmethod
    def build(
        cls, model: ModelSpec, config: Any, context: RankContext, logs: str | None = None
    ) -> RolloutEngine:
        """Return the engine, not started; for an engine in its own process, a proxy of it.

        An engine in its own process writes its log into the folder `logs`.
        """
        return cls(model, config, context)

    def __init__(self, model: ModelSpec, config: Any, context: RankContext):
        """`config`: an instance of this engine's Config; `context`: rank, layouts and device."""
        self.model = model
        self.config = config
        self.context = context
        self.version: int | None = None
        self.updating = False

    @classmethod
    def environment(cls, device: torch.device) -> dict[str, str]:
        """Return environment variables for the engine's own process (kit/hosting/hosted.py)."""
        return {}

    @abstractmethod
    def start(self) -> None:
        """Build the model's structure and its weight storage. Weights arrive by an update."""

    def figures(self) -> dict[str, float]:
        """Return the engine's own metrics since the last call.

        They join the metrics of generation; the largest over ranks counts.
        """
        return {}

    def close(self) -> None:  # noqa: B027
        """Release processes and files that would outlive the object; safe to call twice."""

    # --- generation ---

    @abstractmethod
    def submit(self, requests: Sequence[Request]) -> Iterator[Completion]:
        """Yield completions as they finish, in any order, each exactly once."""

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Submit and wait; return completions in the order of the requests.

        Raises HybridFlowError for completions that are not what `Completion` promises.
        """
        asked = {request.id: request for request in requests}
        completions: dict[int, Completion] = {}
        for completion in self.submit(requests):
            check_completion(asked.get(completion.id), completion)
            if completion.id in completions:
                raise HybridFlowError(f"request {completion.id}: the engine completed it twice")
            completions[completion.id] = completion
        if lost := sorted(asked.keys() - completions.keys()):
            raise HybridFlowError(
                f"the engine ended without completions of {len(lost)} of {len(asked)} requests "
                f"({', '.join(map(str, lost[:5]))}, ...)"
            )
        return [completions[request.id] for request in requests]

    @abstractmethod
    def abort(self, ids: Iterable[int] | None = None) -> None:
        """End running requests early (without ids all of them), with finish_reason "abort".

        Each one is still yielded. Ids that do not run are no error.
        """

    def partial(self, number: int) -> np.ndarray | None:
        """Return the tokens that the running request of this id has made so far, int64 [T].

        Its completion begins with them. None where the engine has no partial results.
        """
        return None

    # --- generation for requests that come one by one ---
    #
    # kit.continuous.ContinuousEngine has these for engines that admit requests while others run,
    # kit.batches.BatchEngine for those that have `submit` alone.

    inflight: bool = False
    """Whether weights may be updated while sequences run: their later tokens carry the new
    version."""

    @abstractmethod
    def add(self, request: Request) -> None:
        """Queue a request; `step` will return its completion.

        Raises HybridFlowError for a request that cannot be served, and without weights.
        """

    @abstractmethod
    def step(self) -> list[Completion]:
        """Work for a while; return the completions of requests that have ended."""

    @property
    @abstractmethod
    def busy(self) -> bool:
        """Whether added requests have no completion yet, or completions wait for `step`."""

    def nudge(self) -> None:  # noqa: B027
        """Let a `step` that waits return at once; called from any thread when a request is due."""

    def disown(self) -> None:  # noqa: B027
        """Drop all running requests and their completions; they end before the next one begins."""

    # --- weights and their updates ---

    @abstractmethod
    def layout(self) -> WeightLayout:
        """Return which boxes of each canonical (Hugging Face) parameter every rank's engine holds.

        It covers all ranks of context.layout, in the replicas of context.generation.
        """

    def view(self, name: str, box: Box) -> torch.Tensor | None:
        """Return a writeable view of this rank's storage of a box; None if it has none (opaque)."""
        return None

    def read(self, name: str, box: Box) -> torch.Tensor:
        """Return the stored values of a box of this rank, to compare them with the sent ones."""
        if (view := self.view(name, box)) is None:
            raise HybridFlowError(f"{type(self).__name__} gives no view of {name}")
        return view

    def begin_update(self, version: int) -> None:
        """Begin an update of the weights to `version`."""
        self.updating = True
        self._next_version = version

    wanted: Wanted = {}

    def expect(self, wanted: Wanted) -> None:
        """Note the boxes of the next `proof`; called before the weights of an update arrive."""
        self.wanted = wanted

    def proof(self) -> Proof:
        """Return the version of each wanted parameter, and checksums of the wanted boxes.

        It is called when all boxes of an update have arrived, before `end_update`; and outside of
        updates. By default the values come from `read`, where the engine has it.
        """
        mine = type(self)
        blind = mine.read is RolloutEngine.read and mine.view is RolloutEngine.view
        sums = {} if blind else totals(self._sums())
        return {
            name: (self.written(name), sums.get(name, None if blind else 0)) for name in self.wanted
        }

    def _sums(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, (dtype, boxes) in self.wanted.items():
            for box in boxes:
                yield name, checksum(self.read(name, box).to(dtype), box)

    def written(self, name: str) -> int | None:
        """Return the last version that updated all of this rank's part of a parameter.

        None is an earlier one. By default every update is assumed to be complete.
        """
        return self._next_version

    @abstractmethod
    def receive(self, name: str, box: Box, tensor: torch.Tensor) -> None:
        """Store the values of one box of a canonical parameter."""

    def end_update(self) -> None:
        """End the update: from now on the engine generates with the new version."""
        self.version = self._next_version
        self.updating = False

    def check_updating(self, what: str) -> None:
        """Raise HybridFlowError when `what` happens (weights arrive, say) outside an update."""
        if not self.updating:
            raise HybridFlowError(
                f"{what} outside an update of the rollout engine; call begin_update first"
            )

    def check_ready(self) -> None:
        """Raise HybridFlowError when generation would use missing or half-updated weights."""
        if self.updating:
            raise HybridFlowError(
                f"the weight update to version {self._next_version} was begun and not ended, so "
                "the rollout engine may hold mixed weights; sync again before generating"
            )
        if self.version is None:
            raise HybridFlowError(
                "the rollout engine has no weights yet; sync the actor before generating"
            )

    # --- memory, shared with a trainer or released ---

    lends: ClassVar[bool] = False
    """Whether `lend` works: a trainer in the same process may keep its weights in this engine's
    storage."""

    def lend(self, name: str) -> None:
        """Share the storage of this whole parameter with the trainer from now on.

        Its values count as received in every update, and `sleep` must not drop them. They change
        when the trainer steps, so a sync must precede the next generation.
        """
        raise NotImplementedError(f"{type(self).__name__} lends no storage")

    def sleep(self) -> None:  # noqa: B027
        """Release memory between generation phases, where the engine can."""

    def wake(self, cache: bool = True) -> None:  # noqa: B027
        """Undo `sleep`; the weights need an update if `sleep` dropped them.

        With `cache` false the memory of keys and values stays released: a weight sync needs only
        the weights, while the trainer's are still on the device. A later call with `cache` restores
        the cache before anything is generated.
        """


def check_requests(requests: Sequence[Request], max_positions: int | None, vocab: int) -> None:
    """Raise HybridFlowError for the first request that cannot be served, with its id."""
    seen_ids: set[int] = set()
    checked_samplings: set[int] = set()  # by id(): many requests share one SamplingParams
    for request in requests:
        sampling = request.sampling
        problem = _problem(request, max_positions)
        if problem is None and sampling.logit_bias and id(sampling) not in checked_samplings:
            outside = [token for token, _ in sampling.logit_bias if not 0 <= token < vocab]
            if outside:
                problem = (
                    f"logit_bias has the tokens {outside[:5]}, outside the vocabulary of {vocab}"
                )
            checked_samplings.add(id(sampling))
        if request.id in seen_ids:
            problem = "its id is used twice in one call"
        if problem:
            raise HybridFlowError(f"request {request.id}: {problem}")
        seen_ids.add(request.id)

    # All tokens are checked together, since requests are many; only on failure one by one.
    contexts = [request.context() for request in requests]
    if contexts and _outside(np.concatenate(contexts), vocab):
        culprit = next(request for request in requests if _outside(request.context(), vocab))
        raise HybridFlowError(
            f"request {culprit.id}: a token id lies outside the vocabulary of {vocab}"
        )


FINISH_REASONS = ("stop", "length", "abort")
"""Why a sequence ended: at a stop token, at max_tokens, or by `abort`."""


def check_completion(request: Request | None, completion: Completion) -> None:
    """Raise HybridFlowError where a completion is not what an engine promises for its request.

    request: None where none of its id was asked for.
    """
    if request is None:
        raise HybridFlowError(f"the engine completed request {completion.id}, which is not one")
    length = len(completion.response_ids)
    prefix = request.prefix()[0]
    problem = ""
    for name in ("logprobs", "weight_version"):
        if (found := len(getattr(completion, name))) != length:
            problem = f"it has {length} tokens and {found} elements of {name}"
    finite = np.isfinite(completion.logprobs)
    if not finite.all():
        at = int(np.argmin(finite))
        problem = (
            f"the logprob of its token {at} is {completion.logprobs[at]}; are the weights NaN?"
        )
    if completion.finish_reason not in FINISH_REASONS:
        problem = f"finish_reason is {completion.finish_reason!r}, not one of {FINISH_REASONS}"
    elif length > request.sampling.max_tokens:
        problem = f"it has {length} tokens, and max_tokens is {request.sampling.max_tokens}"
    elif not np.array_equal(completion.response_ids[: len(prefix)], prefix):
        problem = "it does not begin with the request's prefix_ids"
    if problem:
        raise HybridFlowError(f"request {request.id}: a wrong answer of the engine: {problem}")


def _outside(ids: np.ndarray, vocab: int) -> bool:
    return bool(ids.min() < 0 or ids.max() >= vocab)


def _problem(request: Request, max_positions: int | None) -> str | None:
    """Return why a request cannot be served, apart from its token ids; None if it can."""
    # Lengths
    sampling = request.sampling
    prompt_length = len(request.prompt_ids)
    if prompt_length == 0:
        return "the prompt is empty"
    if max_positions is not None and prompt_length + sampling.max_tokens > max_positions:
        return (
            f"{prompt_length} prompt tokens and max_tokens {sampling.max_tokens} exceed the "
            f"model's max_position_embeddings {max_positions}"
        )

    # The prefix
    prefix_length = 0 if request.prefix_ids is None else len(request.prefix_ids)
    for name, column in (
        ("prefix_logprobs", request.prefix_logprobs),
        ("prefix_versions", request.prefix_versions),
    ):
        if column is not None and len(column) != prefix_length:
            return f"{name} has {len(column)} entries, not one for each token of prefix_ids"
    return None
