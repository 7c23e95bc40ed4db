"""The sections of a run's TOML file, as classes.

A role's table is a RoleSection. Plugins bring config classes of their own, which stand beside them.
`hybridflow show`, error messages and docs/configuration.md print the docstrings of the fields.
"""

from __future__ import annotations

from typing import Any, Literal

import attrs

from hybridflow.core.contracts.failure import FailureRule
from hybridflow.core.contracts.reward import RewardFailureRule
from hybridflow.core.contracts.training import OptimizerConfig
from hybridflow.core.validators import at_least, folder_name, non_negative, positive, setting
from hybridflow.core.values.model import ModelConfig
from hybridflow.core.values.units import BUCKET_MB


@attrs.frozen
class RunSection:
    """[run]: length, folder, checkpoints and reports of a run."""

    # Length and place
    name: str | None = setting(None, folder_name)
    """Name of the run's folder inside `folder`. Default: the name of the config file."""
    folder: str = "runs"
    """Folder that holds the folders of all runs."""
    steps: int = setting(100, at_least(1))
    """Number of iterations, each one call of the algorithm's step."""
    seed: int = setting(0, non_negative)
    """Random seed of sampling, of the order of mini-batches, and of rows where a data set gives no
    seed. Models have seeds of their own."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the models: "auto" means cuda where this machine has one, else cpu. With a cluster
    (runtime.address), a machine without CUDA devices requires one of the two."""

    # Checkpoints and restarts
    checkpoint_every: int = setting(0, non_negative)
    """Steps between checkpoints. 0: none before the end, unless the run is told to stop
    (SIGTERM)."""
    keep_checkpoints: int = setting(2, at_least(1))
    """Number of checkpoints to keep; older ones are deleted."""
    final_checkpoint: bool = True
    """Whether a checkpoint is written at the end, from which --resume goes on with more steps."""
    export: bool = True
    """Whether the trained models are written as Hugging Face folders at the end. A stage that other
    stages start from always writes them."""
    export_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Data type of exported weights. "auto": that in which the backend computes."""
    restarts: int = setting(0, non_negative)
    """How many times the run resumes from its last checkpoint by itself after a worker has died."""

    # Guards against rollouts that do not match the trainer
    max_staleness: int = setting(0, non_negative)
    """Number of weight versions by which a rollout may be older than the trainer. 0 (synchronous)
    is the only value so far."""
    mismatch_stop: float | None = setting(None, positive, infinite=True)
    """End the run before an update changes any weights, when the logprobs of engine and trainer,
    for the same tokens and weights, differ by more than this, in nats: the mean over the update's
    tokens that the present weights generated. By default 0.001 where both compute in float32, 0.05
    in bfloat16, and 0.1 there for mixtures of experts, whose routing may change by rounding. inf
    switches it off."""
    mismatch_warn: float | None = setting(None, positive, infinite=True)
    """Warn when the mean over a step's tokens (metric actor/mismatch_mean) is more than this; by
    default a fifth of mismatch_stop. inf switches it off."""

    preflight: Literal["on", "off"] = "on"
    """Whether the estimated memory of the models is compared with that of the devices before
    anything is built. On a GPU a run that needs over 15% more than is usable does not start, and
    engines get the memory that the models leave; a smaller excess, and any on CPUs, is a
    warning."""

    # Observation
    samples: int = setting(1, non_negative)
    """Number of groups of each step whose rows are recorded in `recording`: tokens, logprobs,
    advantages, scores. 0: none."""
    samples_mb: int = setting(64, at_least(1))
    """Most megabytes (10^6 bytes) of recorded rows on the disk. Where they would be more, every
    second recorded step is dropped."""
    timeline_mb: int = setting(16, non_negative)
    """Most megabytes of the recorded timeline, thinned out alike: what each process did and when,
    and for whom it waited. 0: none."""
    report: bool = True
    """Whether report.html is written at the end, the page that `hybridflow report` makes."""
    trackers: tuple[str | dict[str, Any], ...] = ("jsonl", "tensorboard")
    """Plugins of kind "tracker" that get the metrics: names, or tables of a name and its settings
    such as `{ name = "jsonl" }`. One that is not installed is left out with a note."""


@attrs.frozen
class PlacementSection:
    """[placement]: by hand or by a planner; `placement = "auto"` for short."""

    name: Literal["given", "auto"] = "given"
    """given: [pools] and the roles' layouts decide. auto: the best placement that `hybridflow plan`
    finds on `cluster` replaces them."""
    planner: dict[str, Any] = attrs.field(factory=dict)
    """`name` of a plugin of kind "planner" (default: the one whose descriptor says so), and that
    planner's own settings."""
    cluster: str | None = None
    """The cluster: a TOML file, or DEVICE:[NODESx]DEVICES as in "a100-80gb:2x8" (docs/mapping.md).
    With `given`, a configuration that does not fit on it is refused."""


@attrs.frozen
class LayoutSection:
    """A role's parallel layout over its pool."""

    dp: int | None = setting(None, attrs.validators.optional(at_least(1)))
    """Data parallel size: the number of replicas of the model, each with its share of the rows.
    Default: the pool's devices divided by tp x pp x cp."""
    tp: int = setting(1, at_least(1))
    """Tensor parallel size: the number of ranks that share each layer."""
    pp: int = setting(1, at_least(1))
    """Pipeline parallel size: the number of pipeline stages, each with its share of the layers."""
    cp: int = setting(1, at_least(1))
    """Context parallel size: the number of ranks that share each sequence."""
    ep: int = setting(1, at_least(1))
    """Expert parallel size: the number of neighbouring dp ranks that share the experts; it divides
    dp."""
    order: str = "tp-cp-pp-dp"
    """The axes, from the one that changes fastest over the ranks to the slowest."""


@attrs.frozen
class GenerationSection:
    """How the actor's ranks form replicas for generation (arXiv:2409.19256, section 5)."""

    tp: int = setting(1, at_least(1))
    """Tensor parallel size of one rollout engine. It need not divide that of the training layout,
    nor be divided by it."""
    pp: int = setting(1, at_least(1))
    """Number of pipeline stages of one rollout engine."""
    grouping: Literal["zero-redundancy", "consecutive"] = "zero-redundancy"
    """Which ranks form a replica. "zero-redundancy": each rank's training shard lies inside its
    generation shard, as far as the layouts allow. "consecutive": neighbouring ranks."""
    pool: str | None = None
    """A pool on which the engines run beside training. Default: the actor's own processes, where
    generation and training take turns."""
    keep: bool = True
    """Whether an engine on the actor's own processes keeps its memory (cache, and on a GPU its
    weights) between generations. False: it is freed, and the weights are sent anew."""


@attrs.frozen
class SyncConfig:
    """[actor.sync]: how the actor's weights are sent to its rollout engine."""

    transport: dict[str, Any] = attrs.field(factory=lambda: {"name": "auto"})
    """`name` of a plugin of kind "transport", and its own settings. auto: the first transport that
    reaches all ranks."""
    bucket_mb: float = setting(BUCKET_MB, at_least(0.01))
    """Limit of the memory for all messages of a sync that are in flight, per rank, in 10^6
    bytes."""
    alias: bool = True
    """Whether trainer and engine share storage where they can: whole parameters of the same dtype
    and memory order, of a role on one rank that is not offloaded and keeps its engine
    (generation.keep)."""
    verify: bool = False
    """Whether each sync compares the checksums of all values on both sides. Without it each one
    compares a 32nd of them, and all at the start, after a failure and every 32 syncs."""

    @property
    def bucket_bytes(self) -> int:
        """The limit of messages in flight, in bytes."""
        return int(self.bucket_mb * 1e6)


@attrs.frozen
class RewardPart:
    """One of several reward functions."""

    name: str
    """Name of the part; its scores are the column rewards/<name>."""
    function: str
    """Name of a plugin of kind "reward", or "package.module:function"."""
    options: dict[str, Any] = attrs.field(factory=dict)
    """The function's own options."""
    weight: float = 1.0
    """Factor of the part's score in the sum of all parts."""
    on_failure: RewardFailureRule = attrs.field(factory=RewardFailureRule)
    """What happens when the function fails."""
    per_token: bool = False
    """Whether the function returns a list with a number for each response token."""


@attrs.frozen
class RoleSection:
    """A role's table.

    Policy and value models inherit what their tables leave out from the actor's. A reward has one
    of `function`, `parts` and `model`.
    """

    # The model and its placement
    model: ModelConfig = attrs.field(factory=ModelConfig)
    """The model: a folder, an earlier stage's export, or a config with random weights."""
    pool: str = "main"
    """Name of the pool. Roles on one pool share its processes and take turns; roles on different
    pools run side by side."""
    layout: LayoutSection = attrs.field(factory=LayoutSection)
    """How the pool's devices split the model."""
    backend: dict[str, Any] = attrs.field(factory=dict)
    """`name` of a training backend (default: the one whose descriptor says so), and that backend's
    own settings. A reward's model without one has the actor's, but for its adapters."""

    # Generation
    generation: GenerationSection = attrs.field(factory=GenerationSection)
    """For the actor: the layout of its rollout engines."""
    sync: SyncConfig = attrs.field(factory=SyncConfig)
    """For the actor: how its weights are sent to the rollout engine."""

    # Training
    optimizer: OptimizerConfig = attrs.field(factory=OptimizerConfig)
    """The optimizer of a role that is trained."""
    micro_batch_tokens: int = setting(16384, at_least(1))
    """Limit of the tokens of one forward pass, padding included. A sequence that is longer has a
    pass to itself."""
    offload: bool = False
    """Whether weights and optimizer move to the CPU while other roles of the pool work."""

    # Reward functions
    function: str | None = None
    """A reward function: the name of a plugin of kind "reward", or "package.module:function"."""
    options: dict[str, Any] = attrs.field(factory=dict)
    """The reward function's own options."""
    on_failure: RewardFailureRule = attrs.field(factory=RewardFailureRule)
    """What happens when the reward function fails."""
    per_token: bool = False
    """Whether the reward function returns a list with a number for each response token. PPO,
    REINFORCE++ and Safe RLHF credit each number to its token, other algorithms use the sum."""
    parts: tuple[RewardPart, ...] = ()
    """Several reward functions; their weighted scores are added up."""


@attrs.frozen
class EnvironmentSection:
    """[environment]: answers the actor's turns. Without this table a response is one turn."""

    name: str
    """Name of a plugin of kind "environment", or "package.module:Class"."""
    max_turns: int = setting(8, attrs.validators.ge(1))
    """Limit of the turns of an episode. An episode that is not done by then ends as at
    sampling.max_tokens, which counts all tokens of an episode, the environment's included."""
    options: dict[str, Any] = attrs.field(factory=dict)
    """The environment's own options."""
    free: bool = False
    """Whether each episode goes on as soon as its own environment has answered. False: in rounds,
    a turn of every episode and then all answers, whose batches and bits are always the same."""
    at_once: int = setting(64, at_least(1))
    """Number of environments that a rank asks at the same time, each in a thread."""
    timeout_s: float | None = setting(None, positive)
    """Time limit of an answer, in seconds; a longer one is a failure. None sets no limit."""
    episode_s: float | None = setting(None, positive)
    """Time limit of an episode, in seconds. One that takes longer ends, after the turn or without
    the answer that is under way, and is scored as it is. None sets no limit."""
    on_failure: FailureRule = attrs.field(factory=FailureRule)
    """What happens when an episode fails. Each further try begins again at the prompt, with a new
    environment."""


@attrs.frozen
class ValidationSection:
    """[validation]: how the run evaluates the actor on a held-out set: by the reward of greedy
    responses, or by the loss alone.
    """

    # The held-out set
    name: str = "validation"
    """Name of the held-out set in the last line of the run."""
    data: dict[str, Any] = attrs.field(factory=dict)
    """Fields of [data] that differ for the held-out set (path, options, limit, ...)."""

    # When
    every: int = setting(0, non_negative)
    """Steps between validations. 0: only at the end."""
    at_start: bool = False
    """Whether there is also a validation before the first step."""
    stop_at: float | None = None
    """The run, or its stage, ends at the first validation whose score reaches this; needs `every`.
    Without it the end is after run.steps."""

    # The work of a validation
    generate: bool = True
    """Whether the actor generates responses to be scored. False: only the loss on the set's own
    responses is computed."""
    samples: int = setting(8, non_negative)
    """Number of rows of each validation that are recorded."""
    batch_rows: int = setting(1024, positive)
    """Number of rows in one call."""
