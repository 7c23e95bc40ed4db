"""A job's processes: checked data, started pools, built models, and their end.

prepare_all    checks the data and models of every run stage; nothing is started yet
Session        starts the runtime and the pools, then builds the worker groups in them
  pools        named sets of processes, which roles share
  groups       role -> (Role, WorkerGroup): the models, and the scorers in the main pool
  rollouts     role -> engines that generate in a pool of their own
  tasks        the group that draws data and runs numerical work, in the main pool
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch

from hybridflow.core.context import GroupStepContext
from hybridflow.core.contracts.data_source import DataConfig
from hybridflow.core.contracts.planner import DeviceMemory, PoolMemory
from hybridflow.core.contracts.role import Role
from hybridflow.core.contracts.runtime import Runtime, runtime_settings
from hybridflow.core.contracts.tokenizer import Tokenizer
from hybridflow.core.contracts.worker import RankContext
from hybridflow.core.data.examples import ExampleSet
from hybridflow.core.data.rows import Rows
from hybridflow.core.errors import ConfigError, ModelError
from hybridflow.core.groups.group import Future, Pool, WorkerGroup
from hybridflow.core.groups.outbox import Outbox
from hybridflow.core.job.job import Job, ModelRole, PlacedModel
from hybridflow.core.plugins import registry
from hybridflow.core.plugins.resolve import build_tokenizer, load_source
from hybridflow.core.processes import page
from hybridflow.core.rollouts.separate import SeparateRollout
from hybridflow.core.rollouts.weight_sync import sync_line
from hybridflow.core.running.exports import (
    begin_with_bos,
    export_folder,
    write_special_tokens,
)
from hybridflow.core.running.preflight import Checked, devices_of, preflight, torch_allocates
from hybridflow.core.running.timeline import Timeline
from hybridflow.core.running.waiting import said_meanwhile
from hybridflow.core.values.batch import Batch
from hybridflow.core.values.files import LOGS, PARTIAL_EXPORT, TOKENIZER
from hybridflow.core.values.parallel import ParallelLayout
from hybridflow.core.workers.device_memory import DeviceWorker
from hybridflow.core.workers.episodes import Episodes
from hybridflow.core.workers.model_worker import Built, ModelWorker
from hybridflow.core.workers.rollout_worker import RolloutWorker
from hybridflow.core.workers.tasks import (
    DataWorker,
    RewardWorker,
    TaskWorker,
    example_batch,
    reward_columns,
)

PATIENCE_S = (2.0, 8.0)
"""Seconds before the memory of devices is measured again, where it is too little."""


@attrs.frozen(eq=False)
class Prepared:
    """The checked data and tokenizer of a job, before any process starts."""

    tokenizer: Tokenizer
    sets: dict[str, DataConfig]
    """Data set ("train", "validation", ...) -> its config."""
    rows: dict[str, int]
    """Data set -> its number of usable rows."""
    dropped: dict[str, int]
    """Data set -> the number of rows left out because their prompts are too long."""
    kinds: dict[str, dict[int, Batch]]
    """Data set -> its first row of each kind by number, on which rewards are tried."""
    notes: tuple[str, ...] = ()
    """Remarks on settings that are legal and probably unintended."""


def prepare_all(jobs: Sequence[Job]) -> list[Prepared]:
    """Prepare every run stage before the first one starts. Raises as `prepare` does."""
    tokenizers: dict[str, Tokenizer] = {}
    prepared = []
    for job in jobs:
        checked = prepare(job, tokenizers.get(job.tokenizer_path or ""))
        prepared.append(checked)
        # A later run stage reads this one's tokenizer from here, where it is not written yet.
        tokenizers[str(job.folder / TOKENIZER)] = checked.tokenizer
    return prepared


def try_rewards(job: Job, prepared: Prepared) -> None:
    """Try a job's reward functions in this process, long before its workers would.

    Nothing is tried where the workers are on other machines. Raises RewardError.
    """
    if runtime_settings(job.runtime_config).remote:
        return
    for name, scorer in job.scorers.items():
        context = RankContext(name, 0, ParallelLayout(), torch.device("cpu"), job.run.seed)
        worker = RewardWorker(context, scorer.parts, prepared.tokenizer)
        for where, row in _trials(job, prepared, scorer.role):
            worker.try_out(row, where)


def _trials(job: Job, prepared: Prepared, role: Role) -> Iterator[tuple[str, Batch]]:
    """Yield a row of each kind, of the data sets whose responses get this reward, and its place."""
    sets = ["train"] if role in job.algorithm.roles() else []
    # Validation scores by the reward alone.
    if role.name == "reward" and job.validation is not None and job.validation.generate:
        sets.append("validation")
    for name in sets:
        for number, row in prepared.kinds[name].items():
            if job.environment is not None:
                returns = torch.zeros(row.rows, dtype=torch.float32)
                row = row.join(Batch({"episode_return": returns}))
            yield f"row {number} of {name}", row


def prepare(
    job: Job, tokenizer: Tokenizer | None = None, sets: Mapping[str, DataConfig] | None = None
) -> Prepared:
    """Build the tokenizer (if none is given) and check data and models against each other.

    sets: the data sets by name; None: those of the job. Raises DataError, ModelError, ConfigError.
    """
    # The tokenizer may be trained on the texts.
    if tokenizer is None:
        tokenizer = build_tokenizer(
            job.tokenizer,
            job.tokenizer_path,
            lambda: Rows(load_source(job.data), job.data).texts(),
        )

    # Every model must have an embedding for each token, and every turn an end.
    notes = []
    for name, model in job.models.items():
        embeddings = model.spec.model.vocab_size
        try:
            tokenizer.check(embeddings)
        except ModelError as error:
            raise ModelError(f"{name}: {error}") from error
        if tokenizer.vocab_size < embeddings / 2:
            notes.append(
                f"{name}: the tokenizer has {tokenizer.vocab_size:,} tokens, and the model "
                f"embeddings for {embeddings:,}: the others are no text, and can be sampled"
            )
    if job.environment is not None:
        Episodes(job.environment, tokenizer).check()

    # A data set's usable rows are counted here, so that bad rows stop the run before it starts.
    sets = _sets(job) if sets is None else dict(sets)
    limits = [model.spec.model.max_positions for model in job.models.values()]
    positions = [limit for limit in limits if limit is not None]
    rows = {}
    dropped = {}
    kinds = {}
    for name, config in sets.items():
        examples = ExampleSet(load_source(config), config, tokenizer)
        examples.check(min(positions, default=None))
        rows[name] = len(examples)
        dropped[name] = examples.dropped
        kinds[name] = {
            number: example_batch([example], np.zeros(1))
            for number, example in examples.of_each_kind().items()
        }
    return Prepared(tokenizer, sets, rows, dropped, kinds, tuple(notes))


def _sets(job: Job) -> dict[str, DataConfig]:
    """Return the data sets of a job, by name."""
    sets = {"train": job.data, **job.more_data}
    if job.validation_data is not None:
        sets["validation"] = job.validation_data
    return sets


class Session:
    """The processes and worker groups of a job.

    Use it as a context manager: entering starts everything, leaving ends it.
    """

    def __init__(
        self, job: Job, prepared: Prepared, say: Callable[[str], None] = lambda text: None
    ):
        self.job = job
        self.prepared = prepared
        self.say = say
        self.timeline = Timeline()
        self.outbox = Outbox(job.untrained_pools)
        self.memory: Sequence[PoolMemory] = ()
        """The estimated memory of each pool's devices, where it was checked."""
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
        """Start the runtime, the pools, the tasks' workers and the models."""
        job = self.job
        self.say(f"starting {job.runtime}")
        self.runtime.start()

        self.pools: dict[str, Pool] = {}
        self.rollouts: dict[str, SeparateRollout] = {}
        for name in job.pools:
            spec = job.launched(name)
            processes = f"{spec.world} process{'es' if spec.world > 1 else ''}"
            device = spec.device or job.device
            self.say(f"starting pool {name}: {processes} on {device}")
            self.pools[name] = Pool.launch(
                spec, self.runtime, device, page.environment(), wait=False
            )
        self.runtime.started()

        job = self.job = self._look_at_devices()

        self.tasks = self.make_group(TaskWorker, self.pools[job.main_pool], name="tasks")
        self.data = self.make_group(
            DataWorker,
            self.pools[job.data_pool],
            self.prepared.sets,
            self.prepared.tokenizer,
            name="data",
        )
        with said_meanwhile(self.say, lambda: f"still building {', '.join(job.models)}"):
            self._build()

    def _look_at_devices(self) -> Job:
        """Return the job with engines that leave enough memory to the models.

        Raises ConfigError where models need more memory than their devices have.
        """
        job = self.job
        groups = {
            name: self.make_group(DeviceWorker, pool, name=f"{name}.devices")
            for name, pool in self.pools.items()
            if pool.spec.device is None  # models are in no other one
        }
        for name, group in groups.items():
            if job.device == "cuda" and torch_allocates(job, name):
                group.grow_segments().result()
            if job.device == "cuda" and job.run.deterministic:
                group.be_deterministic().result()
        if job.run.preflight == "on":
            job, self.memory = self._preflight(groups)
        for group in groups.values():
            group.close()
        return job

    def _preflight(self, groups: Mapping[str, WorkerGroup]) -> Checked:
        """Return `preflight` of the job. Raises ConfigError where the memory is not enough.

        It is repeated, as earlier processes may take a moment to free their memory.
        """
        job = self.job
        for patience in PATIENCE_S:
            try:
                return preflight(job, _memory(groups), self.say)
            except ConfigError:
                time.sleep(patience)
        return preflight(job, _memory(groups), self.say)

    def _build(self) -> None:
        """Build the models, their engines and the scorers, and report how weights are synced."""
        # A reward that cannot work is found before anything large is built.
        for name, scorer in self.job.scorers.items():
            columns = reward_columns(scorer.role.column, scorer.parts)
            group = self.make_group(
                RewardWorker,
                self.pools[scorer.pool or self.job.reward_pool],
                scorer.parts,
                self.prepared.tokenizer,
                name=name,
                writes={"score": columns},
            )
            self.groups[name] = (scorer.role, group)
            for where, row in _trials(self.job, self.prepared, scorer.role):
                group.try_out(row, where).result()

        # All models are built at the same time; the last loop below waits for them.
        builds: list[tuple[str, Future]] = []
        for name, placed in self.job.models.items():
            self.say(f"building {name}")
            builds += self._build_model(name, placed)

        self.parameters = {}
        """Role -> its model's number of parameters."""
        for name, build in builds:
            ranks: list[Built | None] = build.result()
            if ranks[0] is None:  # engines in a pool of their own train nothing
                continue
            self.parameters[name] = ranks[0].parameters

            # Ranks that have an engine report what a sync of its weights costs.
            costs = [rank.sync for rank in ranks if rank is not None and rank.sync is not None]
            if costs:
                self.say(f"{name}: {sync_line(costs)}")

        # Engines of another pool can be reached once both sides are built.
        for name, rollout in self.rollouts.items():
            self.say(f"{name}: {sync_line([rollout.connect()])}")

    def _build_model(self, name: str, placed: PlacedModel) -> Iterator[tuple[str, Future]]:
        """Start to build a model, and its engines where they have a pool of their own.

        Yields (group's name, its build).
        """
        job = self.job
        apart = placed.rollout_pool is not None
        driver = None
        if job.environment and placed.spec.engine:
            driver = Episodes(job.environment, self.prepared.tokenizer, job.longest_prompt)

        # The engine is part of the training worker, unless it has a pool of its own.
        logs = (job.folder / LOGS).absolute()
        role = attrs.evolve(placed.spec, logs=str(logs))
        model = attrs.evolve(role, engine=None) if apart else role
        options: dict[str, Any] = {
            "layout": placed.layout,
            "generation": None if apart else placed.generation,
            "extras": extras(placed.spec),
        }
        group = self.make_group(
            ModelWorker, self.pools[placed.pool], model, driver, name=name, **options
        )
        yield name, group.build()

        # A pool of engines trains nothing: its ranks count as dp of a layout that no trainer has.
        if placed.rollout_pool is not None and placed.generation is not None:
            options |= {"layout": placed.generation.train, "generation": placed.generation}
            pool = self.pools[placed.rollout_pool]
            engines = self.make_group(
                RolloutWorker, pool, role, driver, name=f"{name}.rollout", **options
            )
            yield engines.name, engines.build()
            self.rollouts[name] = SeparateRollout(group, engines, placed.spec.sync)
        self.groups[name] = (placed.role, group)

    def make_group(self, worker: type, pool: Pool, *args: Any, **options: Any) -> WorkerGroup:
        """Make a group of one worker per rank of the pool, with what the session's groups share."""
        return WorkerGroup(
            worker,
            pool,
            *args,
            seed=self.job.run.seed,
            watch=self.timeline.add,
            outbox=self.outbox,
            **options,
        )

    def context(self) -> GroupStepContext:
        """Make the context of the algorithm's steps; its responses also stop at the eos token."""
        job = self.job
        return GroupStepContext(
            self.groups,
            self.tasks,
            self.data,
            attrs.evolve(job.sampling, stop_token_ids=self.stop_ids),
            job.run.seed,
            self.rollouts,
            job.environment is not None,
        )

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """The tokens at which responses stop, the tokenizer's eos last."""
        return (*self.job.sampling.stop_token_ids, self.prepared.tokenizer.eos_id)

    @property
    def trained(self) -> dict[str, WorkerGroup]:
        """Role -> worker group of the models that have an optimizer."""
        return {name: self.groups[name][1] for name in self.job.trained}

    # --- state: all groups are called before the first result is waited for ---

    def save(self, folder: Path) -> None:
        """Write the weights and optimizers of the trained roles, a folder per role.

        They may change from then on, and the files be complete later (see `saved`).
        """
        path = folder.absolute()
        for future in [group.save(str(path / name)) for name, group in self.trained.items()]:
            future.result()

    def saved(self, wait: bool) -> Callable[[], bool]:
        """Ask whether all that the last `save` began is on the disk, or wait for that.

        The call returns at once, with what returns the answer. That raises where it could not be
        written.
        """
        futures = [group.saved(wait) for group in self.trained.values()]
        return lambda: all([all(future.result()) for future in futures])

    def load(self, folder: Path) -> None:
        """Load the files of `save`."""
        path = folder.absolute()
        for future in [group.load(str(path / name)) for name, group in self.trained.items()]:
            future.result()
        for rollout in self.rollouts.values():
            rollout.forget()

    def export(self, folder: Path) -> None:
        """Write a Hugging Face folder for each trained role, with the tokenizer.

        Each is written aside, and takes the place of an earlier one when it is complete.
        """
        tokenizer = self.prepared.tokenizer
        aside = folder / PARTIAL_EXPORT
        shutil.rmtree(aside, ignore_errors=True)
        for name, group in self.trained.items():
            path = aside / name
            group.export(str(path.absolute()), self.job.run.export_dtype).result()
            self._save_tokenizer(path)
            model = self.job.models[name].spec.model
            write_special_tokens(path, model, tokenizer, self.stop_ids)
            _replace(export_folder(folder, name), path)
        self._save_tokenizer(aside / TOKENIZER)
        _replace(folder / TOKENIZER, aside / TOKENIZER)
        aside.rmdir()

    def _save_tokenizer(self, folder: Path) -> None:
        tokenizer = self.prepared.tokenizer
        tokenizer.save(folder)
        if self.job.data.bos and tokenizer.bos_id is not None:
            begin_with_bos(folder, tokenizer.bos_id)

    def rows(self, name: str, start: int, stop: int) -> Batch:
        """Return rows `start` to `stop` of the data set `name`; its sampler does not advance."""
        return self.data.rows(name, start, stop)


def _replace(place: Path, written: Path) -> None:
    """Put a folder in the place of what is there."""
    if place.is_dir() and not place.is_symlink():
        shutil.rmtree(place)
    else:
        place.unlink(missing_ok=True)
    place.parent.mkdir(parents=True, exist_ok=True)
    written.rename(place)


def _memory(groups: Mapping[str, WorkerGroup]) -> dict[str, DeviceMemory]:
    """Return the present memory of each pool's devices."""
    return devices_of({name: group.memory().result() for name, group in groups.items()})


def extras(role: ModelRole) -> tuple[str, ...]:
    """Return the columns that the role's backend and engine read beside the framework's own."""
    columns = registry().training_capabilities(role.backend).extras
    if role.engine is not None:
        columns |= registry().engine_capabilities(role.engine).extras
    return tuple(sorted(columns))
