"""A rollout engine in a process of its own, behind the contract of one in this process."""

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
SAME_NATS = 0.05
"""An engine started anew says the same as before: the first token of a sequence within so much."""


class HostedEngine(ContinuousEngine):
    """Under generation tensor parallelism the first rank of a replica has the process, whose engine drives all of the
    replica's devices; the other ranks follow it, and hold no weights.

    When the process dies it is started anew, up to `restarts` times: it gets the weights of the last update again, is
    asked one question to which the answer is known, and then the requests that are unfinished. Their tokens are the
    same: they follow from seeds and positions.
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
        self.engine_class, self.process_config = engine_class, config
        self.inflight = engine_class.inflight
        self.logs = (
            Path(logs or tempfile.gettempdir()) / f"engine-{context.role}-{context.rank}.log"
        )
        self.process: EngineProcess | None = None
        self.restarts = 0
        """How often it was started anew."""
        self._told = 0
        self._kept: dict[str, torch.Tensor] = {}
        self._entering: list[Request] = []
        self._broken: EngineDied | None = None
        self._proof: tuple[Request, Completion] | None = None

    # Ranks of a replica
    @property
    def _ranks(self) -> list[int]:
        generation = self.context.generation
        if generation is None:
            return [self.context.rank]
        return generation.ranks(generation.replica_of[self.context.rank])

    @property
    def leads(self) -> bool:
        return self._ranks[0] == self.context.rank

    def _agreed(self, work: Callable[[], Any]) -> Any:
        """What the leading rank's `work` gives, or raises, on every rank of the replica."""
        group = self.context.group("generation.tp") if len(self._ranks) > 1 else None
        told: list[Any] = [None, None]
        failure: Exception | None = None
        if self.leads:
            try:
                told[0] = work()
            except Exception as error:  # told before it is raised: the others wait
                failure, told[1] = error, str(error)
        if group is not None:
            dist.broadcast_object_list(told, src=self._ranks[0], group=group)
        if failure is not None:
            raise failure
        if told[1] is not None:
            raise HybridFlowError(f"on the replica's first rank: {told[1]}")
        return told[0]

    # Life
    def start(self) -> None:
        """Raises ModelError for a model that is no policy, EngineDied with the tail of the log. Collective."""
        hf_config = policy_config(self.model)
        text = hf_config.get_text_config()
        self.max_positions = self.config.limits().max_length or text.max_position_embeddings
        self.vocab = text.vocab_size
        self.store = WholeParameters.of(
            hf_config, self.config.dtype, self.context.device, self._load
        )
        self.bucket = Bucket(self.context.device)
        devices = self._visible_devices()
        self._environment: Mapping[str, str] = (
            self.engine_class.environment(self.context.device) | devices
        )
        self._agreed(self._launch)

    def _visible_devices(self) -> dict[str, str]:
        """The GPUs of the whole replica for the leading rank's process, where each rank sees its own alone."""
        group = self.context.group("generation.tp") if len(self._ranks) > 1 else None
        mine = os.environ.get("CUDA_VISIBLE_DEVICES")
        if group is None or self.context.device.type != "cuda" or mine is None or "," in mine:
            return {}
        every: list[Any] = [None] * len(self._ranks)
        dist.all_gather_object(every, mine, group=group)
        return {"CUDA_VISIBLE_DEVICES": ",".join(every)}

    def _launch(self) -> None:
        started = time.monotonic()
        name = f"{self.engine_class.__name__} of {self.context.role}, rank {self.context.rank}"
        print(f"starting {name} in a process of its own; its log: {self.logs}", flush=True)
        fds = () if self.bucket.fd < 0 else (self.bucket.fd,)
        self.process = EngineProcess(self.logs, self._environment, fds)
        place = {
            "role": self.context.role, "device": str(self.context.device), "seed": self.context.seed,
            "tp": len(self._ranks),
        }  # fmt: skip
        self.process.connection.send({
            "engine_class": self.engine_class, "model": self.model, "config": self.config, "place": place,
            "bucket": self.bucket.handle(),
        })  # fmt: skip
        self.process.started(
            self.process_config.start_timeout_s,
            lambda seconds: print(f"{name} is starting ({seconds:.0f} s)", flush=True),
        )  # fmt: skip
        print(
            f"{name} started in {time.monotonic() - started:.0f} s (pid {self.process.pid})",
            flush=True,
        )

    def close(self) -> None:
        if self.process is not None:
            self.process.end()
            self.process = None
            self.bucket.close()

    def __del__(self):
        with contextlib.suppress(
            Exception
        ):  # the interpreter may be ending; the process then ends by itself
            self.close()

    def figures(self) -> dict[str, float]:
        new, self._told = self.restarts - self._told, self.restarts
        return {"engine_restarts": float(new)}

    def _ask(self, name: str, *arguments: Any) -> Any:
        """Raises EngineDied."""
        assert self.process is not None
        return self.process.ask(name, *arguments, timeout_s=self.process_config.hang_timeout_s)

    def _ask_or_revive(self, name: str) -> Any:
        try:
            return self._ask(name)
        except EngineDied as error:
            self._revive(error)
            return self._ask(name)

    # Weights
    def layout(self) -> WeightLayout:
        """The first rank of each replica takes whole parameters; the others hold nothing."""
        world, generation = self.context.world_size, self.context.generation
        whole = self.store.layout(world)
        if generation is None:
            return whole
        leading = {generation.ranks(replica)[0] for replica in range(len(generation.replicas))}
        return attrs.evolve(
            whole, held={rank: held if rank in leading else {} for rank, held in whole.held.items()}
        )

    def begin_update(self, version: int) -> None:
        super().begin_update(version)
        self._enter_all()  # while the engine still takes requests
        self._proof = None
        self.store.begin()
        self.bucket.taken()
        self._loading("begin_update", version)

    def receive(self, name: str, box: Box, tensor: torch.Tensor) -> None:
        self.check_updating(name)
        self.store.receive(name, box, tensor)

    def _load(self, name: str, whole: torch.Tensor) -> None:
        whole = whole.to(getattr(torch, self.config.dtype))
        if self.process_config.restarts:
            self._keep(name, whole)
        if self.leads and self._broken is None:
            for pieces in self.bucket.write(name, whole):
                self._loading("load", pieces)

    def _keep(self, name: str, whole: torch.Tensor) -> None:
        if name not in self._kept:
            self._kept[name] = torch.empty(whole.shape, dtype=whole.dtype)
        self._kept[name].copy_(whole)

    def _loading(self, name: str, *arguments: Any) -> None:
        """Of an update: if the process dies, the rest is only kept, and `end_update` starts it anew."""
        if self._broken is not None or not self.leads:
            return
        try:
            self._ask(name, *arguments)
        except EngineDied as error:
            if self.restarts >= self.process_config.restarts:
                raise self._final(error) from error
            self._broken = error

    def end_update(self) -> None:
        self.check_updating("end_update")
        if self.leads:
            self.store.end()
        self._loading("load", self.bucket.taken())
        self._loading("end_update")
        super().end_update()
        if self._broken is not None:
            error, self._broken = self._broken, None
            self._revive(error)

    def _revive(self, error: EngineDied) -> None:
        """A new process, with the weights of the last update and the unfinished requests. Raises EngineDied."""
        while True:
            if self.restarts >= self.process_config.restarts:
                raise self._final(error) from error
            self.restarts += 1
            print(f"{error}\nrestart {self.restarts} of {self.process_config.restarts}", flush=True)
            try:
                self._launch()
                self._load_again()
                self._prove()
                self._entering.clear()
                self._send("add", list(self.running.values()))
                return
            except EngineDied as again:
                error = again

    def _final(self, error: EngineDied) -> EngineDied:
        hint = (
            "rollout.restarts are used up"
            if self.restarts
            else "rollout.restarts > 0 starts an engine anew"
        )
        return EngineDied(f"{error}\n({hint})")

    def _load_again(self) -> None:
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
        """The new process gives the first token of a finished sequence the log-probability that it had before."""
        if self._proof is None:
            return
        request, before = self._proof
        one = attrs.evolve(request, id=-1, sampling=attrs.evolve(request.sampling, max_tokens=1))
        self._send("add", [one])
        kind, after = self._event(self.process_config.hang_timeout_s)
        if kind == "gone":
            assert self.process is not None
            raise self.process.died()
        if kind != "done" or not _first_token_agrees(before, after):
            raise HybridFlowError(
                f"the rollout engine that was started anew answers differently: {after} for request {request.id}, before "
                f"token {before.response_ids[:1]} with logprob {before.logprobs[:1]}; its weights did not come back"
            )

    # Memory
    def sleep(self) -> None:
        self.check_idle()
        if not self.asleep:
            self._agreed(lambda: self._ask_or_revive("sleep"))
            if self.context.device.type == "cuda":
                self.version, self.store.complete = None, False
        self.asleep = True

    def wake(self) -> None:
        if self.asleep:
            self._agreed(lambda: self._ask_or_revive("wake"))
        self.asleep = False

    # Generation
    def enter(self, request: Request) -> None:
        """Sent by `advance`: what comes together enters together, so that the same batches are made each time."""
        self._entering.append(request)

    def _enter_all(self) -> None:
        if self._entering and self.leads:
            self._send("add", self._entering)
        self._entering = []

    def leave(self, ids: Sequence[int]) -> Iterable[Completion]:
        self._enter_all()
        if self.leads:
            self._send("abort", list(ids))
        return ()

    def _send(self, name: str, *arguments: Any) -> None:
        """A death is seen by `advance`."""
        assert self.process is not None
        try:
            self.process.send(name, *arguments)
        except EngineDied:
            self.process.events.put(("gone", None))

    def advance(self) -> list[Completion]:
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
            silent = time.monotonic() - self.process.moved
            if silent > self.process_config.hang_timeout_s:
                self._revive(
                    self.process.died(
                        f"made no progress for {silent:.0f} s (rollout.hang_timeout_s)"
                    )
                )
            return []
        done = [value]
        while not self.process.events.empty():
            kind, value = self.process.events.get()
            if kind != "done":
                self.process.events.put((kind, value))
                break
            done.append(value)
        return [self._remembered(c) for c in done if c.id in self.running]

    def _remembered(self, completion: Completion) -> Completion:
        request = self.running[completion.id]
        new = len(completion.response_ids) > 0 and (
            request.prefix_ids is None or not len(request.prefix_ids)
        )
        if self._proof is None and new and int(completion.weight_version[0]) == self.version:
            self._proof = (request, completion)
        return completion

    def _event(self, timeout_s: float) -> tuple[str, Any]:
        assert self.process is not None
        try:
            return self.process.events.get(timeout=timeout_s)
        except queue.Empty:
            return ("none", None)


def _first_token_agrees(before: Completion, after: Completion) -> bool:
    return bool(
        len(after.response_ids)
        and after.response_ids[0] == before.response_ids[0]
        and abs(float(after.logprobs[0]) - float(before.logprobs[0])) < SAME_NATS
    )
