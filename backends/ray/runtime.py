"""The Ray runtime: one actor per rank, and large columns in Ray's object store.

                     placement group (one bundle per node of the pool)
    controller       node 0                     node 1
    RayProcess 0 --> HostActor 0 (device 0)
    RayProcess 1 --> HostActor 1 (device 1)
    RayProcess 2 ----------------------------> HostActor 2 (device 0)

A call is a Ray task of the rank's actor; its object reference is the reply. References of earlier
replies travel as arguments of the task, so Ray brings their values to the actor by itself.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import ray
from ray._private import ray_constants
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from hybridflow.backends.ray import reaper
from hybridflow.backends.ray.actor import HostActor, unpacked
from hybridflow.backends.ray.config import RayConfig
from hybridflow.core.contracts.runtime import Label, Message, Process, ResourcePool, Runtime
from hybridflow.core.errors import HybridFlowError, WorkerDied
from hybridflow.core.groups.rendezvous import FileRendezvous
from hybridflow.core.processes import page
from hybridflow.core.processes.look import Look, here, kill, looks
from hybridflow.kit.hosting.process import SCRATCH
from hybridflow.kit.memory import keep_freed_memory
from hybridflow.settle.config.waiting import waiting_variables

LOCAL_RESOURCE = "hybridflow_rank"
"""A resource of a local Ray, which counts ranks instead of cores: two cores may well run the four
ranks of a test."""
HUGE_PAGES = {"THP_MEM_ALLOC_ENABLE": "1"}
"""Makes torch ask for huge pages: the page faults of a fresh tensor of 128 MB take 160 ms without
them, and 30 ms with them."""
POLL_S = 1.0
"""Seconds of waiting for a reply between two checks of the other calls."""
TRACKED = 32
"""Answered calls are sorted out whenever the number of open calls is a multiple of this (asking Ray
takes 0.1 ms), and with each call that uses the store."""
ANSWERS_S = 20.0
"""Seconds that the nodes of a cluster may take to say what processes do."""
SERVICES = ("gcs_server", "raylet")
"""The processes of a local Ray without which no rank goes on."""
GRACE_S = 3.0
"""Seconds to wait for pings (Ray learns of a death about a second after it), and for workers of a
cluster to close."""


@attrs.frozen(eq=False)
class Call:
    """One rank's part of a call that is running, or whose failure was not read yet."""

    process: RayProcess
    label: Label
    inputs: Sequence[Any] = ()
    """The references of the replies that it needs."""


class RayProcess(Process):
    """A rank's process, on the controller."""

    def __init__(
        self,
        pool: ResourcePool,
        rank: int,
        device: str,
        start: Callable[[], Any],
        runtime: RayRuntime,
    ):
        """start: makes the rank's actor, in the pool's place for it; it may be called again."""
        self.pool = pool
        self.rank = rank
        self.device = device
        self.start = start
        self.actor = start()
        self.runtime = runtime
        self._place = self.actor.place.remote()

    @property
    def group(self) -> tuple[str, tuple[int, ...]]:
        """Its pool's name, and the ranks of its process group."""
        return self.pool.name, self.pool.members(self.rank)

    @property
    def place(self) -> tuple[str, int] | None:  # type: ignore[override]
        """The name of its machine, and its number there, once it has started."""
        if not ray.is_initialized():
            return None
        with contextlib.suppress(RayError):  # it has not started, or has ended before
            place: tuple[str, int] = ray.get(self._place, timeout=0)
            return place
        return None

    def join(self, meeting: Any, patience_s: float) -> Any:
        """Have it join its process group; return the reference of the reply."""
        return self.actor.join.remote(meeting, self.device, patience_s)

    def submit(self, message: Message, label: Label) -> Any:
        """Send a call to the actor; return the object reference of its reply."""
        # Each argument costs time, so a call that uses nothing of the store is a blob alone.
        uses_store = bool(message.handles or message.replies)
        inputs = (message.handles, *message.replies) if uses_store else ()
        reference = self.actor.call.remote(message.blob, *inputs)
        self.runtime.track(reference, Call(self, label, message.replies), uses_store)
        return reference


@contextlib.contextmanager
def _loopback() -> Iterator[None]:
    """Have a Ray that is started in here listen on this machine's loopback address alone.

    Ray does so by itself on macOS and Windows, and has no setting for it elsewhere that a program
    can change after its import.
    """
    before = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    # A token of this process alone: Ray would write one to ~/.ray, for every user to read.
    if "RAY_AUTH_TOKEN_PATH" not in os.environ:
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    # That tokens are required is no news then.
    log = logging.getLogger("ray._private.authentication.authentication_token_setup")
    log.addFilter(_tells_nothing)
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before
        log.removeFilter(_tells_nothing)


def _tells_nothing(record: logging.LogRecord) -> bool:
    return record.levelno > logging.WARNING


@contextlib.contextmanager
def _own_signals() -> Iterator[None]:
    """Keep this program's handler of SIGTERM, which Ray replaces as it starts and connects.

    One that arrives meanwhile has Ray end what it has started; then the handler gets it.
    """
    # The handler of Ray's C++ part prints a stack and aborts. A local Ray's processes inherit this,
    # and if they crash still print Python's stack.
    with _variable("RAY_DISABLE_FAILURE_SIGNAL_HANDLER", "1"):
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        # None is a handler that was not set by Python.
        before = signal.getsignal(signal.SIGTERM) or signal.SIG_DFL
        try:
            yield
        except SystemExit:  # of Ray's handlers
            signal.signal(signal.SIGTERM, before)
            signal.raise_signal(signal.SIGTERM)
            raise
        finally:
            signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _later_interruption() -> Iterator[None]:
    """Raise a Ctrl-C's KeyboardInterrupt after the body alone.

    A Ray that is half shut down ends this process with status 1 as soon as its raylet is gone.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: arrived.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before or signal.default_int_handler)
    if arrived:
        signal.raise_signal(signal.SIGINT)


@contextlib.contextmanager
def _variable(name: str, value: str) -> Iterator[None]:
    """Have a variable in the environment, and in that of processes started meanwhile."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _processes_of_ray(name: str | None = None) -> list[subprocess.Popen]:
    """Return the processes of the Ray that this one has started: all, or those of a name."""
    node = ray._private.worker._global_node
    assert node is not None
    every = node.all_processes
    return [one.process for key in (every if name is None else [name]) for one in every[key]]


def _killed(look: Look) -> list[None]:
    kill(look)
    return []


def _looks_here(folder: Path, stacks: bool) -> list[Look]:
    """Return what the processes of this node do; in a shared folder each node has all pages."""
    return [look for look in looks(folder, stacks) if look.host == here()]


def _on_nodes(nodes: Sequence[str], function: Callable[..., list], *args: Any) -> list[Any]:
    """Call a function once on each node, in a process beside the ranks; return what it found."""
    answers = []
    for node in nodes:
        there = NodeAffinitySchedulingStrategy(node, soft=False)
        task = ray.remote(num_cpus=0, max_retries=0)(function)
        answers.append(task.options(scheduling_strategy=there).remote(*args))
    arrived, _ = ray.wait(answers, num_returns=len(answers), timeout=ANSWERS_S)
    found = []
    for answer in arrived:
        with contextlib.suppress(RayError):  # a node that is gone meanwhile
            found += ray.get(answer)
    return found


def _ranks_folder() -> str:
    """Make a folder for the ranks of one run, which others may not enter."""
    return tempfile.mkdtemp(prefix="hybridflow-ranks-")


def _own_folder() -> str:
    """Return the folder of this user's local Rays, with their sockets and logs.

    Raises HybridFlowError where others may enter it.
    """
    folder = f"{tempfile.gettempdir()}/hybridflow-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder, 0o700)
    status = os.lstat(folder)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise HybridFlowError(
            f"{folder} is not a folder that belongs to this user alone (mode 0700), so others "
            "could reach the sockets of this run's Ray; remove it, or give another folder as "
            "runtime.temp_dir"
        )
    return f"{folder}/ray"  # Ray lets everybody into its own


def _loopback_variables() -> dict[str, str]:
    """Return variables by which the collectives of a local run use the loopback interface.

    Those that are set already are left out.
    """
    name = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")
    wanted = {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": name}
    return {variable: value for variable, value in wanted.items() if variable not in os.environ}


class RayRuntime(Runtime):
    """A plugin of kind "runtime", name "ray"."""

    def __init__(self, config: RayConfig | None = None):
        super().__init__(config or RayConfig())
        self.calls: dict[Any, Call] = {}
        """The open calls by the references of their replies, in the order sent."""
        self._replaced: set[str] = set()
        """Ray's ids of the actors of processes that were replaced."""
        self.failed: dict[Any, Any] = {}
        """The failed replies of `calls` that were not read yet (None: the process has
        ended)."""
        self.processes: list[RayProcess] = []
        self._starting: list[tuple[ResourcePool, list[Any]]] = []
        """Pools that may not have started, and the references of their ranks' joins."""
        self._groups: list[Any] = []
        """The placement groups, one per pool."""
        self._owns_ray = False
        self._local = False
        self._services: dict[str, subprocess.Popen] = {}
        """The processes of a local Ray of this runtime's own, by name."""
        self._logs = ""
        self._reaper: subprocess.Popen | None = None
        self._folder = ""
        """Where the ranks of a local Ray meet and leave temporary files, once there are any."""

    # --- processes ---

    def start(self) -> None:
        """Connect to the configured cluster, or start a local Ray with a reaper beside it.

        If this process is connected to a Ray already, that one is used, and not ended by this
        runtime. Raises HybridFlowError if Ray cannot be reached.
        """
        keep_freed_memory()
        self._local = self.config.address is None
        if ray.is_initialized():
            self._local = LOCAL_RESOURCE in ray.cluster_resources()
            return

        # Ray should not hide the GPUs from actors without any, nor report its usage.
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        options = self._init_options()
        if self._local:
            self._folder = _ranks_folder()
            self._reaper = subprocess.Popen(
                [sys.executable, "-I", reaper.__file__, self._folder],
                stdin=subprocess.PIPE,
                start_new_session=True,
            )
        self._owns_ray = True
        try:
            with contextlib.ExitStack() as stack:
                stack.enter_context(_own_signals())
                if self._local:
                    stack.enter_context(_loopback())
                    stack.enter_context(_variable(SCRATCH, self._folder))
                ray.init(**options)
        except (RayError, ConnectionError, RuntimeError, ValueError, OSError) as error:
            where = "a local Ray" if self._local else f"the Ray cluster at {self.config.address!r}"
            raise HybridFlowError(
                f"could not reach {where}: {error}; check runtime.address and `ray status`"
            ) from error
        if self._local:
            self._know_services()

    def _know_services(self) -> None:
        """Note the processes of a local Ray, with a page each where the run has pages."""
        node = ray._private.worker._global_node
        assert node is not None
        self._logs = node.get_logs_dir_path()
        self._services = {name: _processes_of_ray(name)[0] for name in SERVICES}
        if folder := os.environ.get(page.FOLDER):
            for name, process in self._services.items():
                file = page.page_of(Path(folder), process.pid)
                page.write_page(file, process.pid, f"the {name} of the local Ray")

    def _init_options(self) -> dict[str, Any]:
        """Return the arguments of ray.init."""
        options: dict[str, Any] = {"log_to_driver": True, "logging_level": logging.WARNING}
        if self._local:
            options["resources"] = {LOCAL_RESOURCE: 10_000}
            options["include_dashboard"] = self.config.dashboard
            options["dashboard_host"] = "127.0.0.1"
            options["_temp_dir"] = self.config.temp_dir or _own_folder()
            if not self.config.dashboard:
                # The gcs would keep each of the latest 100,000 calls, for the dashboard.
                options["_system_config"] = {"task_events_report_interval_ms": 0}
            if self.config.object_store_gb is not None:
                options["object_store_memory"] = int(self.config.object_store_gb * 2**30)
        else:
            options["address"] = self.config.address
        return {name: value for name, value in options.items() if value is not None}

    def launch(self, pool: ResourcePool, device: str, environment: dict[str, str]) -> list[Process]:
        """Place one actor per device of the pool, and have them join their process groups.

        Raises HybridFlowError if the pool does not fit into the cluster.
        """
        with self._losing():
            return self._launch(pool, device, environment)

    def _launch(
        self, pool: ResourcePool, device: str, environment: dict[str, str]
    ) -> list[Process]:
        placement = self._place(pool, device)
        threads = str(self.config.threads)
        variables = {
            "OMP_NUM_THREADS": threads,
            "MKL_NUM_THREADS": threads,
            **waiting_variables(self.config.spin),
            **HUGE_PAGES,
            **environment,
        }
        if self._local:
            self._folder = self._folder or _ranks_folder()
            variables |= {**_loopback_variables(), SCRATCH: self._folder}
        folders = [os.path.abspath(folder) for folder in sys.path]

        # One actor per device, on the node of its bundle; ranks count up node by node.
        processes: list[RayProcess] = []
        for node, count in enumerate(pool.devices_per_node):
            for _ in range(count):
                strategy = PlacementGroupSchedulingStrategy(
                    placement, placement_group_bundle_index=node
                )
                resources = self._resources(1, device)
                placed = HostActor.options(  # type: ignore[attr-defined]
                    scheduling_strategy=strategy, **resources, name=None
                )
                rank = len(processes)
                members = pool.members(rank)
                start = partial(placed.remote, pool.name, rank, members, variables, folders)
                processes.append(RayProcess(pool, rank, device, start, self))

        self.processes += processes
        groups = [[processes[rank] for rank in members] for members in pool.process_groups]
        joins = [join for group in groups for join in self._join(group)]
        self._starting.append((pool, joins))
        return list(processes)

    def started(self) -> None:
        """Wait until every rank that was launched has joined its process group."""
        with self._losing():
            self._wait_for_starting()

    def _wait_for_starting(self) -> None:
        starting, self._starting = self._starting, []
        deadline = time.monotonic() + self.config.start_timeout_s
        for pool, joins in starting:
            try:
                ray.get(joins, timeout=max(deadline - time.monotonic(), 0))
            except GetTimeoutError as error:
                raise HybridFlowError(
                    f"the {pool.world} processes of pool {pool.name!r} did not start within "
                    f"{self.config.start_timeout_s:g} s (runtime.start_timeout_s)"
                ) from error
            except (RayActorError, RayTaskError) as error:
                if isinstance(error, RayActorError) and not error.actor_init_failed:
                    raise self._died(error) from error
                raise HybridFlowError(
                    f"a process of pool {pool.name!r} failed to start: {error}"
                ) from error

    def _resources(self, count: int, device: str) -> dict[str, Any]:
        """Return the options of an actor that takes `count` devices."""
        if self._local:
            resources: dict[str, Any] = {"num_cpus": 0, "resources": {LOCAL_RESOURCE: count}}
        else:
            resources = {"num_cpus": count}
        if device == "cuda":
            resources["num_gpus"] = count
        return resources

    def _place(self, pool: ResourcePool, device: str) -> Any:
        """Reserve the pool's devices; return the placement group, with a bundle per node."""
        bundles = []
        for count in pool.devices_per_node:
            bundle = {LOCAL_RESOURCE: count} if self._local else {"CPU": count}
            if device == "cuda":
                bundle["GPU"] = count
            bundles.append(bundle)

        # A pool that is too large for a local Ray is refused at once: no node will ever join it.
        enough = not self._local or pool.world <= ray.cluster_resources().get(LOCAL_RESOURCE, 0)
        if enough:
            strategy = "STRICT_PACK" if len(bundles) == 1 else "STRICT_SPREAD"
            placement = placement_group(bundles, strategy=strategy)
            self._groups.append(placement)
        if not enough or not placement.wait(self.config.start_timeout_s):
            names = ("CPU", "GPU", LOCAL_RESOURCE)
            resources = ray.cluster_resources()
            have = {name: count for name, count in resources.items() if name in names}
            nodes = len([node for node in ray.nodes() if node["Alive"]])
            raise HybridFlowError(
                f"pool {pool.name!r} needs {list(pool.devices_per_node)} {device} devices per "
                f"node, and the cluster of {nodes} node(s) has {have} in all; make the pool "
                "smaller or the cluster larger"
            )
        return placement

    def _join(self, processes: Sequence[RayProcess]) -> list[Any]:
        """Have processes make a group; return the references of their replies.

        They meet at a file, or across machines at the first one.
        """
        meeting: Any = None
        if len(processes) > 1 and self._local:
            meeting = FileRendezvous(f"{self._folder}/{secrets.token_hex(8)}")
        elif len(processes) > 1:
            meeting = processes[0].actor.serve.remote(secrets.token_bytes(32))
        return [process.join(meeting, self.config.collective_timeout_s) for process in processes]

    def check_alive(self) -> None:
        """Raise WorkerDied if a process has ended; takes up to GRACE_S while processes are busy."""
        needed = [process for process in self.processes if not process.expendable]
        for _, error in self._ended(needed):
            raise self._died(error) from error

    def ended(self, processes: Sequence[Process]) -> list[Process]:
        """Return which of these have ended; takes up to GRACE_S while they are busy."""
        return [process for process, _ in self._ended(processes)]

    def _ended(self, processes: Sequence[Any]) -> Iterator[tuple[RayProcess, RayActorError]]:
        """Yield the processes that have ended, with Ray's error."""
        pings = {process.actor.ping.remote(): process for process in processes}
        if not pings:
            return

        # Busy processes do not answer in time; only those that have ended raise.
        answers, _ = ray.wait(list(pings), num_returns=len(pings), timeout=GRACE_S)
        for answer in answers:
            try:
                ray.get(answer)
            except RayActorError as error:
                yield pings[answer], error

    def replace(self, processes: Sequence[Process]) -> list[Process]:
        """Start other actors in the places of a process group's, which are expendable."""
        every = []
        for process in processes:
            assert isinstance(process, RayProcess)
            ray.kill(process.actor)
            self._replaced.add(process.actor._actor_id.hex())
            for reference in [ref for ref, call in self.calls.items() if call.process is process]:
                self._forget(reference)
            fresh = RayProcess(process.pool, process.rank, process.device, process.start, self)
            self.processes[self.processes.index(process)] = fresh
            every.append(fresh)
        self._join(every)
        return list(every)

    def _process_of(self, error: RayActorError) -> RayProcess | None:
        """Return the process of whose end Ray tells; None for one that was replaced."""
        actor_id = getattr(error, "actor_id", None)
        return next((p for p in self.processes if p.actor._actor_id.hex() == actor_id), None)

    def _is_expendable(self, error: RayActorError) -> bool:
        """Return whether the process of whose end Ray tells is expendable, or was."""
        process = self._process_of(error)
        if process is None:
            return getattr(error, "actor_id", None) in self._replaced
        return process.expendable

    def _died(self, error: RayActorError) -> WorkerDied:
        """Return the error for Ray's, with the rank, the pool, and the call that was lost."""
        process = self._process_of(error)
        where = "a rank"
        rank = None
        if process is not None:
            where = f"rank {process.rank} of pool {process.pool.name!r}"
            rank = process.rank

        # Calls run in the order sent: the process died in the first that has not ended.
        self._sort_out_answered()
        label = Label("?", "?")
        for reference, call in self.calls.items():
            if call.process is process and self.failed.get(reference) is None:
                label = call.label
                break

        text = str(error).strip()
        reason = text.splitlines()[-1] if text else "no reason known"
        return WorkerDied(
            f"the process of {where} is gone ({reason}); if it was killed for its memory, make "
            "the micro-batches smaller or offload; with run.restarts > 0 a run goes on from the "
            "last checkpoint by itself",
            role=label.role,
            phase=label.phase,
            rank=rank,
        )

    def shutdown(self) -> None:
        """End this runtime's actors, and its connection to Ray, if `start` made that.

        A local Ray ends with the connection.
        """
        # Ray would wait for one that is stopped, and without the gcs for all others.
        broken = self.lost() is not None
        for service in self._services.values():
            service.send_signal(signal.SIGCONT)
        if broken:
            for service in _processes_of_ray():
                service.kill()
        if ray.is_initialized() and not broken:
            # On other machines nobody removes the files of what Ray kills.
            if self.processes and not self._local:
                leaving = [process.actor.leave.remote() for process in self.processes]
                ray.wait(leaving, num_returns=len(leaving), timeout=GRACE_S)
            for process in self.processes:
                ray.kill(process.actor)
            for placement in self._groups:
                remove_placement_group(placement)
        self.processes = []
        self._groups = []
        self.calls.clear()
        self.failed.clear()

        self._services = {}
        if self._owns_ray:
            with _later_interruption():
                ray.shutdown()  # before the reaper, which finds nothing left to end
            self._owns_ray = False
        elif ray.is_initialized():
            time.sleep(0.1)  # let the kills go out before the caller launches again
        if self._reaper is not None and self._reaper.stdin is not None:
            if broken:
                self._reaper.stdin.write(reaper.BROKEN)
            self._reaper.stdin.close()
            self._reaper.wait()
            self._reaper = None
        elif self._folder:
            reaper.remove(self._folder)
        self._folder = ""

    # --- replies ---

    def track(self, reference: Any, call: Call, uses_store: bool) -> None:
        """Note a call that was sent; at times, remove those that are answered."""
        self.calls[reference] = call
        if uses_store or len(self.calls) % TRACKED == 0:
            self._sort_out_answered()

    def _sort_out_answered(self) -> None:
        """Remove the calls that succeeded, and note those that failed.

        A reply that is kept also keeps its objects in the store alive.
        """
        running = [reference for reference in self.calls if reference not in self.failed]
        if not running:
            return

        # timeout=0: those that have arrived by now.
        answered, _ = ray.wait(running, num_returns=len(running), timeout=0, fetch_local=False)
        for reference in answered:
            try:
                reply = unpacked(ray.get(reference))
            except RayError:
                reply = None
            if reply is None or reply[2]:
                self.failed[reference] = reply
            else:
                del self.calls[reference]

    def wait(self, reply: Any) -> tuple[bytes, Sequence[Any], bool]:
        """Wait for a reply, and check all other open calls every POLL_S seconds meanwhile."""
        self._check_services()
        while True:
            try:
                value = unpacked(ray.get(reply, timeout=POLL_S))
            except GetTimeoutError:
                failure = self._why_it_may_hang()
                if failure is not None:
                    return failure
                if (lost := self._lost_peer(reply)) is not None:
                    reply = lost
            except RayActorError as error:
                died = self._died(error)
                self._forget(reply)
                raise died from error
            except RayError as error:
                self.check_alive()  # the end of a process is the most likely cause
                raise HybridFlowError(f"Ray lost the result of a call: {error}") from error
            else:
                self._forget(reply)
                if value[1]:  # it has handles to the store
                    self._sort_out_answered()
                return value

    @contextlib.contextmanager
    def _losing(self) -> Iterator[None]:
        """Raise WorkerDied where the body fails since a local Ray has lost one of its processes.

        What Ray raises then is of many kinds: that there are no resources, or no such group.
        """
        try:
            yield
        except Exception as error:
            if (lost := self.lost()) is not None:
                raise WorkerDied(lost, role="?", phase="?", rank=None) from error
            raise

    def _check_services(self) -> None:
        """Raise WorkerDied where a local Ray has lost one of its own processes."""
        if (lost := self.lost()) is not None:
            raise WorkerDied(lost, role="?", phase="?", rank=None)

    def _forget(self, reply: Any) -> None:
        self.calls.pop(reply, None)
        self.failed.pop(reply, None)

    def first(self, replies: Sequence[Any]) -> Any:
        """Wait until one of these replies is there; check all open calls every POLL_S meanwhile."""
        while True:
            arrived, _ = ray.wait(list(replies), num_returns=1, timeout=POLL_S)
            if arrived:
                return arrived[0]
            if self._why_it_may_hang() is not None:
                return replies[0]
            for reply in replies:
                if self._lost_peer(reply) is not None:
                    return reply

    def _lost_peer(self, reply: Any) -> Any:
        """Return the lost reply of a rank of the same process group to the same call; else None."""
        call = self.calls.get(reply)
        for reference, failed in self.failed.items():
            lost = self.calls[reference]
            if failed is not None or call is None or lost.label is not call.label:
                continue
            if lost.process.group == call.process.group:
                return reference
        return None

    def _why_it_may_hang(self) -> Any:
        """Return the failed reply of a rank whose peers still run the same call; else None.

        A rank whose peer died or failed may wait in a collective for minutes. Raises WorkerDied if
        a process has ended that is not expendable.
        """
        self._check_services()
        self._sort_out_answered()
        running = [call for reference, call in self.calls.items() if reference not in self.failed]
        for reference, reply in self.failed.items():
            failed = self.calls[reference]
            if reply is None:  # ask once more, for Ray's error with the actor's id
                if failed.process.expendable:
                    continue
                try:
                    ray.get(reference)
                except RayActorError as error:
                    # The call's own process lives where it needed what another one has lost.
                    if not self._is_expendable(error):
                        raise self._died(error) from error
            elif any(
                call.label == failed.label and call.process is not failed.process
                for call in running
            ):
                return reply
        return None

    # --- what the processes do ---

    def at_work(self) -> list[tuple[Process, Label]]:
        """Return the call that each process works on: its first, once all inputs are there."""
        # A list at once: the main thread changes the calls meanwhile.
        calls = [item for item in list(self.calls.items()) if item[0] not in self.failed]
        references = [reference for reference, _ in calls]
        if not references or not ray.is_initialized():  # Ray would start by itself
            return []
        _, open_ = ray.wait(references, num_returns=len(references), timeout=0, fetch_local=False)
        running = set(open_)
        first: dict[RayProcess, tuple[Process, Label]] = {}
        waiting: set[RayProcess] = set()
        for reference, call in calls:
            if reference not in running or call.process in first or call.process in waiting:
                continue
            if any(needed in running for needed in call.inputs):
                waiting.add(call.process)
            else:
                first[call.process] = (call.process, call.label)
        return list(first.values())

    def lost(self) -> str | None:
        """Return which process of a local Ray of this runtime's own has ended."""
        for name, process in self._services.items():
            if (code := process.poll()) is not None:
                how = f"by signal {-code}" if code < 0 else f"with exit status {code}"
                return (
                    f"the {name} of the local Ray (pid {process.pid}) has ended {how}, and no "
                    "rank can go on without it; if nobody has killed it, its logs say why: "
                    f"{self._logs}; with run.restarts > 0 a run starts Ray again and goes on from "
                    "the last checkpoint by itself"
                )
        return None

    def look(self, folder: Path, stacks: bool = False) -> list[Look]:
        """Return what the run's processes do, on all nodes, by a task on each of a cluster's."""
        if self._local:
            return looks(folder, stacks)
        nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
        return _on_nodes(nodes, _looks_here, folder, stacks)

    def kill(self, look: Look) -> None:
        """End a process at once, by a task on each node of a cluster."""
        if self._local:
            kill(look)
        else:
            nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
            _on_nodes(nodes, _killed, look)

    # --- the store ---

    def put(self, block: list) -> Any:
        """Leave a block in Ray's object store; return its object reference."""
        return ray.put(block)

    def get(self, handle: Any) -> list:
        """Return the block behind an object reference.

        Raises WorkerDied or HybridFlowError if Ray has lost it.
        """
        try:
            return ray.get(handle)
        except RayError as error:
            self.check_alive()
            raise HybridFlowError(f"Ray lost a column: {error}") from error
