"""The sections of a run's TOML file. A role's table is `RoleSection`; plugins bring their own config classes."""

from __future__ import annotations

from typing import Any, Literal

import attrs

from hybridflow.core.contracts.reward import FailureRule
from hybridflow.core.contracts.rollout import MAX_BIAS, SamplingParams
from hybridflow.core.contracts.training import OptimizerConfig
from hybridflow.core.validators import at_least, fraction, non_negative, positive, share
from hybridflow.core.values.model import ModelConfig

_BY_NAME = (
    "algorithm",
    "runtime",
    "rollout",
    "placement",
    "placement.planner",
    "*.backend",
    "*.sync.transport",
)
SHORTHAND = frozenset(_BY_NAME) | frozenset(f"stages.*.{key}" for key in _BY_NAME)
"""Tables that may be given by their `name` alone: `rollout = "NAME"`."""

SECTIONS = (
    "run",
    "runtime",
    "placement",
    "pools",
    "algorithm",
    "data",
    "tokenizer",
    "sampling",
    "rollout",
    "environment",
    "validation",
    "stages",
)
"""The tables of a file that are not roles."""

USUAL_ROLES = ("actor", "critic", "cost_critic", "ref", "reward", "cost", "teacher")
"""Roles whose tables may stand in a file although this algorithm does not need them."""


@attrs.frozen
class RunSection:
    """[run]: how long, where, how often."""

    name: str | None = None
    """Folder of the run inside `folder`; default: the name of the config file."""
    folder: str = "runs"
    """Folder in which runs are kept."""
    steps: int = attrs.field(default=100, validator=at_least(1))
    """Iterations: calls of the algorithm's step."""
    seed: int = attrs.field(default=0, validator=non_negative)
    """Of sampling and of the order of mini-batches; data and models have seeds of their own."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda if there is one."""
    checkpoint_every: int = attrs.field(default=0, validator=non_negative)
    """Steps between checkpoints; 0: only when the run is told to stop (SIGTERM)."""
    keep_checkpoints: int = attrs.field(default=2, validator=at_least(1))
    """The newest ones that are kept."""
    export: bool = False
    """Write the trained models as Hugging Face folders at the end (a stage that others start from always does)."""
    restarts: int = attrs.field(default=0, validator=non_negative)
    """How often a run whose worker died goes on from its last checkpoint by itself."""
    max_staleness: int = attrs.field(default=0, validator=non_negative)
    """Weight versions that a rollout may lag behind; 0, synchronous, is the only value so far."""
    mismatch_warn: float | None = attrs.field(default=0.1, validator=positive)
    """Say so when rollout and trainer logprobs of the same tokens and weights differ by more, in nats: the mean over a step
    (metric actor/mismatch_mean). A right engine stays below 0.001 in float32 and about 0.02 in bfloat16."""
    mismatch_stop: float | None = attrs.field(default=None, validator=positive)
    """End the run, before that step's checkpoint, when they differ by more."""
    trackers: tuple[str | dict[str, Any], ...] = ("jsonl", "tensorboard")
    """Plugins of kind "tracker" that get the metrics, by name, or as a table of a name and its settings:
    `{ name = "jsonl" }`. One that is not installed is left out with a note."""


@attrs.frozen
class PlacementSection:
    """[placement]: who says where the models go; `placement = "auto"` for short."""

    name: Literal["given", "auto"] = "given"
    """given: [pools] and the roles' layouts. auto: the best that `hybridflow plan` finds on `cluster`, in place of them."""
    planner: dict[str, Any] = attrs.field(factory=dict)
    """`name` of a plugin of kind "planner" (by default the one that says it is), and its own settings."""
    cluster: str | None = None
    """What there is: a TOML file, or DEVICE:NODESxDEVICES as in "a100-80gb:2x8" (docs/mapping.md). With given a config that
    does not fit there is refused."""


@attrs.frozen
class LayoutSection:
    """A role's parallel layout over its pool."""

    dp: int | None = attrs.field(default=None, validator=attrs.validators.optional(at_least(1)))
    """Data parallel: replicas of the model, each with its share of the rows. Default: what the pool's devices and the
    other axes leave."""
    tp: int = attrs.field(default=1, validator=at_least(1))
    """Tensor parallel: ranks that share each layer."""
    pp: int = attrs.field(default=1, validator=at_least(1))
    """Pipeline parallel: stages of layers."""
    cp: int = attrs.field(default=1, validator=at_least(1))
    """Context parallel: ranks that share each sequence."""
    ep: int = attrs.field(default=1, validator=at_least(1))
    """Expert parallel: neighbouring dp ranks over which experts are spread; divides dp."""
    order: str = "tp-cp-pp-dp"
    """Axes from fastest to slowest over the ranks."""


@attrs.frozen
class GenerationSection:
    """How the actor's ranks are cut into generation replicas (arXiv:2409.19256, section 5)."""

    tp: int = attrs.field(default=1, validator=at_least(1))
    """Tensor parallel ranks of one rollout engine. They need not divide, or be divided by, the training layout's."""
    pp: int = attrs.field(default=1, validator=at_least(1))
    """Pipeline stages of one rollout engine."""
    grouping: Literal["zero-redundancy", "consecutive"] = "zero-redundancy"
    """Which ranks form a replica: "zero-redundancy": such that each rank's training shard lies inside its generation
    shard, as far as the layouts allow; "consecutive": neighbours."""
    pool: str | None = None
    """A pool in which the engines run beside training; default: the actor's own processes, in turns with training."""
    keep: bool = True
    """On the actor's own processes: keep the engine's memory (cache, and on a GPU its weights) between generations;
    false: drop it, and sync anew."""


@attrs.frozen
class SyncConfig:
    """[actor.sync]."""

    transport: dict[str, Any] = attrs.field(factory=lambda: {"name": "auto"})
    """`name` of a plugin of kind "transport", and its own settings; auto: the first that reaches all ranks."""
    bucket_mb: float = attrs.field(default=64.0, validator=at_least(0.01))
    """The most memory that a sync takes for messages on a rank, in 10^6 bytes, over all that is under way."""
    alias: bool = True
    """Keep one copy where training and rollout could share it: whole parameters of one dtype and memory order, of a role on
    one rank that is neither offloaded nor drops its engine (generation.keep)."""
    verify: bool = False
    """Compare checksums of every parameter on both sides after each sync; the first that differs is named."""


@attrs.frozen
class RewardPart:
    """One of several reward functions."""

    name: str
    """Its column is rewards/<name>."""
    function: str
    """A plugin of kind "reward", or "package.module:function"."""
    options: dict[str, Any] = attrs.field(factory=dict)
    """Its own options."""
    weight: float = 1.0
    """Factor in the sum."""
    on_failure: FailureRule = attrs.field(factory=FailureRule)
    """What happens when it fails."""
    per_token: bool = False
    """It returns a list: a number for each response token."""


@attrs.frozen
class RoleSection:
    """A role's table. Model roles: what is not given is the actor's. Rewards: `function`, `parts`, or a `model`."""

    model: ModelConfig = attrs.field(factory=ModelConfig)
    """Which model: a folder, an earlier stage's, or a config with random weights."""
    pool: str = "main"
    """Roles in one pool share its processes and take turns; roles in different pools run side by side."""
    layout: LayoutSection = attrs.field(factory=LayoutSection)
    """How the model is spread over the pool's devices."""
    backend: dict[str, Any] = attrs.field(factory=dict)
    """`name` of a training backend (default: the one whose descriptor says so), and that backend's own settings."""
    generation: GenerationSection = attrs.field(factory=GenerationSection)
    """Of the actor: the rollout engine's layout over the same ranks."""
    sync: SyncConfig = attrs.field(factory=SyncConfig)
    """Of the actor: how its weights come to the rollout engine."""
    optimizer: OptimizerConfig = attrs.field(factory=OptimizerConfig)
    """Of a trained role."""
    micro_batch_tokens: int = attrs.field(default=16384, validator=at_least(1))
    """Tokens of one forward, padding included; a longer single sequence goes alone."""
    offload: bool = False
    """Move weights and optimizer to the CPU while other roles of the pool use the device."""
    function: str | None = None
    """A reward function: a plugin of kind "reward", or "package.module:function"."""
    options: dict[str, Any] = attrs.field(factory=dict)
    """The reward function's own options."""
    on_failure: FailureRule = attrs.field(factory=FailureRule)
    """What happens when the reward function fails."""
    per_token: bool = False
    """The reward function returns a list: a number for each response token; PPO, REINFORCE++ and Safe RLHF count each at
    its token, others their sum."""
    parts: tuple[RewardPart, ...] = ()
    """Several reward functions, summed by weight."""


def _token_biases(instance: Any, attribute: attrs.Attribute, value: dict[str, float]) -> None:
    for token, bias in value.items():
        if not token.isdecimal() or str(int(token)) != token:  # "07" would be token 7 a second time
            raise ValueError(
                f"{attribute.name}: keys are token ids, got {token!r}; write a whole number, 0 or more"
            )
        if not abs(bias) <= MAX_BIAS:
            raise ValueError(
                f"{attribute.name}: token {token} has the bias {bias}; give a number from {-MAX_BIAS:g} to {MAX_BIAS:g}"
            )


@attrs.frozen
class SamplingSection:
    """[sampling]: how responses are sampled in training; validation is greedy."""

    max_tokens: int = attrs.field(default=256, validator=at_least(1))
    """Length limit of a response, in tokens."""
    temperature: float = attrs.field(default=1.0, validator=non_negative)
    """Softmax temperature; 0 is greedy. The trainer's logprobs are of the same temperature."""
    top_p: float = attrs.field(default=1.0, validator=fraction)
    """Nucleus: the most likely tokens that together have this probability; 1 is off."""
    top_k: int = attrs.field(default=0, validator=non_negative)
    """Only this many of the most likely tokens; 0 is off."""
    min_p: float = attrs.field(default=0.0, validator=share)
    """Only tokens at least this many times as likely as the most likely one; 0 is off."""
    logit_bias: dict[str, float] = attrs.field(factory=dict, validator=_token_biases)
    """Token id -> number added to its logit before the temperature, in validation too: `{ "17" = -100.0 }` keeps token 17
    from coming. The trainer's logprobs are without it."""
    stop_tokens: tuple[int, ...] = ()
    """Token ids that end a response, beside the tokenizer's eos."""

    def params(self) -> SamplingParams:
        """For requests."""
        given = attrs.asdict(self)
        biases = {int(token): bias for token, bias in given.pop("logit_bias").items()}
        return SamplingParams(stop_token_ids=given.pop("stop_tokens"), logit_bias=biases, **given)


@attrs.frozen
class EnvironmentSection:
    """[environment]: what answers the actor's turns; without this table a response is one turn."""

    name: str
    """A plugin of kind environment, or "package.module:Class"."""
    max_turns: int = attrs.field(default=8, validator=attrs.validators.ge(1))
    """An episode that is not done after so many turns ends as one that reached sampling.max_tokens, which counts all its
    tokens, the environment's included."""
    options: dict[str, Any] = attrs.field(factory=dict)
    """What the environment takes."""


@attrs.frozen
class ValidationSection:
    """[validation]: the actor's greedy responses to a held-out set, scored by the reward."""

    name: str = "validation"
    """What the set is called in the last line of the run."""
    data: dict[str, Any] = attrs.field(factory=dict)
    """Fields of [data] that differ for the held-out set (path, options, limit, ...)."""
    every: int = attrs.field(default=0, validator=non_negative)
    """Steps between validations; 0: at the end alone."""
    at_start: bool = False
    """Also before the first step."""
    stop_at: float | None = None
    """The run, or stage, ends at the first validation whose score reaches this; needs `every`. None: after run.steps."""
    generate: bool = True
    """False: only the loss on the set's responses."""
    samples: int = attrs.field(default=8, validator=non_negative)
    """Rows written to samples.jsonl each time."""
    batch_rows: int = attrs.field(default=1024, validator=positive)
    """Rows per call."""
