"""A rollout engine in a process of its own, behind the contract of one in this process.

worker                                  engine's process
HostedEngine  --  EngineProcess  ==  Child  --  Stepper  --  engine
                          socket: requests, completions
WholeParameters -- Bucket  ==  Assembler  --  engine.receive
                   shared memory: weights
"""

from __future__ import annotations

import contextlib
import os
import queue
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
import torch.distributed as dist

from hybridflow.core.contracts.rollout import Completion, Request, RolloutEngine
from hybridflow.core.errors import HybridFlowError
from hybridflow.core.values.weights import Box, WeightLayout
from hybridflow.kit.continuous import ContinuousEngine
from hybridflow.kit.hosting.bucket import Bucket
from hybridflow.kit.hosting.process import EngineDied, EngineProcess
from hybridflow.kit.hosting.settings import ProcessConfig
from hybridflow.kit.huggingface.models import policy_config
from hybridflow.kit.whole import WholeParameters

LOOK_S = 1.0
"""Seconds that one call of `advance` waits for a completion."""
SAME_NATS = 0.05
"""A restarted engine must give a known token its earlier log-probability, up to this much."""


class HostedEngine(ContinuousEngine):
    """A rollout engine that another process runs.

    Under generation tensor parallelism the first rank of a replica has the process, whose engine
    drives all of the replica's devices; the other ranks follow it, and hold no weights.

    When the process dies it is started anew, up to `restarts` times. It gets the weights of the
    last update again, is asked for a token that is known, and then gets the unfinished requests.
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
        self.logs = folder / f"engine-{context.role}-{context.rank}.log"
        self.process: EngineProcess | None = None
        self.restarts = 0
        """How often it was started anew."""
        self._told = 0
        """Restarts that `figures` has reported."""
        self._kept: dict[str, torch.Tensor] = {}
        """The weights of the last update in host memory, where restarts are allowed."""
        self._entering: list[Request] = []
        """Requests that the process does not have yet."""
        self._broken: EngineDied | None = None
        """How the process died in the weight update that is under way."""
        self._proof: tuple[Request, Completion] | None = None
        """An answered request of this version, to compare a restarted engine with."""

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
        """Whether this rank has the process."""
        return self._ranks[0] == self.context.rank

    def _agreed(self, work: Callable[[], Any]) -> Any:
        """Run `work` on the leading rank; every rank of the replica returns its result.

        All of them raise where it fails: the leading rank its error, the others HybridFlowError.
        """
        group = self.context.group("generation.tp") if len(self._ranks) > 1 else None
        outcome: list[Any] = [None, None]  # the result, and the text of an error
        failure: Exception | None = None
        if self.leads:
            # A failure is sent before it is raised, for the other ranks wait.
            try:
                outcome[0] = work()
            except Exception as error:
                failure = error
                outcome[1] = str(error)
        # The other ranks wait here for what the leading one got.
        if group is not None:
            dist.broadcast_object_list(outcome, src=self._ranks[0], group=group)

        if failure is not None:
            raise failure
        if outcome[1] is not None:
            raise HybridFlowError(f"on the replica's first rank: {outcome[1]}")
        return outcome[0]

    # --- life ---

    def start(self) -> None:
        """Start the process and wait for its engine. Collective over the replica.

        Raises ModelError for a model that is no policy, EngineDied with the tail of the log.
        """
        hf_config = policy_config(self.model)
        # The bounds that requests are checked against.
        text = hf_config.get_text_config()
        self.max_positions = self.config.limits().max_length or text.max_position_embeddings
        self.vocab = text.vocab_size
        # Boxes come together in the store, whole parameters leave through the bucket.
        self.store = WholeParameters.of(
            hf_config, self.config.dtype, self.context.device, self._load
        )
        self.bucket = Bucket(self.context.device)

        # These variables must be set when the process starts.
        devices = self._visible_devices()
        environment = self.engine_class.environment(self.context.device)
        self._environment: Mapping[str, str] = environment | devices
        self._agreed(self._launch)

    def _visible_devices(self) -> dict[str, str]:
        """Return the variable that shows the whole replica's GPUs to the leading rank's process.

        It is set where each rank sees its own GPU alone.
        """
        group = self.context.group("generation.tp") if len(self._ranks) > 1 else None
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        if group is None or self.context.device.type != "cuda":
            return {}
        if visible is None or "," in visible:
            return {}

        devices: list[Any] = [None] * len(self._ranks)
        dist.all_gather_object(devices, visible, group=group)
        return {"CUDA_VISIBLE_DEVICES": ",".join(devices)}

    def _launch(self) -> None:
        """Start a process and wait until its engine has started. Raises EngineDied."""
        started = time.monotonic()
        name = f"{self.engine_class.__name__} of {self.context.role}, rank {self.context.rank}"
        print(f"starting {name} in a process of its own; its log: {self.logs}", flush=True)
        fds = () if self.bucket.fd < 0 else (self.bucket.fd,)
        self.process = EngineProcess(self.logs, self._environment, fds)

        # The first message has what Child.start takes.
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
        }
        self.process.connection.send(setup)
        # Loading takes long: a line is printed now and then meanwhile.
        self.process.started(
            self.process_config.start_timeout_s,
            lambda seconds: print(f"{name} is starting ({seconds:.0f} s)", flush=True),
        )
        seconds = time.monotonic() - started
        print(f"{name} started in {seconds:.0f} s (pid {self.process.pid})", flush=True)

    def close(self) -> None:
        """End the process and free the shared memory."""
        if self.process is not None:
            self.process.end()
            self.process = None
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
        assert self.process is not None
        return self.process.ask(name, *arguments, timeout_s=self.process_config.hang_timeout_s)

    def _ask_or_revive(self, name: str) -> Any:
        """Call the engine; if its process died, call the one that is started anew."""
        try:
            return self._ask(name)
        except EngineDied as error:
            self._revive(error)
            return self._ask(name)

    # --- weights ---

    def layout(self) -> WeightLayout:
        """Give whole parameters to the first rank of each replica, and nothing to the others."""
        generation = self.context.generation
        layout = self.store.layout(self.context.world_size)
        if generation is None:
            return layout

        # Ranks that follow hold nothing, so that nothing is sent to them.
        replicas = range(len(generation.replicas))
        leading = {generation.ranks(replica)[0] for replica in replicas}
        held = {rank: boxes if rank in leading else {} for rank, boxes in layout.held.items()}
        return attrs.evolve(layout, held=held)

    def begin_update(self, version: int) -> None:
        """Send what waits while the engine still takes requests, then begin the update there."""
        super().begin_update(version)
        self._enter_all()
        # Answers of the old weights prove nothing about the new ones.
        self._proof = None
        self.store.begin()
        self.bucket.taken()
        self._loading("begin_update", version)

    def receive(self, name: str, box: Box, tensor: torch.Tensor) -> None:
        """Collect boxes until a parameter is whole, and send it then."""
        self.check_updating(name)
        self.store.receive(name, box, tensor)

    def _load(self, name: str, whole: torch.Tensor) -> None:
        """Send a whole parameter through the bucket, and keep it for restarts."""
        whole = whole.to(getattr(torch, self.config.dtype))
        # A copy is kept even while the process is dead, for the one that replaces it.
        if self.process_config.restarts:
            self._keep(name, whole)
        if self.leads and self._broken is None:
            for pieces in self.bucket.write(name, whole):
                self._loading("load", pieces)

    def _keep(self, name: str, whole: torch.Tensor) -> None:
        """Copy a parameter into host memory, which is made once."""
        if name not in self._kept:
            self._kept[name] = torch.empty(whole.shape, dtype=whole.dtype)
        self._kept[name].copy_(whole)

    def _loading(self, name: str, *arguments: Any) -> None:
        """Call the engine within a weight update.

        If the process dies, the rest of the weights is only kept, and `end_update` starts a process
        anew. Raises EngineDied where restarts are used up.
        """
        if self._broken is not None or not self.leads:
            return
        try:
            self._ask(name, *arguments)
        except EngineDied as error:
            if self.restarts >= self.process_config.restarts:
                raise self._final(error) from error
            self._broken = error

    def end_update(self) -> None:
        """Send the rest and end the update; start the process anew if it died meanwhile."""
        self.check_updating("end_update")
        if self.leads:
            self.store.end()
        self._loading("load", self.bucket.taken())
        self._loading("end_update")
        super().end_update()
        # The new process gets all weights of this update from the copy.
        if self._broken is not None:
            error = self._broken
            self._broken = None
            self._revive(error)

    def _revive(self, error: EngineDied) -> None:
        """Start a new process with the weights of the last update and the unfinished requests.

        Raises EngineDied where restarts are used up.
        """
        while True:
            if self.restarts >= self.process_config.restarts:
                raise self._final(error) from error
            self.restarts += 1
            print(f"{error}\nrestart {self.restarts} of {self.process_config.restarts}", flush=True)

            try:
                self._launch()
                self._load_again()
                self._prove()
                # `running` has the requests that wait to be sent, too.
                self._entering.clear()
                self._send("add", list(self.running.values()))
                return
            except EngineDied as again:
                error = again

    def _final(self, error: EngineDied) -> EngineDied:
        """Return the error with a hint about restarts."""
        hint = (
            "rollout.restarts are used up"
            if self.restarts
            else "rollout.restarts > 0 starts an engine anew"
        )
        return EngineDied(f"{error}\n({hint})")

    def _load_again(self) -> None:
        """Give a new process the weights that were kept. Raises EngineDied."""
        # Drop the pieces that the dead process did not take.
        self.bucket.taken()
        if self.version is None:
            return

        self._ask("begin_update", self.version)
        for name, values in self._kept.items():
            for pieces in self.bucket.write(name, values):
                self._ask("load", pieces)
        self._ask("load", self.bucket.taken())
        self._ask("end_update")

    def _prove(self) -> None:
        """Check that a new process draws a known first token with its log-probability.

        Raises HybridFlowError where it does not, EngineDied where the process ends.
        """
        if self._proof is None:
            return
        request, before = self._proof
        # Only the first token is asked for, under an id that no request has.
        sampling = attrs.evolve(request.sampling, max_tokens=1)
        self._send("add", [attrs.evolve(request, id=-1, sampling=sampling)])
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

    def sleep(self) -> None:
        """Let the engine free its memory; on a GPU its weights are gone then."""
        self.check_idle()
        if not self.asleep:
            self._agreed(lambda: self._ask_or_revive("sleep"))
            # The next update must bring the whole weights.
            if self.context.device.type == "cuda":
                self.version = None
                self.store.complete = False
        self.asleep = True

    def wake(self) -> None:
        """Let the engine take its memory again."""
        if self.asleep:
            self._agreed(lambda: self._ask_or_revive("wake"))
        self.asleep = False

    # --- generation ---

    def enter(self, request: Request) -> None:
        """Note a request, which `advance` sends.

        What comes together enters together, so that the engine makes the same batches each time.
        """
        self._entering.append(request)

    def _enter_all(self) -> None:
        """Send the requests that the process does not have yet."""
        if self._entering and self.leads:
            self._send("add", self._entering)
        self._entering = []

    def leave(self, ids: Sequence[int]) -> Iterable[Completion]:
        """Let the engine end requests early; `advance` gives their completions."""
        self._enter_all()
        if self.leads:
            self._send("abort", list(ids))
        return ()

    def _send(self, name: str, *arguments: Any) -> None:
        """Send a message without an answer. A death is an event, which `advance` sees."""
        assert self.process is not None
        try:
            self.process.send(name, *arguments)
        except EngineDied:
            self.process.events.put(("gone", None))

    def advance(self) -> list[Completion]:
        """Wait up to LOOK_S for completions. Collective over the replica.

        A process that died, or made no progress for hang_timeout_s, is started anew.
        """
        self._enter_all()
        return self._agreed(self._advance)

    def _advance(self) -> list[Completion]:
        assert self.process is not None
        kind, value = self._event(LOOK_S)
        if kind == "gone":
            self._revive(self.process.died())
            return []
        if kind == "error":
            raise HybridFlowError(value)
        if kind == "none":
            # A busy engine shows its progress by signs of life.
            silent = time.monotonic() - self.process.moved
            if silent > self.process_config.hang_timeout_s:
                how = f"made no progress for {silent:.0f} s (rollout.hang_timeout_s)"
                self._revive(self.process.died(how))
            return []

        # Take the completions that are there already; anything else is for the next call.
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
        """Return the completion; the first one that can prove a restart is kept for that.

        Its first token must have been drawn by this engine with the weights of now.
        """
        request = self.running[completion.id]
        # A prefix was drawn earlier, maybe with other weights.
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
