"""Checks across the sections of a job: combinations that cannot work, found before anything starts.

Each check is a function of the job that yields (dotted key, message); the message says what is
wrong and how to repair it. A check names the sections that it reads, and is skipped when one of
them has problems of its own.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from hybridflow.core.contracts.runtime import runtime_settings
from hybridflow.core.errors import HybridFlowError
from hybridflow.core.job.job import Job
from hybridflow.core.plugins import registry
from hybridflow.core.running.journal import Journal
from hybridflow.core.workers.gradients import LAG
from hybridflow.settle.config.structure import Problem

Check = Callable[[Job], Iterator[tuple[str, str]]]
CHECKS: list[tuple[frozenset[str], Check]] = []
"""The checks in order, each with the sections that it reads."""
MOST_STALE = 4
"""Largest run.max_staleness that is taken."""


def _reads(*sections: str) -> Callable[[Check], Check]:
    """Decorate a check that reads these sections: it is added to CHECKS."""

    def add(check: Check) -> Check:
        CHECKS.append((frozenset(sections), check))
        return check

    return add


def cross_checks(job: Job, failed: set[str]) -> list[Problem]:
    """Return the problems between sections. `failed` are sections with problems of their own."""
    return [
        Problem(key, text)
        for sections, check in CHECKS
        if not sections & failed
        for key, text in check(job)
    ]


# --- the run ---


@_reads("run", "algorithm", "roles", "pools")
def staleness(job: Job) -> Iterator[tuple[str, str]]:
    """Steps are generated ahead by engines that can, and their algorithm weighs older tokens."""
    key = "run.max_staleness"
    most = job.run.max_staleness
    algorithm = f"algorithm {job.algorithm_name!r}"
    if not most:
        if any(LAG in loss.reads for loss in job.algorithm.losses().values()):
            yield (
                key,
                f"is 0, and the loss of {algorithm} reads by how many steps a token lags; set 1 or "
                "more, or another value of algorithm.old_logprobs",
            )
        return

    if job.replayed is not None:
        return  # of the steps that are replayed, which that run has checked
    generating = {name: model for name, model in job.models.items() if model.spec.engine}
    if not any(model.role.generates and model.role.trained for model in generating.values()):
        yield key, f"is {most}, and {algorithm} trains no model that generates; set 0"
        return
    apart = {name for name, model in generating.items() if model.rollout_pool is not None}
    if most > MOST_STALE:
        yield key, f"is {most}; sequences may be at most {MOST_STALE} steps ahead"
    if job.run.in_flight == "no" and most > 1:
        yield (
            "run.in_flight",
            f'is "no", and run.max_staleness is {most}: weights that wait for what is under way '
            'are for 1 step; set "recompute", or run.max_staleness = 1',
        )
    if job.carried_apart and job.environment is not None:
        yield (
            "run.in_flight",
            "newer weights come while the engines generate, and turns of an environment cannot go "
            'on by other weights; set "no", with run.max_staleness = 1',
        )
    for name, model in generating.items() if job.run.in_flight == "keep" else ():
        if model.rollout_pool is None:
            yield (
                "run.in_flight",
                f'is "keep", and the engines of {name} take turns with its training, which has '
                'their cache meanwhile; set "auto", or give the engines a pool '
                f"({name}.generation.pool)",
            )
        elif not _updates_in_flight(str(model.spec.engine)):
            yield (
                "run.in_flight",
                f'is "keep", and the engine {model.spec.engine} takes no newer weights while '
                'sequences run; set "recompute"',
            )
    for name, model in generating.items():
        pool = model.rollout_pool
        if pool is None:
            if apart:
                yield (
                    key,
                    f"is {most}, and the engines of {name} take turns with its training, while "
                    f"those of {', '.join(sorted(apart))} have a pool of their own; give all of "
                    "them one, or none",
                )
            elif job.environment is not None:
                yield (
                    key,
                    f"is {most}, and the engines of {name} take turns with its training: turns of "
                    "an environment cannot be carried over to the next step; give the engines a "
                    f"pool ({name}.generation.pool, and [pools]), or set 0",
                )
        elif pool not in job.untrained_pools:
            trained = [role for role in job.trained if job.models[role].pool == pool]
            yield (
                key,
                f"is {most}, and pool {pool!r}, in which {name} generates, also trains "
                f"{', '.join(trained)}; give the engines a pool in which nothing is trained",
            )
    if not job.algorithm.corrects_staleness:
        yield (
            key,
            f"is {most}, so tokens are of weights of earlier steps, and {algorithm} does not weigh "
            'them; set algorithm.correction = "truncate" or "mask", or old_logprobs = "rollout"'
            if hasattr(job.algorithm.config, "correction")
            else f"is {most}, and {algorithm} does not say that it weighs tokens of older weights "
            "(Algorithm.corrects_staleness); set 0",
        )


def _updates_in_flight(engine: str) -> bool:
    """Return whether an engine takes newer weights while sequences run; true if it is not here."""
    try:
        found: bool = registry().get("rollout_engine", engine).inflight
    except HybridFlowError:
        return True  # it is installed where the run will be
    return found


@_reads("run", "algorithm")
def replay(job: Job) -> Iterator[tuple[str, str]]:
    """The run that is replayed is another one, and has a journal of all steps."""
    key = "run.replay"
    if (replayed := job.replayed) is None:
        return
    if not any(role.generates for role in job.algorithm.roles()):
        if job.stage is None:
            yield key, f"algorithm {job.algorithm_name!r} generates nothing; remove it"
        return
    if replayed.resolve() == job.folder.resolve():
        yield key, "is the run's own folder; give this run a name of its own (run.name)"
        return
    steps = Journal(replayed).whole()
    if not steps:
        yield (
            key,
            f"{str(replayed)!r} has no journal that begins at step 1; name the folder of a run "
            "with run.journal = true",
        )
    elif steps < job.run.steps:
        yield (
            key,
            f"the journal in {str(replayed)!r} has the steps 1 to {steps}, and run.steps is "
            f"{job.run.steps}; set {steps} at most",
        )


@_reads("run", "roles", "environment")
def deterministic(job: Job) -> Iterator[tuple[str, str]]:
    """A run that must repeat its bits has nothing that varies, on GPUs above all."""
    if not job.run.deterministic:
        return
    key = "run.deterministic"
    if job.carried_apart:
        yield (
            key,
            "is true, and which tokens are made by which weights depends on when these come; set "
            'false, or run.in_flight = "no" with run.max_staleness = 1',
        )
    if job.device != "cuda":
        return
    if job.environment is not None:
        yield (
            key,
            "is true, and which turns of an environment are generated together depends on how long "
            "its tools take; set false, or run on the CPU",
        )
    for name, model in job.models.items():
        spec = model.spec
        plugins = {f"backend {spec.backend}": spec.backend_config}
        if spec.engine is not None:
            plugins[f"engine {spec.engine}"] = spec.engine_config
        for plugin, settings in plugins.items():
            if settings.varies:
                yield key, f"is true, and {name}'s {plugin} may vary: {settings.varies}"


@_reads("run")
def folder(job: Job) -> Iterator[tuple[str, str]]:
    """The run's folder, or the nearest parent that exists, can be written to."""
    if not job.run.folder.isprintable():
        yield "run.folder", f"{job.run.folder!r} is no path; leave control characters out"
        return

    # The folder itself is made later, when the run begins.
    parents = (job.folder, *job.folder.absolute().parents)
    try:
        nearest = next((path for path in parents if path.exists()), Path("/"))
    except OSError as error:  # a name that is too long
        yield "run.folder", f"{str(job.folder)!r}: {error.strerror}; set run.folder"
        return
    if not nearest.is_dir():
        yield (
            "run.folder",
            f"{str(nearest)!r} is a file, and the run's folder is "
            f"{str(job.folder)!r}; set run.folder",
        )
    elif not os.access(nearest, os.W_OK):
        yield (
            "run.folder",
            f"{str(nearest)!r} cannot be written to; set run.folder to a folder of yours",
        )


# --- devices ---


@_reads("run", "runtime")
def device(job: Job) -> Iterator[tuple[str, str]]:
    """This machine has the device of a run whose runtime starts processes here."""
    if job.run.device != "cuda" or runtime_settings(job.runtime_config).remote:
        return
    if not torch.cuda.is_available():
        yield "run.device", "is cuda, and this machine has none that torch can use; set cpu or auto"


@_reads("run", "runtime")
def cluster_device(job: Job) -> Iterator[tuple[str, str]]:
    """With a cluster, run.device is given if this machine, maybe only its head, has no GPU."""
    # The machines of the workers have not been checked.
    here = job.run.device != "auto" or not runtime_settings(job.runtime_config).remote
    if not here and not torch.cuda.is_available():
        yield (
            "run.device",
            "is auto, and the run is for the cluster at runtime.address; this machine "
            "has no CUDA device, and does not know of the cluster's: say cuda or cpu",
        )


@_reads("run", "runtime", "pools")
def local_devices(job: Job) -> Iterator[tuple[str, str]]:
    """Without the address of a cluster, the pools must fit this machine."""
    if runtime_settings(job.runtime_config).remote:
        return

    # A runtime that knows clusters has only this machine while no address is given.
    can = registry().runtime_capabilities(job.runtime)
    for pool in job.pools.values():
        if len(pool.devices_per_node) > 1 and can.cluster:
            yield (
                f"pools.{pool.name}",
                f"is over {len(pool.devices_per_node)} nodes, and runtime "
                f"{job.runtime} has this machine alone; give the cluster's runtime.address, or "
                f"pools.{pool.name} = [{pool.world}]",
            )

    # A runtime of one rank is checked by `max_ranks`; machines without CUDA devices by `device`.
    have = torch.cuda.device_count()
    wanted = sum(pool.world for pool in job.pools.values() if pool.device is None)
    if job.device == "cuda" and have and wanted > have and can.max_ranks != 1:
        yield (
            "pools",
            f"have {wanted} devices in all, and this machine has {have} CUDA "
            f"device{'s' if have > 1 else ''}; make the pools smaller, let roles share one, set "
            "run.device = cpu, or give a cluster's runtime.address",
        )


@_reads("runtime", "pools")
def max_ranks(job: Job) -> Iterator[tuple[str, str]]:
    """No pool has more ranks than the runtime can start."""
    most = registry().runtime_capabilities(job.runtime).max_ranks
    for pool in job.pools.values():
        if most is not None and pool.world > most:
            ranks = "one rank" if most == 1 else f"at most {most} ranks"
            yield (
                f"pools.{pool.name}",
                f"has {pool.world} devices, and runtime {job.runtime} runs "
                f"models on {ranks}; set pools.{pool.name} = [{most}], or another runtime "
                f"({_others(job.runtime)})",
            )


def _others(runtime: str) -> str:
    """List the other runtimes, for a message."""
    others = [name for name in registry().names("runtime") if name != runtime]
    return ", ".join(others) or "there is none"


@_reads("pools", "roles", "algorithm")
def unused_pools(job: Job) -> Iterator[tuple[str, str]]:
    """Every pool has a role, or is the main one, where numerical work is done."""
    used: set[str | None] = {scorer.pool for scorer in job.scorers.values()}
    for model in job.models.values():
        used |= {model.pool, model.rollout_pool}
    if job.carried_apart:
        used.add(job.data_pool)

    for name in job.pools:
        if name not in used and name != job.main_pool:
            yield (
                f"pools.{name}",
                f"no role uses it; remove it, or place a role in it with pool = {name!r}",
            )


@_reads("run")
def able_devices(job: Job) -> Iterator[tuple[str, str]]:
    """Training backends and rollout engines work on the run's device."""
    for role, model in job.models.items():
        spec = model.spec

        # Plugin -> the devices in its capabilities.
        trainer = registry().training_capabilities(spec.backend)
        able = {f"training_backend {spec.backend}": trainer.devices}
        if spec.engine is not None:
            engine = registry().engine_capabilities(spec.engine)
            able[f"rollout_engine {spec.engine}"] = engine.devices

        for plugin, devices in able.items():
            if job.device not in devices:
                works = ", ".join(sorted(devices))
                yield (
                    role,
                    f"{plugin} works on {works}, and run.device is {job.device}; choose "
                    "another of them",
                )


# --- sizes ---


@_reads("algorithm")
def enough_rows(job: Job) -> Iterator[tuple[str, str]]:
    """A step, and an optimizer step of a trained role, has a sequence for every dp rank."""
    rows = job.algorithm.rows_per_step
    mini = job.algorithm.rows_per_update
    for name, model in job.models.items():
        dp = model.layout.dp

        if rows is not None and rows < dp:
            yield (
                f"{name}.layout",
                f"dp is {dp}, and a step has {rows} "
                f"sequence{'s' if rows > 1 else ''}, so that some ranks would have none; make the "
                "step larger, or dp (the pool) smaller",
            )
        elif mini is not None and mini < dp and model.role.trained:
            yield (
                "algorithm.mini_batch_size",
                f"is {mini}, and {name} has dp {dp}, so that some ranks "
                f"would have no sequence in an optimizer step; set {dp} or more, or make dp (the "
                "pool) smaller",
            )


@_reads("data", "sampling", "validation")
def positions(job: Job) -> Iterator[tuple[str, str]]:
    """The longest prompt and the longest response together fit the model's positions."""
    limits = {"data": job.data.max_prompt_tokens}
    if job.validation_data is not None:
        limits["validation.data"] = job.validation_data.max_prompt_tokens
    # The training set or the held-out one, whichever has longer prompts.
    where = max(limits, key=lambda name: limits[name])
    prompt = limits[where]
    response = job.sampling.max_tokens

    for name, model in job.models.items():
        most = model.spec.model.max_positions
        if most is not None and model.spec.engine and prompt + response > most:
            rest = most - response
            advice = f"{where}.max_prompt_tokens = {rest}, say" if rest > 0 else "responses first"
            yield (
                name,
                f"prompts of up to {prompt} tokens ({where}.max_prompt_tokens) and "
                f"responses of up to {response} (sampling.max_tokens) exceed the model's {most} "
                f"positions (max_position_embeddings); make one of them smaller: {advice}",
            )


@_reads()
def generation_layouts(job: Job) -> Iterator[tuple[str, str]]:
    """A role that generates has no context parallelism."""
    for name, model in job.models.items():
        if model.spec.engine and model.layout.cp > 1:
            yield (
                f"{name}.layout",
                f"a role that generates has the axes dp, tp and pp, got cp "
                f"{model.layout.cp}; set it to 1",
            )


# --- data and text ---


@_reads("data")
def data_source(job: Job) -> Iterator[tuple[str, str]]:
    """The sources of all data sets exist; one that several of them name is reported once."""
    sources = {"data": job.data.source}
    if job.validation_data is not None:
        sources["validation.data"] = job.validation_data.source
    sources |= {name: config.source for name, config in job.more_data.items()}

    for source in dict.fromkeys(sources.values()):
        try:
            registry().get("data_source", source)
        except HybridFlowError as error:
            where = next(table for table, name in sources.items() if name == source)
            yield f"{where}.source", f"{error}"


@_reads("data", "algorithm")
def responses(job: Job) -> Iterator[tuple[str, str]]:
    """The data sets have the columns that the algorithm reads."""
    algorithm = f"algorithm {job.algorithm_name!r}"
    sets = {"data": (job.data, job.algorithm.data_columns)}
    for name, columns in job.algorithm.data_sets.items():
        if name not in job.tables:
            yield (
                name,
                f"{algorithm} needs this data set too, as it is set; give [{name}], as [data]",
            )
        else:
            sets[name] = (job.more_data[name], columns)

    # A column that the algorithm reads needs the setting that makes it.
    for name, (data, columns) in sets.items():
        if "response_ids" in columns and data.response is None and data.messages is None:
            yield (
                f"{name}.response",
                f"{algorithm} trains on responses; give their template, such as "
                f"'{{answer}}', or {name}.messages",
            )

        if "unsafe" in columns and not data.unsafe:
            yield (
                f"{name}.unsafe",
                f"{algorithm} must know which responses are unsafe; name the two fields",
            )

        if "preferred" in columns and data.rejected is None:
            yield (
                f"{name}.rejected",
                f"{algorithm} learns from pairs; give the template of the worse "
                f"response beside that of the better one ({name}.response)",
            )


@_reads("validation", "algorithm", "roles")
def validation(job: Job) -> Iterator[tuple[str, str]]:
    """Validation has what it needs: an actor and a reward to generate, else responses."""
    section = job.validation
    data = job.validation_data
    if section is None or data is None:
        return

    if section.generate:
        if "reward" not in job.scorers and "reward" not in job.models:
            yield (
                "validation",
                ("needs a reward to score by; add [reward], or set validation.generate = false"),
            )

        if "actor" not in job.models:
            yield (
                "validation",
                f"needs an actor to generate with, and algorithm "
                f"{job.algorithm_name!r} has none; set validation.generate = false",
            )
    elif data.response is None and data.messages is None:
        yield (
            "validation",
            "generate is false and there are no responses (data.response) for a loss; "
            "give one of them",
        )

    # Only generated responses have a score, and only `every` compares it before the end.
    if section.stop_at is not None and not (section.every and section.generate):
        yield (
            "validation",
            "stop_at is compared with the score of validations; set validation.every, "
            "and leave generate true",
        )


@_reads("tokenizer", "roles", "algorithm")
def tokenizer(job: Job) -> Iterator[tuple[str, str]]:
    """There is a tokenizer: from [tokenizer], or from a folder of the models."""
    settings = job.tokenizer
    if not settings.given and job.tokenizer_path is None and not job.follows:
        yield (
            "tokenizer",
            "the models have no folder to take one from; give tokenizer.path, "
            "tokenizer.characters or tokenizer.train",
        )

    # A given folder must exist.
    if settings.path is not None and not Path(settings.path).is_dir():
        yield "tokenizer.path", f"there is no folder {settings.path!r}"
    try:
        if settings.name is not None:
            registry().get("tokenizer", settings.name)
    except HybridFlowError as error:
        yield "tokenizer.name", f"{error}"


@_reads("sampling")
def sampled_tokens(job: Job) -> Iterator[tuple[str, str]]:
    """The token ids in [sampling] are ids of the models that generate."""
    ids = {
        "stop_tokens": job.sampling.stop_token_ids,
        "logit_bias": [token for token, _ in job.sampling.logit_bias],
    }
    for name, model in job.models.items():
        size = model.spec.model.vocab_size

        # Models that do not generate sample nothing.
        for key, tokens in ids.items():
            wrong = [token for token in tokens if not 0 <= token < size]
            if model.spec.engine and wrong:
                yield (
                    f"sampling.{key}",
                    f"{wrong} are no ids of {name}'s model, which has 0 to {size - 1}; remove them",
                )
