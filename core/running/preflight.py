"""Checks whether a job's models fit the memory of its devices, before anything is built.

A planner has the formulas (Planner.memory). On GPUs a job that exceeds the usable memory by more
than EXCESS does not start, one that exceeds it by less gets a warning, and engines get the memory
that the models leave. On CPUs, whose memory is shared with other programs, there are only warnings.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import attrs

from hybridflow.core.contracts.planner import DeviceMemory, PoolMemory
from hybridflow.core.contracts.rollout import EngineSettings, engine_settings
from hybridflow.core.errors import ConfigError, HybridFlowError
from hybridflow.core.job.job import Job
from hybridflow.core.plugins.resolve import build_planner
from hybridflow.core.values.units import amount
from hybridflow.core.workers.device_memory import RankMemory

log = logging.getLogger(__name__)
HINT = (
    "smaller micro_batch_tokens, recomputation (activation_checkpointing), offload = true or "
    "generation.keep = false take less"
)


def devices_of(found: Mapping[str, Sequence[RankMemory | None]]) -> dict[str, DeviceMemory]:
    """Return the least memory of a rank, by pool; ranks of a node share the host's memory equally.

    found: pool -> the memory that its ranks report. A pool whose ranks report none is left out.
    """
    ranks = Counter(
        one.node for pool in found.values() for one in pool if one is not None and one.shared
    )
    devices = {}
    for name, pool in found.items():
        known = [one for one in pool if one is not None]
        if not known:
            continue
        shares = [ranks[one.node] if one.shared else 1 for one in known]
        devices[name] = DeviceMemory(
            total=min(one.total / share for one, share in zip(known, shares, strict=True)),
            free=min(one.free / share for one, share in zip(known, shares, strict=True)),
        )
    return devices


def torch_allocates(job: Job, pool: str) -> bool:
    """Return whether all GPU memory of a pool is allocated by torch in the pool's own processes."""
    engines = [
        (engine_settings(placed.spec.engine_config), placed.rollout_pool)
        for placed in job.models.values()
        if placed.spec.engine is not None and pool in (placed.pool, placed.rollout_pool)
    ]
    return all(settings.torch_allocates and apart is None for settings, apart in engines)


Checked = tuple[Job, Sequence[PoolMemory]]
"""A job whose engines are limited to what the models leave, and the memory of its pools."""


def preflight(job: Job, devices: Mapping[str, DeviceMemory], say: Callable[[str], None]) -> Checked:
    """Check a job against the memory of its pools; return it with engines limited accordingly.

    Raises ConfigError for a job on GPUs that exceeds the usable memory by more than EXCESS, and for
    one whose bits would depend on the memory that is free. `say` prints results, warnings, and why
    the memory was not checked.
    """
    if not job.planner:
        say("memory: not checked, as no planner is installed")
        return job, ()
    # This is advice: an error in a planner plugin must not end a run that may work.
    try:
        pools = build_planner(job.planner, job.planner_config).memory(job, devices)
    except HybridFlowError as error:
        say(f"memory: not checked: {error}")
        return job, ()
    except Exception as error:
        log.debug("the planner's formulas of memory", exc_info=True)
        say(f"memory: not checked: {type(error).__name__}: {error}")
        return job, ()

    problems = []
    lines = []
    for pool in pools:
        if pool.fits:
            lines.append(
                f"memory: pool {pool.pool} holds at most {amount(pool.needed)} per device, "
                f"{pool.when}, of {amount(pool.usable)} usable"
            )
            continue
        problem = _problem(pool)
        if job.device != "cpu" and pool.refused:
            problems.append(problem)
        else:
            lines.append(f"warning: {problem}")
    if problems:
        raise ConfigError(
            [f'{problem}; run.preflight = "off" tries it all the same' for problem in problems]
        )
    for line in lines:
        say(line)
    return (job if job.device == "cpu" else _with_rooms(job, pools, say)), pools


def _problem(pool: PoolMemory) -> str:
    """Return why a pool does not fit, and how to make it fit."""
    fits = f"it fits with {', '.join(pool.remedies)}" if pool.remedies else HINT
    return f"memory: pool {pool.pool}: {pool.problem}; {fits}"


def _with_rooms(job: Job, pools: Sequence[PoolMemory], say: Callable[[str], None]) -> Job:
    """Return the job with engines that take no more than the models leave.

    Where the models do not fit, engines are not changed. Raises ConfigError where an engine would
    change in a job that must repeat its bits.
    """
    models = dict(job.models)
    for pool in pools:
        if not pool.fits:
            continue
        for role, room in pool.rooms.items():
            placed = models[role]
            config = placed.spec.engine_config
            # A config without EngineSettings has no limits to set.
            if not isinstance(config, EngineSettings):
                continue
            within = config.within(room)
            if within == config:
                continue
            if job.run.deterministic:
                raise ConfigError(
                    f"run.deterministic: is true, and {role}'s engine asks for more memory than "
                    f"the models leave, {amount(room.cache)} for its cache: what it gets would "
                    "depend on what is free; let its settings ask for less, or set false"
                )
            spec = attrs.evolve(placed.spec, engine_config=within)
            models[role] = attrs.evolve(placed, spec=spec)
            say(
                f"memory: {role}'s engine may take {amount(room.share)} of each device, "
                f"{amount(room.cache)} of it for its cache"
            )
    return attrs.evolve(job, models=models)
