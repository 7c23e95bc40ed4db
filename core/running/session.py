"""A job brought to life: data checked, processes started, models built; and taken down again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs

from hybridflow.core.context import StepContext
from hybridflow.core.contracts.data_source import DataConfig
from hybridflow.core.contracts.role import Role
from hybridflow.core.contracts.runtime import Runtime
from hybridflow.core.contracts.tokenizer import Tokenizer
from hybridflow.core.data.examples import ExampleSet
from hybridflow.core.data.rows import Rows
from hybridflow.core.errors import ModelError
from hybridflow.core.groups.group import Pool, WorkerGroup
from hybridflow.core.job.job import Job, ModelRole
from hybridflow.core.plugins import registry
from hybridflow.core.plugins.resolve import build_tokenizer, load_source
from hybridflow.core.rollouts.separate import SeparateRollout
from hybridflow.core.rollouts.weight_sync import sync_line
from hybridflow.core.running.timeline import Timeline
from hybridflow.core.running.waiting import said_meanwhile
from hybridflow.core.values.batch import Batch
from hybridflow.core.workers.episodes import Episodes
from hybridflow.core.workers.model_worker import Built, ModelWorker
from hybridflow.core.workers.rollout_worker import RolloutWorker
from hybridflow.core.workers.tasks import RewardWorker, TaskWorker


@attrs.frozen(eq=False)
class Prepared:
    """What was checked before anything started."""

    tokenizer: Tokenizer
    sets: dict[str, DataConfig]
    rows: dict[str, int]
    dropped: dict[str, int]


def prepare_all(jobs: Sequence[Job]) -> list[Prepared]:
    """Every stage checked before the first one starts."""
    tokenizers: dict[str, Tokenizer] = {}
    prepared = []
    for job in jobs:
        prepared.append(prepare(job, tokenizers.get(job.tokenizer_path or "")))
        tokenizers[str(job.folder / "tokenizer")] = prepared[
            -1
        ].tokenizer  # what a later stage will find there
    return prepared


def prepare(job: Job, tokenizer: Tokenizer | None = None) -> Prepared:
    """Build the tokenizer (if none is given) and check data and models against each other.

    Raises DataError, ModelError, ConfigError.
    """
    source = load_source(job.data)
    if tokenizer is None:
        tokenizer = build_tokenizer(
            job.tokenizer, job.tokenizer_path, lambda: Rows(source, job.data).texts()
        )
    for name, model in job.models.items():
        try:
            tokenizer.check(model.spec.model.vocab_size)
        except ModelError as error:
            raise ModelError(f"{name}: {error}") from error
    if job.environment is not None:
        Episodes(job.environment, tokenizer).stop_ids()  # says what cannot end a turn
    sets = {"train": job.data, **job.more_data}
    if job.validation_data is not None:
        sets["validation"] = job.validation_data
    rows, dropped = {}, {}
    for name, config in sets.items():
        examples = ExampleSet(source if name == "train" else load_source(config), config, tokenizer)
        examples.check()
        rows[name], dropped[name] = len(examples), examples.dropped
    return Prepared(tokenizer, sets, rows, dropped)


class Session:
    """The worker groups of a job. Use it as a context manager: it ends what it started."""

    def __init__(
        self, job: Job, prepared: Prepared, say: Callable[[str], None] = lambda text: None
    ):
        self.job, self.prepared, self.say = job, prepared, say
        self.timeline = Timeline()
        self.runtime: Runtime = registry().get("runtime", job.runtime)(job.runtime_config)
        self.groups: dict[str, tuple[Role, WorkerGroup]] = {}

    def __enter__(self) -> Session:
        try:
            self._start()
        except BaseException:
            self.runtime.shutdown()
            raise
        return self

    def __exit__(self, *error: Any) -> None:
        self.runtime.shutdown()

    def _start(self) -> None:
        job, tokenizer = self.job, self.prepared.tokenizer
        self.say(f"starting {job.runtime}")
        self.runtime.start()
        self.pools: dict[str, Pool] = {}
        self.rollouts: dict[str, SeparateRollout] = {}
        for name, spec in job.pools.items():
            self.say(
                f"starting pool {name}: {spec.world} process{'es' if spec.world > 1 else ''} on {job.device}"
            )
            self.pools[name] = Pool.launch(spec, self.runtime, job.device)
        main = self.pools[job.main_pool]
        self.tasks = self.make_group(TaskWorker, main, self.prepared.sets, tokenizer, name="tasks")
        with said_meanwhile(self.say, lambda: f"still building {', '.join(job.models)}"):
            self._build(main)

    def _build(self, main: Pool) -> None:
        """The models and their engines, and what scores beside them."""
        job, tokenizer = self.job, self.prepared.tokenizer
        building = []
        for name, placed in job.models.items():
            self.say(f"building {name}")
            apart = placed.rollout_pool is not None
            driver = (
                Episodes(job.environment, tokenizer)
                if job.environment and placed.spec.engine
                else None
            )
            role = attrs.evolve(placed.spec, logs=str((job.folder / "logs").absolute()))
            model = attrs.evolve(role, engine=None) if apart else role
            generation = None if apart else placed.generation
            options: dict[str, Any] = {
                "layout": placed.layout,
                "generation": generation,
                "extras": extras(placed.spec),
            }
            group = self.make_group(
                ModelWorker, self.pools[placed.pool], model, driver, name=name, **options
            )
            building.append((name, group.build()))
            if placed.rollout_pool is not None and placed.generation is not None:
                options |= {"layout": placed.generation.train, "generation": placed.generation}
                pool = self.pools[placed.rollout_pool]
                engines = self.make_group(
                    RolloutWorker, pool, role, driver, name=f"{name}.rollout", **options
                )
                building.append((engines.name, engines.build()))
                self.rollouts[name] = SeparateRollout(group, engines, placed.spec.sync)
            self.groups[name] = (placed.role, group)
        for name, scorer in job.scorers.items():
            group = self.make_group(RewardWorker, main, scorer.parts, tokenizer, name=name)
            self.groups[name] = (scorer.role, group)
        self.parameters = {}
        for name, built in building:
            ranks: list[Built | None] = built.result()
            if ranks[0] is None:  # engines of their own
                continue
            self.parameters[name] = ranks[0].parameters
            costs = [rank.sync for rank in ranks if rank is not None and rank.sync is not None]
            if costs:
                self.say(f"{name}: {sync_line(costs)}")
        for name, rollout in self.rollouts.items():
            self.say(f"{name}: {sync_line([rollout.connect()])}")

    def make_group(self, worker: type, pool: Pool, *args: Any, **options: Any) -> WorkerGroup:
        """One worker per rank of the pool, with the run's seed and timeline."""
        return WorkerGroup(
            worker, pool, *args, seed=self.job.run.seed, watch=self.timeline.add, **options
        )

    def context(self) -> StepContext:
        sampling = attrs.evolve(
            self.job.sampling,
            stop_token_ids=(*self.job.sampling.stop_token_ids, self.prepared.tokenizer.eos_id),
        )
        return StepContext(
            self.groups,
            self.tasks,
            sampling,
            self.job.run.seed,
            self.rollouts,
            self.job.environment is not None,
        )

    @property
    def trained(self) -> dict[str, WorkerGroup]:
        return {
            n: self.groups[n][1] for n, m in self.job.models.items() if m.spec.optimizer is not None
        }

    # State
    def save(self, folder: Path) -> None:
        """The trained roles' weights and optimizers."""
        for future in [
            group.save(str((folder / name).absolute())) for name, group in self.trained.items()
        ]:
            future.result()

    def load(self, folder: Path) -> None:
        for future in [
            group.load(str((folder / name).absolute())) for name, group in self.trained.items()
        ]:
            future.result()

    def export(self, folder: Path) -> None:
        """Hugging Face folders of the trained roles, each with the tokenizer."""
        for name, group in self.trained.items():
            group.export(str((folder / "export" / name).absolute())).result()
            self.prepared.tokenizer.save(folder / "export" / name)
        self.prepared.tokenizer.save(folder / "tokenizer")

    def rows(self, name: str, start: int, stop: int) -> Batch:
        return self.tasks.rows(name, start, stop)


def extras(role: ModelRole) -> tuple[str, ...]:
    """Columns that the role's backend and its engine read beside ours."""
    found = registry().training_capabilities(role.backend).extras
    if role.engine is not None:
        found |= registry().engine_capabilities(role.engine).extras
    return tuple(sorted(found))
