"""Ray: one actor per rank, placed by placement groups; large columns live in Ray's object store."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import attrs
import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from hybridflow.backends.ray import reaper
from hybridflow.backends.ray.actor import HostActor, unpacked
from hybridflow.backends.ray.config import RayConfig
from hybridflow.core.contracts.runtime import Label, Message, Process, ResourcePool, Runtime
from hybridflow.core.errors import HybridFlowError, WorkerDied
from hybridflow.kit.memory import keep_freed_memory

LOCAL_RESOURCE = "hybridflow_rank"
"""A local Ray counts ranks, not cores: two cores may well run four ranks of a test."""
HUGE_PAGES = {"THP_MEM_ALLOC_ENABLE": "1"}
"""torch asks for huge pages: a fresh tensor of 128 MB costs 160 ms of page faults without, 30 ms with."""
POLL_S = 1.0
TRACKED = 32
"""Small calls are looked through when so many are open (asking Ray takes 0.1 ms); calls that use the store, each time."""
GRACE_S = 3.0
"""Ray learns of a death about a second after it."""


@attrs.frozen(eq=False)
class Call:
    """One rank's part of a call that is under way, or that failed and was not asked for yet."""

    process: RayProcess
    label: Label


class RayProcess(Process):
    def __init__(self, pool: ResourcePool, rank: int, actor: Any, runtime: RayRuntime):
        self.pool, self.rank, self.actor, self.runtime = pool, rank, actor, runtime

    def submit(self, message: Message, label: Label) -> Any:
        uses_store = bool(message.handles or message.replies)
        beside = (message.handles, *message.replies) if uses_store else ()  # each argument costs
        reference = self.actor.call.remote(message.blob, *beside)
        self.runtime.track(reference, Call(self, label), uses_store)
        return reference


class RayRuntime(Runtime):
    """A plugin of kind "runtime", name "ray"."""

    def __init__(self, config: RayConfig | None = None):
        super().__init__(config or RayConfig())
        self.calls: dict[Any, Call] = {}
        self.failed: dict[Any, Any] = {}
        """Of `calls`: the replies (None: the process is gone) that are failures which nobody has asked for yet."""
        self.processes: list[RayProcess] = []
        self._groups: list[Any] = []
        self._owns_ray = False
        self._local = False
        self._reaper: subprocess.Popen | None = None

    def start(self) -> None:
        keep_freed_memory()
        self._local = self.config.address is None
        if ray.is_initialized():
            self._local = LOCAL_RESOURCE in ray.cluster_resources()
            return
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        options: dict[str, Any] = {"log_to_driver": True, "logging_level": logging.WARNING}
        if self._local:
            options |= {
                "resources": {LOCAL_RESOURCE: 10_000},
                "include_dashboard": self.config.dashboard,
            }
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
        if self._local:
            command = [sys.executable, "-I", reaper.__file__, str(os.getpid())]
            self._reaper = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)

    def launch(self, pool: ResourcePool, device: str, environment: dict[str, str]) -> list[Process]:
        group = self._place(pool, device)
        threads = str(self.config.threads)
        settings = {
            "OMP_NUM_THREADS": threads,
            "MKL_NUM_THREADS": threads,
            **HUGE_PAGES,
            **environment,
        }
        if self._local:
            settings["HYBRIDFLOW_LOCAL"] = "1"
        processes, rank = [], 0
        for node, count in enumerate(pool.devices_per_node):
            for _ in range(count):
                strategy = PlacementGroupSchedulingStrategy(
                    group, placement_group_bundle_index=node
                )
                actor = HostActor.options(  # type: ignore[attr-defined]
                    scheduling_strategy=strategy, **self._resources(1, device), name=None
                ).remote(
                    pool.name, rank, pool.world, settings, [os.path.abspath(p) for p in sys.path]
                )
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
        enough = not self._local or pool.world <= ray.cluster_resources().get(LOCAL_RESOURCE, 0)
        if enough:
            group = placement_group(
                bundles, strategy="STRICT_PACK" if len(bundles) == 1 else "STRICT_SPREAD"
            )
            self._groups.append(group)
        if not enough or not group.wait(self.config.start_timeout_s):
            have = {
                k: v
                for k, v in ray.cluster_resources().items()
                if k in ("CPU", "GPU", LOCAL_RESOURCE)
            }
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
            ray.get(
                [p.actor.join.remote(address, device, 600.0) for p in processes], timeout=timeout
            )
        except GetTimeoutError as error:
            raise HybridFlowError(
                f"the {pool.world} processes of pool {pool.name!r} did not start within {timeout:.0f} s "
                "(runtime.start_timeout_s)"
            ) from error
        except (RayActorError, RayTaskError) as error:
            raise HybridFlowError(
                f"a process of pool {pool.name!r} failed to start: {error}"
            ) from error

    def track(self, reference: Any, call: Call, uses_store: bool) -> None:
        self.calls[reference] = call
        if uses_store or len(self.calls) % TRACKED == 0:
            self._sort_out_answered()

    def _sort_out_answered(self) -> None:
        """Forget calls that went well, since a reply keeps what it names in the store; keep failures."""
        open_calls = [r for r in self.calls if r not in self.failed]
        if not open_calls:
            return
        for ready in ray.wait(
            open_calls, num_returns=len(open_calls), timeout=0, fetch_local=False
        )[0]:
            try:
                reply = unpacked(ray.get(ready))
            except RayError:
                reply = None
            if reply is None or reply[2]:
                self.failed[ready] = reply
            else:
                del self.calls[ready]

    def wait(self, reply: Any) -> tuple[bytes, Sequence[Any], bool]:
        while True:
            try:
                value = unpacked(ray.get(reply, timeout=POLL_S))
            except GetTimeoutError:
                if (failure := self._why_it_may_hang()) is not None:
                    return failure
            except RayActorError as error:
                raise self._died(error) from error
            except RayError as error:
                self.check_alive()
                raise HybridFlowError(f"Ray lost the result of a call: {error}") from error
            else:
                self.calls.pop(reply, None)
                self.failed.pop(reply, None)
                if value[1]:
                    self._sort_out_answered()
                return value

    def _why_it_may_hang(self) -> Any:
        """A rank whose peer died or failed may wait for it for minutes: look at every call that is under way."""
        self._sort_out_answered()
        running = {
            call.label for reference, call in self.calls.items() if reference not in self.failed
        }
        for reference, reply in self.failed.items():
            if reply is None:
                try:
                    ray.get(reference)
                except RayActorError as error:
                    raise self._died(error) from error
            elif self.calls[reference].label in running:
                return reply
        return None

    def check_alive(self) -> None:
        pings = [process.actor.ping.remote() for process in self.processes]
        for ready in ray.wait(pings, num_returns=len(pings), timeout=GRACE_S)[0] if pings else ():
            try:
                ray.get(ready)
            except RayActorError as error:
                raise self._died(error) from error

    def _died(self, error: RayActorError) -> WorkerDied:
        lost = getattr(error, "actor_id", None)
        process = next((p for p in self.processes if p.actor._actor_id.hex() == lost), None)
        label = Label("?", "?")
        for (
            reference,
            call,
        ) in self.calls.items():  # in the order sent: the first that it had not ended
            if call.process is process and self.failed.get(reference) is None:
                label = call.label
                break
        where = (
            f"rank {process.rank} of pool {process.pool.name!r}"
            if process is not None
            else "a rank"
        )
        reason = str(error).strip().splitlines()[-1] if str(error).strip() else "no reason known"
        return WorkerDied(
            f"the process of {where} is gone ({reason}); if it was killed for its memory, make the micro-batches "
            "smaller or offload; run.restarts > 0 goes on from the last checkpoint by itself",
            role=label.role, phase=label.phase, rank=process.rank if process is not None else None,
        )  # fmt: skip

    def put(self, block: list) -> Any:
        return ray.put(block)

    def get(self, handle: Any) -> list:
        try:
            return ray.get(handle)
        except RayError as error:
            self.check_alive()
            raise HybridFlowError(f"Ray lost a column: {error}") from error

    def shutdown(self) -> None:
        if not ray.is_initialized():
            return
        for process in self.processes:
            ray.kill(process.actor)
        for group in self._groups:
            remove_placement_group(group)
        self.processes, self._groups = [], []
        self.calls.clear()
        self.failed.clear()
        if self._owns_ray:
            ray.shutdown()
            self._owns_ray = False
            if self._reaper is not None and self._reaper.stdin is not None:
                self._reaper.stdin.close()
                self._reaper.wait()
                self._reaper = None
        else:
            time.sleep(0.1)  # let the kills go out before the caller launches again
