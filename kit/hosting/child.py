"""The process of one engine: `python -m hybridflow.kit.hosting.child FD` talks with its worker over a socket.

It ends with the worker, however that ends, and takes every process that the engine has started with it.
"""

from __future__ import annotations

import contextlib
import os
import queue
import shutil
import signal
import sys
import threading
import time
import traceback
from multiprocessing.connection import Connection
from typing import Any

from hybridflow.kit.hosting.group import end_own_group

ALIVE_S = 1.0


class Child:
    """Runs the engine's steps and the worker's messages in the main thread; a second thread reads."""

    def __init__(self, connection: Connection):
        self.connection = connection
        self.inbox: queue.SimpleQueue[tuple] = queue.SimpleQueue()
        self.steps = 0
        self._sending = threading.Lock()

    def say(self, *message: Any) -> None:
        with self._sending:
            self.connection.send(message)

    def read(self) -> None:
        """In a thread of its own."""
        try:
            while True:
                self.inbox.put(self.connection.recv())
        except (EOFError, OSError):
            shutil.rmtree(
                os.environ["TMPDIR"], ignore_errors=True
            )  # the supervisor's, for this process alone
            end_own_group()  # the worker is gone: so are we, and the engine's own processes

    def tell_alive(self) -> None:
        """In a thread of its own."""
        with contextlib.suppress(OSError):
            while True:
                time.sleep(ALIVE_S)
                self.say("alive", self.steps)

    def run(self) -> None:
        setup = self.connection.recv()
        threading.Thread(target=self.read, daemon=True).start()
        threading.Thread(target=self.tell_alive, daemon=True).start()
        try:
            self.start(**setup)
        except BaseException as error:
            traceback.print_exc()
            self.say("failed", f"{type(error).__name__}: {error}")
            sys.exit(1)
        self.say("answer", os.getpid())
        while True:
            self.turn()

    def start(
        self, engine_class: type, model: Any, config: Any, place: dict[str, Any], bucket: Any
    ) -> None:
        import torch

        from hybridflow.core.contracts.worker import RankContext
        from hybridflow.core.serving.stepper import Stepper
        from hybridflow.core.values.parallel import ParallelLayout, generation_layout
        from hybridflow.kit.hosting.bucket import Assembler, open_bucket

        tp = place["tp"]
        layout = ParallelLayout(dp=tp)
        generation = generation_layout(layout, tp=tp, grouping="consecutive") if tp > 1 else None
        context = RankContext(
            place["role"], 0, layout, torch.device(place["device"]), place["seed"], generation
        )
        self.engine = engine_class(model, config, context)
        self.engine.start()
        self.stepper = Stepper(self.engine)
        self.assembler = Assembler(open_bucket(bucket))

    def turn(self) -> None:
        """Every waiting message, then a step of the engine; during a weight update messages alone."""
        from hybridflow.core.errors import HybridFlowError

        while not self.stepper.busy or not self.inbox.empty() or self.engine.updating:
            name, *arguments = self.inbox.get()
            try:
                value = getattr(self, f"on_{name}")(*arguments)
            except HybridFlowError as error:
                value = error
            if name not in ("add", "abort"):
                self.say("answer", value)
            elif value is not None:
                self.say("error", str(value))
        try:
            done = self.stepper.step()
        except HybridFlowError as error:
            self.say("error", str(error))
            self.stepper.abort()
            return
        self.steps += 1
        for completion in done:
            self.say("done", completion)

    def on_add(self, requests: Any) -> None:
        """A request that is refused is answered too: whoever asked counts on it."""
        from hybridflow.core.contracts.rollout import Completion
        from hybridflow.core.errors import HybridFlowError

        for request in requests:
            try:
                self.stepper.add(request)
            except HybridFlowError as error:
                self.say("error", str(error))
                ids, logprobs, versions = request.prefix()
                self.say("done", Completion(request.id, ids, logprobs, versions, "abort"))

    def on_abort(self, ids: Any) -> None:
        self.stepper.abort(ids)

    def on_begin_update(self, version: int) -> None:
        self.engine.begin_update(version)

    def on_load(self, pieces: Any) -> None:
        from hybridflow.core.values.weights import Box

        for name, whole in self.assembler.take(pieces):
            self.engine.receive(name, Box.full(tuple(whole.shape)), whole)

    def on_end_update(self) -> None:
        self.engine.end_update()

    def on_sleep(self) -> None:
        self.engine.sleep()

    def on_wake(self) -> None:
        self.engine.wake()


def main() -> None:
    with contextlib.suppress(AttributeError, OSError):
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the worker's to answer
    Child(Connection(int(sys.argv[1]))).run()


if __name__ == "__main__":
    main()
