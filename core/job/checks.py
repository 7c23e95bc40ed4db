"""Checks across the sections of a job: combinations that cannot work, found before anything starts.

Each says what was got and what to do. A check is left out when a section that it reads has problems of its own.
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

Check = Callable[[Job], Iterator[str]]
CHECKS: list[tuple[frozenset[str], Check]] = []


def _reads(*sections: str) -> Callable[[Check], Check]:
    def add(check: Check) -> Check:
        CHECKS.append((frozenset(sections), check))
        return check

    return add


def cross_checks(job: Job, failed: set[str]) -> list[str]:
    """What does not fit together; `failed`: sections that have problems of their own."""
    return [
        problem for sections, check in CHECKS if not sections & failed for problem in check(job)
    ]


# The run
@_reads("run")
def staleness(job: Job) -> Iterator[str]:
    if job.run.max_staleness:
        yield (
            f"run.max_staleness: is {job.run.max_staleness}; 0 (synchronous) is all that works so far; remove it"
        )


@_reads("run")
def folder(job: Job) -> Iterator[str]:
    there = next((p for p in (job.folder, *job.folder.absolute().parents) if p.exists()), Path("/"))
    if not there.is_dir():
        yield f"run.folder: {str(there)!r} is a file, and the run's folder is {str(job.folder)!r}; set run.folder"
    elif not os.access(there, os.W_OK):
        yield f"run.folder: {str(there)!r} cannot be written to; set run.folder to a folder of yours"


# Devices
@_reads("run", "runtime")
def device(job: Job) -> Iterator[str]:
    """A runtime that is not remote starts its processes on this machine."""
    if job.run.device != "cuda" or runtime_settings(job.runtime_config).remote:
        return
    if not torch.cuda.is_available():
        yield "run.device: is cuda, and this machine has none that torch can use; set cpu or auto"


@_reads("run", "runtime", "pools")
def local_devices(job: Job) -> Iterator[str]:
    if runtime_settings(job.runtime_config).remote:
        return
    can = registry().runtime_capabilities(job.runtime)
    for pool in job.pools.values():
        if len(pool.devices_per_node) > 1 and can.cluster:
            yield (
                f"pools.{pool.name}: is over {len(pool.devices_per_node)} nodes, and runtime {job.runtime} has this "
                f"machine alone; give the cluster's runtime.address, or pools.{pool.name} = [{pool.world}]"
            )
    have, wanted = torch.cuda.device_count(), sum(pool.world for pool in job.pools.values())
    if job.device == "cuda" and have and wanted > have and can.max_ranks != 1:
        yield (
            f"pools: have {wanted} devices in all, and this machine has {have} CUDA device{'s' if have > 1 else ''}; "
            "make the pools smaller, let roles share one, set run.device = cpu, or give a cluster's runtime.address"
        )


@_reads("runtime", "pools")
def max_ranks(job: Job) -> Iterator[str]:
    most = registry().runtime_capabilities(job.runtime).max_ranks
    for pool in job.pools.values():
        if most is not None and pool.world > most:
            ranks = "one rank" if most == 1 else f"at most {most} ranks"
            yield (
                f"pools.{pool.name}: has {pool.world} devices, and runtime {job.runtime} runs models on {ranks}; set "
                f"pools.{pool.name} = [{most}], or another runtime ({_others(job.runtime)})"
            )


def _others(runtime: str) -> str:
    return (
        ", ".join(name for name in registry().names("runtime") if name != runtime)
        or "there is none"
    )


@_reads("pools", "roles", "algorithm")
def unused_pools(job: Job) -> Iterator[str]:
    for name in job.pools:
        if (
            not any(name in (m.pool, m.rollout_pool) for m in job.models.values())
            and name != job.main_pool
        ):
            yield f"pools.{name}: no role uses it; remove it, or place a role in it with pool = {name!r}"


@_reads("run")
def able_devices(job: Job) -> Iterator[str]:
    """Plugins that say on which devices they work."""
    for role, model in job.models.items():
        able = {
            f"training_backend {model.spec.backend}": registry()
            .training_capabilities(model.spec.backend)
            .devices
        }
        if model.spec.engine is not None:
            able[f"rollout_engine {model.spec.engine}"] = (
                registry().engine_capabilities(model.spec.engine).devices
            )
        for plugin, devices in able.items():
            if job.device not in devices:
                works = ", ".join(sorted(devices))
                yield f"{role}: {plugin} works on {works}, and run.device is {job.device}; choose another of them"


# Sizes
@_reads("algorithm")
def enough_rows(job: Job) -> Iterator[str]:
    rows, mini = job.algorithm.rows_per_step, job.algorithm.rows_per_update
    for name, model in job.models.items():
        dp = model.layout.dp
        if rows is not None and rows < dp:
            yield (
                f"{name}.layout: dp is {dp}, and a step has {rows} sequence{'s' if rows > 1 else ''}, so that some "
                "ranks would have none; make the step larger, or dp (the pool) smaller"
            )
        elif mini is not None and mini < dp and model.role.trained:
            yield (
                f"algorithm.mini_batch_size: is {mini}, and {name} has dp {dp}, so that some ranks would have no "
                f"sequence in an optimizer step; set {dp} or more, or make dp (the pool) smaller"
            )


@_reads("data", "sampling", "validation")
def positions(job: Job) -> Iterator[str]:
    limits = {"data": job.data.max_prompt_tokens}
    if job.validation_data is not None:
        limits["validation.data"] = job.validation_data.max_prompt_tokens
    where = max(limits, key=lambda name: limits[name])
    prompt, response = limits[where], job.sampling.max_tokens
    for name, model in job.models.items():
        most = model.spec.model.max_positions
        if most is not None and model.spec.engine and prompt + response > most:
            yield (
                f"{name}: prompts of up to {prompt} tokens ({where}.max_prompt_tokens) and responses of up to "
                f"{response} (sampling.max_tokens) exceed the model's {most} positions (max_position_embeddings); make "
                "one of them smaller"
            )


@_reads()
def generation_layouts(job: Job) -> Iterator[str]:
    for name, model in job.models.items():
        if model.spec.engine and model.layout.cp > 1:
            yield f"{name}.layout: a role that generates has the axes dp, tp and pp, got cp {model.layout.cp}; set it to 1"


# Data and text
@_reads("data")
def data_source(job: Job) -> Iterator[str]:
    sources = {"data": job.data.source}
    if job.validation_data is not None:
        sources["validation.data"] = job.validation_data.source
    sources |= {name: config.source for name, config in job.more_data.items()}
    for source in dict.fromkeys(sources.values()):
        try:
            registry().get("data_source", source)
        except HybridFlowError as error:
            where = next(table for table, name in sources.items() if name == source)
            yield f"{where}.source: {error}"


@_reads("data", "algorithm")
def responses(job: Job) -> Iterator[str]:
    sets = {"data": (job.data, job.algorithm.data_columns)}
    for name, columns in job.algorithm.data_sets.items():
        if name not in job.tables:
            yield f"{name}: algorithm {job.algorithm_name!r} needs this data set too, as it is set; give [{name}], as [data]"
        else:
            sets[name] = (job.more_data[name], columns)
    for name, (data, columns) in sets.items():
        if "response_ids" in columns and data.response is None and data.messages is None:
            yield (
                f"{name}.response: algorithm {job.algorithm_name!r} trains on responses; give their template, such as "
                f"'{{answer}}', or {name}.messages"
            )
        if "unsafe" in columns and not data.unsafe:
            yield f"{name}.unsafe: algorithm {job.algorithm_name!r} must know which responses are unsafe; name the two fields"
        if "preferred" in columns and data.rejected is None:
            yield (
                f"{name}.rejected: algorithm {job.algorithm_name!r} learns from pairs; give the template of the worse "
                f"response beside that of the better one ({name}.response)"
            )


@_reads("validation", "algorithm", "roles")
def validation(job: Job) -> Iterator[str]:
    section, data = job.validation, job.validation_data
    if section is None or data is None:
        return
    if section.generate:
        if "reward" not in job.scorers and "reward" not in job.models:
            yield "validation: needs a reward to score by; add [reward], or set validation.generate = false"
        if "actor" not in job.models:
            yield (
                f"validation: needs an actor to generate with, and algorithm {job.algorithm_name!r} has none; set "
                "validation.generate = false"
            )
    elif data.response is None and data.messages is None:
        yield "validation: generate is false and there are no responses (data.response) for a loss; give one of them"
    if section.stop_at is not None and not (section.every and section.generate):
        yield "validation: stop_at is compared with the score of validations; set validation.every, and leave generate true"


@_reads("tokenizer", "roles", "algorithm")
def tokenizer(job: Job) -> Iterator[str]:
    if not job.tokenizer.given and job.tokenizer_path is None and not job.follows:
        yield (
            "tokenizer: the models have no folder to take one from; give tokenizer.path, tokenizer.characters or "
            "tokenizer.train"
        )
    if job.tokenizer.path is not None and not Path(job.tokenizer.path).is_dir():
        yield f"tokenizer.path: there is no folder {job.tokenizer.path!r}"
    try:
        if job.tokenizer.name is not None:
            registry().get("tokenizer", job.tokenizer.name)
    except HybridFlowError as error:
        yield f"tokenizer.name: {error}"


@_reads("sampling")
def sampled_tokens(job: Job) -> Iterator[str]:
    given = {
        "stop_tokens": job.sampling.stop_token_ids,
        "logit_bias": [t for t, _ in job.sampling.logit_bias],
    }
    for name, model in job.models.items():
        size = model.spec.model.vocab_size
        for key, tokens in given.items():
            wrong = [t for t in tokens if not 0 <= t < size]
            if model.spec.engine and wrong:
                yield f"sampling.{key}: {wrong} are no ids of {name}'s model, which has 0 to {size - 1}; remove them"
