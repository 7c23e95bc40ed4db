"""Ray: one actor per rank, placed by placement groups; large columns live in Ray's object store."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from hybridflow.backends.ray.actor import HostActor
from hybridflow.backends.ray.config import RayConfig
from hybridflow.core.errors import HybridFlowError, WorkerDied
from hybridflow.core.runtime import Message, Process, ResourcePool, Runtime

LOCAL_RESOURCE = "hybridflow_rank"
"""A local Ray counts ranks, not cores: two cores may well run four ranks of a test."""
POLL_S = 1.0
TRACKED = 32


class RayProcess(Process):
    def __init__(self, pool: ResourcePool, rank: int, actor: Any, runtime: RayRuntime):
        self.pool, self.rank, self.actor, self.runtime = pool, rank, actor, runtime

    def submit(self, message: Message, label: tuple[str, str]) -> Any:
        reference = self.actor.call.remote(message.blob, message.handles, *message.replies)
        self.runtime.track(reference, (self, *label))
        return reference


class RayRuntime(Runtime):
    """A plugin of kind "runtime", name "ray"."""

    def __init__(self, config: RayConfig | None = None):
        super().__init__(config or RayConfig())
        self.outstanding: dict[Any, tuple[RayProcess, str, str]] = {}
        self.processes: list[RayProcess] = []
        self._groups: list[Any] = []
        self._owns_ray = False
        self._local = False

    def start(self) -> None:
        self._local = self.config.address is None
        if ray.is_initialized():
            self._local = LOCAL_RESOURCE in ray.cluster_resources()
            return
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        options: dict[str, Any] = {"log_to_driver": True, "logging_level": logging.WARNING}
        if self._local:
            options |= {"resources": {LOCAL_RESOURCE: 10_000}, "include_dashboard": self.config.dashboard}
            options |= {"dashboard_host": "127.0.0.1", "_temp_dir": self.config.temp_dir}
            if self.config.object_store_gb is not None:
                options["object_store_memory"] = int(self.config.object_store_gb * 2**30)
        else:
            options["address"] = self.config.address
        try:
            ray.init(**{k: v for k, v in options.items() if v is not None})
        except (RayError, ConnectionError, RuntimeError, ValueError, OSError) as error:
            where = "a local Ray" if self._local else f"the Ray cluster at {self.config.address!r}"
            raise HybridFlowError(
                f"could not reach {where}: {error}; check runtime.address and `ray status`"
            ) from error
        self._owns_ray = True

    def launch(self, pool: ResourcePool, device: str, environment: dict[str, str]) -> list[Process]:
        group = self._place(pool, device)
        threads = str(self.config.threads)
        settings = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, **environment}
        if self._local:
            settings["HYBRIDFLOW_LOCAL"] = "1"
        processes, rank = [], 0
        for node, count in enumerate(pool.devices_per_node):
            for _ in range(count):
                strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=node)
                actor = HostActor.options(  # type: ignore[attr-defined]
                    scheduling_strategy=strategy, **self._resources(1, device), name=None
                ).remote(pool.name, rank, pool.world, settings, list(sys.path))
                processes.append(RayProcess(pool, rank, actor, self))
                rank += 1
        self.processes += processes
        self._join(pool, processes, device)
        return list(processes)

    def _resources(self, count: int, device: str) -> dict[str, Any]:
        if self._local:
            wanted: dict[str, Any] = {"num_cpus": 0, "resources": {LOCAL_RESOURCE: count}}
        else:
            wanted = {"num_cpus": count}
        return wanted | ({"num_gpus": count} if device == "cuda" else {})

    def _place(self, pool: ResourcePool, device: str) -> Any:
        bundles = []
        for count in pool.devices_per_node:
            bundle = {LOCAL_RESOURCE: count} if self._local else {"CPU": count}
            bundles.append(bundle | ({"GPU": count} if device == "cuda" else {}))
        group = placement_group(bundles, strategy="STRICT_PACK" if len(bundles) == 1 else "STRICT_SPREAD")
        self._groups.append(group)
        if not group.wait(self.config.start_timeout_s if not self._local else 30):
            have = {k: v for k, v in ray.cluster_resources().items() if k in ("CPU", "GPU", LOCAL_RESOURCE)}
            nodes = len([n for n in ray.nodes() if n["Alive"]])
            raise HybridFlowError(
                f"pool {pool.name!r} needs {list(pool.devices_per_node)} {device} devices per node, and the cluster of "
                f"{nodes} node(s) has {have} in all; make the pool smaller or the cluster larger"
            )
        return group

    def _join(self, pool: ResourcePool, processes: Sequence[RayProcess], device: str) -> None:
        timeout = self.config.start_timeout_s
        try:
            address = ray.get(processes[0].actor.address.remote(), timeout=timeout)
            ray.get([p.actor.join.remote(address, device, 600.0) for p in processes], timeout=timeout)
        except GetTimeoutError as error:
            raise HybridFlowError(
                f"the {pool.world} processes of pool {pool.name!r} did not start within {timeout:.0f} s "
                "(runtime.start_timeout_s)"
            ) from error
        except (RayActorError, RayTaskError) as error:
            raise HybridFlowError(f"a process of pool {pool.name!r} failed to start: {error}") from error

    def track(self, reference: Any, call: tuple[RayProcess, str, str]) -> None:
        """Remember a call until it is answered; answered ones go, since a reply keeps what it names in the store."""
        self.outstanding[reference] = call
        if len(self.outstanding) % TRACKED == 0:
            references = list(self.outstanding)
            for ready in ray.wait(references, num_returns=len(references), timeout=0, fetch_local=False)[0]:
                del self.outstanding[ready]

    def wait(self, reply: Any) -> tuple[bytes, Sequence[Any]]:
        while True:
            ready, _ = ray.wait([reply], timeout=POLL_S)
            try:
                if ready:
                    value = ray.get(reply)
                    self.outstanding.pop(reply, None)
                    return value
                self._check_others()
            except RayActorError as error:
                raise self._died(error, reply) from error

    def _check_others(self) -> None:
        """A rank whose peer died may wait for it for minutes: look at every call that is under way."""
        if self.outstanding:
            references = list(self.outstanding)
            ready, _ = ray.wait(references, num_returns=len(references), timeout=0)
            for reference in ready:
                ray.get(reference)

    def _died(self, error: RayActorError, reply: Any) -> WorkerDied:
        process, role, phase = self.outstanding.get(reply, (None, "?", "?"))
        lost = getattr(error, "actor_id", None)
        for candidate in self.processes:
            if lost is not None and candidate.actor._actor_id.hex() == lost:
                process = candidate
        for (
            other,
            its_role,
            its_phase,
        ) in self.outstanding.values():  # the first call that the lost process had not ended
            if other is process:
                role, phase = its_role, its_phase
                break
        where = f"pool {process.pool.name!r}" if process is not None else "a pool"
        reason = str(error).strip().splitlines()[-1] if str(error).strip() else "no reason known"
        rank = process.rank if process is not None else None
        return WorkerDied(
            f"the process of rank {rank} in {where} is gone ({reason}); if it was killed for its memory, make the "
            "micro-batches smaller or offload; run.restarts > 0 goes on from the last checkpoint by itself",
            role=role, phase=phase, rank=rank,
        )  # fmt: skip

    def put(self, block: list) -> Any:
        return ray.put(block)

    def get(self, handle: Any) -> list:
        return ray.get(handle)

    def shutdown(self) -> None:
        if not ray.is_initialized():
            return
        for process in self.processes:
            ray.kill(process.actor)
        for group in self._groups:
            remove_placement_group(group)
        self.processes, self._groups = [], []
        self.outstanding.clear()
        if self._owns_ray:
            ray.shutdown()
            self._owns_ray = False
        else:
            time.sleep(0.1)  # let the kills go out before the caller launches again
