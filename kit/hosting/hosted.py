"""A rollout engine in a process of its own, behind the contract of one in this process.

first rank of the replica               engine's process
HostedEngine  --  EngineProcess  ==  Child  --  engine
                          socket: requests, completions
              --  Bucket         ==  BucketReader  --  engine.take
                          shared memory: this rank's weights
later ranks
HostedEngine  --  Follower       ==  Child
              --  Bucket         ==  BucketReader  --  engine.take
"""

from __future__ import annotations

import contextlib
import os
import queue
import secrets
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import attrs
import torch
import torch.distributed as dist

from hybridflow.core.contracts.rollout import Completion, Proof, Request, RolloutEngine, Wanted
from hybridflow.core.errors import HybridFlowError
from hybridflow.core.processes.page import moved
from hybridflow.core.values.checksum import checksum, totals
from hybridflow.core.values.weights import Box, WeightLayout
from hybridflow.kit.arrivals import Arrivals, check_box
from hybridflow.kit.continuous import ContinuousEngine
from hybridflow.kit.hosting.bucket import Bucket, Load
from hybridflow.kit.hosting.follower import Follower
from hybridflow.kit.hosting.process import EngineDied, EngineProcess
from hybridflow.kit.hosting.settings import ProcessConfig
from hybridflow.kit.huggingface.models import policy_config

SMALLEST_BUCKET = 64
"""Bytes of a bucket at least."""
LOOK_S = 1.0
"""Seconds that one call of `advance` waits for a completion."""
SAME_NATS = 0.05
"""A restarted engine must give a known token its earlier log-probability, up to this much."""


class HostedEngine(ContinuousEngine):
    """A rollout engine that runs in another process.

    Under generation tensor parallelism the first rank of a replica owns the process, whose engine
    drives all of the replica's devices; the other ranks connect to it. Each rank receives the boxes
    of its own device, and sends them there through a bucket of its own.

    When the process dies it is restarted, up to `restarts` times. The new one gets the weights of
    the last update again, must reproduce a known token, and then gets the unfinished requests.
    Their tokens are the same as without a restart: they follow from seeds and positions.
    """

    def __init__(
        self,
        engine_class: type[RolloutEngine],
        model,
        config: ProcessConfig,
        context,
        logs: str | None = None,
    ):
        super().__init__(model, config, context)
        self.engine_class = engine_class
        self.process_config = config
        self.inflight = engine_class.inflight
        # Several engines may log into one folder.
        folder = Path(logs or tempfile.gettempdir())
        self.logs = folder / f"engine-{context.role}-{context.pool_rank}.log"
        self.process: EngineProcess | None = None
        self._follower: Follower | None = None
        """A later rank's connection to the process."""
        self.restarts = 0
        """How often the process was restarted."""
        self._told = 0
        """Number of restarts that `figures` has reported already."""
        self._kept: dict[tuple[str, Box], torch.Tensor] = {}
        """This rank's weights in host memory, where restarts are allowed."""
        self._entering: list[Request] = []
        """Requests that were not sent to the process yet."""
        self._broken: EngineDied | None = None
        """The error, if the process died in the present weight update."""
        self._proof: tuple[Request, Completion] | None = None
        """A request of this version with its completion, to check a restarted engine by."""

    # --- ranks of a replica ---

    @property
    def _ranks(self) -> list[int]:
        """The ranks of this rank's replica."""
        generation = self.context.generation
        if generation is None:
            return [self.context.rank]
        return generation.ranks(generation.replica_of[self.context.rank])

    @property
    def leads(self) -> bool:
        """Whether this rank owns the process: it is the first of its replica."""
        return self._ranks[0] == self.context.rank

    @property
    def _place(self) -> int:
        """This rank's number in its replica."""
        return self._ranks.index(self.context.rank)

    @property
    def _group(self) -> dist.ProcessGroup | None:
        """The process group of the replica's ranks; None for a single rank."""
        return self.context.group("generation.tp") if len(self._ranks) > 1 else None

    def _leading(self, work: Callable[[], Any]) -> Any:
        """Run `work` on the replica's first rank; every rank returns its result. Collective.

        All ranks raise where it fails: EngineDied if the process died, else the first rank its own
        error and the others HybridFlowError.
        """
        outcome: list[Any] = [None, None]  # the result, and the failure: (whether it died, text)
        failure: Exception | None = None
        if self.leads:
            # A failure is sent before it is raised, as the other ranks wait.
            try:
                outcome[0] = work()
            except Exception as error:
                failure = error
                outcome[1] = _told(error)
        # The other ranks wait here for the first one's result.
        if (group := self._group) is not None:
            dist.broadcast_object_list(outcome, src=self._ranks[0], group=group)

        if failure is not None:
            raise failure
        if outcome[1] is not None:
            raise _error_of("on the replica's first rank: ", *outcome[1])
        return outcome[0]

    def _everyone(self, work: Callable[[], Any]) -> None:
        """Run `work` on every rank of the replica; all raise where it fails on any. Collective.

        If one rank finds that the process died, all raise EngineDied, since it can be restarted.
        """
        failure: Exception | None = None
        try:
            work()
        except Exception as error:
            failure = error
        every: list[Any] = [_told(failure)]
        if (group := self._group) is not None:
            every = [None] * len(self._ranks)
            dist.all_gather_object(every, _told(failure), group=group)

        # EngineDied takes precedence; a rank raises its own error if that is the one chosen.
        failed = sorted((told for told in every if told is not None), reverse=True)
        if failed and failed[0] != _told(failure):
            raise _error_of("on another rank of the replica: ", *failed[0])
        if failure is not None:
            raise failure

    def _surviving(self, work: Callable[[], Any]) -> Any:
        """Return `work()`, a collective call; if the process dies, restart it and call again."""
        while True:
            try:
                return work()
            except EngineDied as error:
                self._revive(error)

    # --- life ---

    def start(self) -> None:
        """Start the process and wait for its engine. Collective over the replica.

        One that is killed meanwhile is restarted as later on. Raises ModelError for a model that is
        no policy, EngineDied with the tail of the log.
        """
        hf_config = policy_config(self.model)
        # The bounds that requests are checked against.
        text = hf_config.get_text_config()
        positions = getattr(text, "max_position_embeddings", None)
        self.max_positions = self.config.limits().max_length or positions
        self.vocab = text.vocab_size
        # Weights leave this rank through memory of its own.
        nbytes = int(self.process_config.bucket_mb * 1e6)
        self.bucket = Bucket(self.context.device, max(nbytes, SMALLEST_BUCKET))

        # These variables must be set when the process starts.
        devices = self._visible_devices()
        environment = self.engine_class.environment(self.context.device)
        self._environment: Mapping[str, str] = environment | devices
        try:
            self._launch()
        except EngineDied as error:
            # What fails by itself, as by a wrong option, would fail again.
            if not self._leading(self._was_killed):
                raise
            self._revive(error)

    def _was_killed(self) -> bool:
        """End the process where it is still there; return whether a signal had ended it before."""
        if self.process is None:
            return False
        self.process.died()
        return self.process.killed

    def _visible_devices(self) -> dict[str, str]:
        """Return the variable that shows the replica's GPUs, and no others, to the process.

        They are in the order of the replica's ranks, so that the engine's ranks are the same.
        """
        device = self.context.device
        group = self._group
        if group is None or device.type != "cuda":
            return {}

        # A rank may see its own GPU alone, or those of others too.
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        own = str(device.index or 0) if visible is None else visible.split(",")[device.index or 0]
        devices: list[Any] = [None] * len(self._ranks)
        dist.all_gather_object(devices, own, group=group)
        return {"CUDA_VISIBLE_DEVICES": ",".join(devices)}

    def _launch(self) -> None:
        """Start a process, and connect this rank's bucket with its engine. Collective.

        Raises EngineDied where it does not start.
        """
        door, self._boxes_of = self._leading(self._start_process)

        def join() -> None:
            if self.leads:
                return
            if self._follower is not None:
                self._follower.close()
            self._follower = Follower(*door)
            self._ask("join", self._place, self.bucket.handle())

        self._everyone(join)

    def _start_process(self) -> tuple[tuple[str, bytes], WeightLayout]:
        """Start a process and wait for its engine.

        Returns the address and key for the other ranks, and the engine's layout of the weights.
        """
        started = time.monotonic()
        name = f"{self.engine_class.__name__} of {self.context.role}, rank {self.context.pool_rank}"
        print(f"starting {name} in a process of its own; its log: {self.logs}", flush=True)
        # A process that died may have left children.
        if self.process is not None:
            self.process.end()
        self.process = EngineProcess(self.logs, self._environment)

        # The first message has what Child.start takes. An address that begins with 0 has no file.
        door = ("\0hybridflow-" + secrets.token_hex(8), secrets.token_bytes(16))
        place = {
            "role": self.context.role,
            "device": str(self.context.device),
            "seed": self.context.seed,
            "tp": len(self._ranks),
        }
        setup = {
            "engine_class": self.engine_class,
            "model": self.model,
            "config": self.config,
            "place": place,
            "bucket": self.bucket.handle(),
            "door": door,
        }
        try:
            # See EngineProcess.send: as bytes.
            self.process.connection.send_bytes(bytes(ForkingPickler.dumps(setup)))
        except OSError as error:
            raise self.process.died() from error
        # Loading takes long: a line is printed now and then meanwhile.
        boxes = self.process.started(
            self.process_config.start_timeout_s,
            lambda seconds: print(f"{name} is starting ({seconds:.0f} s)", flush=True),
        )
        seconds = time.monotonic() - started
        print(f"{name} started in {seconds:.0f} s (pid {self.process.pid})", flush=True)
        return door, boxes

    def close(self) -> None:
        """End the process and free the shared memory."""
        if self.process is not None:
            self.process.end()
            self.process = None
        if self._follower is not None:
            self._follower.close()
            self._follower = None
        if "bucket" in self.__dict__:
            self.bucket.close()

    def __del__(self):
        # The interpreter may be ending; then the process ends by itself.
        with contextlib.suppress(Exception):
            self.close()

    def figures(self) -> dict[str, float]:
        """Return the restarts since the last call."""
        new = self.restarts - self._told
        self._told = self.restarts
        return {"engine_restarts": float(new)}

    def _ask(self, name: str, *arguments: Any) -> Any:
        """Call the engine and return its answer. Raises EngineDied."""
        link = self.process if self.leads else self._follower
        assert link is not None
        return link.ask(name, *arguments, timeout_s=self.process_config.hang_timeout_s)

    # --- weights ---

    def layout(self) -> WeightLayout:
        """Return the layout in which each rank holds the boxes that its device needs."""
        # The engines of all replicas have the same layout.
        generation = self.context.generation
        own = self._boxes_of
        replicas: list[Sequence[int]] = [[rank] for rank in range(self.context.world_size)]
        if generation is not None:
            replicas = [generation.ranks(number) for number in range(len(generation.replicas))]
        # A rank's number in its replica is that of its device.
        held = {}
        for ranks in replicas:
            for place, rank in enumerate(ranks):
                held[rank] = own.held.get(place, {})
        return WeightLayout(own.params, held, own.ties, frozenset(own.params))

    @property
    def _own_boxes(self) -> Mapping[str, Sequence[Box]]:
        """The boxes of each parameter that the engine needs on this rank's device."""
        return self._boxes_of.held.get(self._place, {})

    def begin_update(self, version: int) -> None:
        """Send waiting requests while the engine still accepts any, then begin its update."""
        super().begin_update(version)
        self._enter_all()
        # A completion of the old weights cannot check the new ones.
        self._proof = None
        self._broken = None
        self._arrived = Arrivals(self._own_boxes)
        self.bucket.taken()
        try:
            self._leading(lambda: self._ask("begin_update", version))
        except EngineDied as error:
            self._break(error)

    def expect(self, wanted: Wanted) -> None:
        """Tell the engine the boxes that this rank's proof is about."""
        super().expect(wanted)
        if self._broken is None:
            try:
                self._ask("expect", wanted)
            except EngineDied as error:
                self._break(error)

    def proof(self) -> Proof:
        """Return the proof of the weights in the engine's process. Collective over the replica.

        If the process has died, it is that of the copy from which the new process will be loaded.
        """
        answers: list[Proof] = []

        def ask() -> None:
            if self._broken is not None:
                raise self._broken
            self._hand_over(self.bucket.taken())
            answers.append(self._ask("proof"))

        try:
            self._everyone(ask)
        except EngineDied as error:
            if not self.updating:
                raise
            self._break(error)
            return self._kept_proof(self.wanted)
        return answers[0]

    def _kept_proof(self, wanted: Wanted) -> Proof:
        """Return the proof of the weights that are kept for restarts."""
        # An incomplete parameter does not have this version: `end_update` will raise.
        values = totals(self._kept_sums(wanted))
        version = self._next_version
        return {
            name: (version if self._arrived.whole(name) else None, values.get(name, 0))
            for name in wanted
        }

    def _kept_sums(self, wanted: Wanted) -> Iterator[tuple[str, torch.Tensor]]:
        for (name, own), kept in self._kept.items():
            dtype, boxes = wanted.get(name, (kept.dtype, ()))
            for box in boxes:
                common = box.intersect(own)
                if common is not None:
                    yield name, checksum(kept[common.within(own)].to(dtype), common)

    def receive(self, name: str, box: Box, tensor: torch.Tensor) -> None:
        """Send a box through the bucket, and keep it for restarts."""
        self.check_updating(name)
        check_box(self._boxes_of.params, self._boxes_of.ties, name, box, tensor)
        self._arrived.note(name, box)
        # A copy is kept even while the process is dead, for the restarted one.
        if self.process_config.restarts:
            self._keep(name, box, tensor)
        if self._broken is not None:
            return
        try:
            self._write(name, box, tensor)
        except EngineDied as error:
            self._break(error)

    def _write(self, name: str, box: Box, tensor: torch.Tensor) -> None:
        """Write a box into the bucket, and hand the bucket over each time that it is full."""
        for load in self.bucket.write(name, box, tensor, self._boxes_of.params[name].dtype):
            self._hand_over(load)
            moved()

    def _hand_over(self, load: Load) -> None:
        """Let the engine take the contents of the bucket."""
        if load.pieces:
            self.bucket.emptied(self._ask("load", load))

    def _keep(self, name: str, box: Box, tensor: torch.Tensor) -> None:
        """Copy a box into host memory, which is allocated once for each box of this rank."""
        for own in self._own_boxes.get(name, ()):
            common = box.intersect(own)
            if common is None:
                continue

            # The received box may be a part of this one.
            if (name, own) not in self._kept:
                dtype = self._boxes_of.params[name].dtype
                self._kept[name, own] = torch.empty(own.shape, dtype=dtype)
            self._kept[name, own][common.within(own)] = tensor[common.within(box)].cpu()

    def _break(self, error: EngineDied) -> None:
        """Note that the process died in a weight update.

        Further boxes are then only copied to host memory, and `end_update` starts a new process.
        Raises EngineDied where restarts are used up.
        """
        if self.restarts >= self.process_config.restarts:
            raise self._final(error) from error
        self._broken = error

    def end_update(self) -> None:
        """Send the last boxes and end the update; restart the process if it died meanwhile."""
        self.check_updating("end_update")

        def send_the_rest() -> None:
            self._arrived.check()
            if self._broken is not None:
                raise self._broken
            self._hand_over(self.bucket.taken())

        try:
            self._everyone(send_the_rest)
            self._leading(lambda: self._ask("end_update"))
        except EngineDied as error:
            # The new process gets all weights of this update from the copy.
            self._broken = None
            super().end_update()
            self._revive(error)
            return
        super().end_update()

    def _revive(self, error: EngineDied) -> None:
        """Start a new process with the weights of the last update and the unfinished requests.

        Collective over the replica. Raises EngineDied where restarts are used up.
        """
        while True:
            if self.restarts >= self.process_config.restarts:
                raise self._final(error) from error
            self.restarts += 1
            if self.leads:
                limit = self.process_config.restarts
                print(f"{error}\nrestart {self.restarts} of {limit}", flush=True)

            try:
                self._launch()
                self._load_again()
                self._leading(self._prove)
            except EngineDied as again:
                error = again
                continue
            # `running` includes the requests that wait to be sent.
            self._entering.clear()
            if self.leads:
                self._send("add", list(self.running.values()))
            return

    def _final(self, error: EngineDied) -> EngineDied:
        """Return the error with a hint about restarts."""
        hint = (
            "rollout.restarts are used up"
            if self.restarts
            else "rollout.restarts > 0 starts an engine anew"
        )
        return EngineDied(f"{error}\n({hint})")

    def _load_again(self) -> None:
        """Give a new process the weights that were kept. Collective. Raises EngineDied."""
        # Drop the contents that the dead process did not take.
        self.bucket.taken()
        if self.version is None:
            return

        # All boxes of this rank, in the engine's dtype
        everything: dict[str, tuple[torch.dtype, tuple[Box, ...]]] = {}
        for name, boxes in self._own_boxes.items():
            if any(box.numel for box in boxes):
                everything[name] = (self._boxes_of.params[name].dtype, tuple(boxes))

        def send_all() -> None:
            self._ask("expect", everything)
            for (name, box), values in self._kept.items():
                self._write(name, box, values)
            self._hand_over(self.bucket.taken())
            self._check_again(self._ask("proof"), self._kept_proof(everything))

        self._leading(lambda: self._ask("begin_update", self.version))
        self._everyone(send_all)
        self._leading(lambda: self._ask("end_update"))

    def _check_again(self, held: Proof, kept: Proof) -> None:
        """Raise HybridFlowError where a new process's weights differ from the kept copy."""
        for name, (version, value) in held.items():
            if version != kept[name][0] or value not in (None, kept[name][1]):
                raise HybridFlowError(
                    f"the rollout engine that was started anew holds other values of {name} than "
                    "it was sent; its weights did not come back"
                )

    def _prove(self) -> None:
        """Check that a new process samples a known first token with its log-probability.

        Raises HybridFlowError where it does not, EngineDied where the process ends.
        """
        if self._proof is None:
            return
        request, before = self._proof
        # Only the first token is asked for, under an id that no request has.
        sampling = attrs.evolve(request.sampling, max_tokens=1)
        self._send("add", [attrs.evolve(request, id=-1, sampling=sampling)])
        kind = "nudge"
        while kind == "nudge":
            kind, after = self._event(self.process_config.hang_timeout_s)
        if kind == "gone":
            assert self.process is not None
            raise self.process.died()
        if kind != "done" or not _first_token_agrees(before, after):
            raise HybridFlowError(
                f"the rollout engine that was started anew answers differently: {after} for "
                f"request {request.id}, before token {before.response_ids[:1]} with logprob "
                f"{before.logprobs[:1]}; its weights did not come back"
            )

    # --- memory ---

    def release(self) -> None:
        self._surviving(lambda: self._leading(lambda: self._ask("sleep")))

    def resume(self, weights: bool, cache: bool) -> None:
        self._surviving(lambda: self._leading(lambda: self._ask("wake", cache)))

    # --- generation ---

    def enter(self, request: Request) -> None:
        """Queue a request; `advance` sends all queued ones in one message.

        So requests that are submitted together also reach the engine together, and its batches are
        the same in each run.
        """
        self._entering.append(request)

    def _enter_all(self) -> None:
        """Send the queued requests."""
        if self._entering and self.leads:
            self._send("add", self._entering)
        self._entering = []

    def leave(self, ids: Sequence[int]) -> Iterable[Completion]:
        """Let the engine end requests early; `advance` returns their completions."""
        self._enter_all()
        if self.leads:
            self._send("abort", list(ids))
        return ()

    def _send(self, name: str, *arguments: Any) -> None:
        """Send a message without an answer. If the process is gone, `advance` finds that event."""
        assert self.process is not None
        try:
            self.process.send(name, *arguments)
        except EngineDied:
            self.process.events.put(("gone", None))

    def nudge(self) -> None:
        """Let `step` return to whoever has a request to add."""
        if self.process is not None:
            self.process.events.put(("nudge", None))

    def advance(self) -> list[Completion]:
        """Wait up to LOOK_S for completions. Collective over the replica.

        A process that died, or made no progress for hang_timeout_s, is restarted.
        """
        self._enter_all()
        return self._surviving(lambda: self._leading(self._advance))

    def _advance(self) -> list[Completion]:
        assert self.process is not None
        kind, value = self._event(LOOK_S)
        if kind == "nudge":
            return []
        if kind == "gone":
            raise self.process.died()
        if kind == "error":
            raise HybridFlowError(value)
        if kind == "none":
            # A busy engine shows its progress by signs of life.
            silent = time.monotonic() - self.process.moved
            if silent > self.process_config.hang_timeout_s:
                how = f"made no progress for {silent:.0f} s (rollout.hang_timeout_s)"
                raise self.process.died(how)
            return []

        # Take all completions that have arrived; any other event is left for the next call.
        done = [value]
        while not self.process.events.empty():
            kind, value = self.process.events.get()
            if kind != "done":
                self.process.events.put((kind, value))
                break
            done.append(value)
        return [
            self._remembered(completion) for completion in done if completion.id in self.running
        ]

    def _remembered(self, completion: Completion) -> Completion:
        """Return the completion; keep the first one by which a restarted engine can be checked.

        Its first token must have been sampled by this engine with the present weights.
        """
        request = self.running[completion.id]
        # A prefix was sampled earlier, maybe with other weights.
        has_prefix = request.prefix_ids is not None and len(request.prefix_ids) > 0
        new = len(completion.response_ids) > 0 and not has_prefix
        if self._proof is None and new and int(completion.weight_version[0]) == self.version:
            self._proof = (request, completion)
        return completion

    def _event(self, timeout_s: float) -> tuple[str, Any]:
        """Return the next event, or ("none", None) when `timeout_s` have passed."""
        assert self.process is not None
        try:
            return self.process.events.get(timeout=timeout_s)
        except queue.Empty:
            return ("none", None)


def _first_token_agrees(before: Completion, after: Completion) -> bool:
    """Return whether both have the same first token, with the same log-probability."""
    if not len(after.response_ids) or after.response_ids[0] != before.response_ids[0]:
        return False
    nats = abs(float(after.logprobs[0]) - float(before.logprobs[0]))
    return nats < SAME_NATS


def _told(error: Exception | None) -> tuple[bool, str] | None:
    """Return a failure as it is sent to other ranks: (whether the process died, text)."""
    return None if error is None else (isinstance(error, EngineDied), str(error))


def _error_of(where: str, died: bool, text: str) -> HybridFlowError:
    """Return the error for a failure on another rank."""
    return EngineDied(text) if died else HybridFlowError(where + text)
