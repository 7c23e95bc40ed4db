"""The process of one engine, which talks with its worker over a socket.

It is started by `python -m hybridflow.kit.hosting.child FD`, with the socket's descriptor.

It ends when the worker ends, in any way, together with all processes that the engine started.

    worker -> child:  (name, *arguments)         handled by on_NAME
    child -> worker:  ("answer", value)          to every message but add and abort
                      ("done", completion)       of a request
                      ("error", text)            generation failed
                      ("alive", steps)           every ALIVE_S seconds
                      ("failed", text)           the engine did not start

The replica's first rank owns the process. Its other ranks connect to an address of the process,
and use only the messages OF_A_RANK: each has a bucket for its own weights.
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
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, Listener
from typing import Any

from hybridflow.kit.hosting.group import end_own_group

ALIVE_S = 1.0
"""Seconds between two signs of life."""
OF_A_RANK = ("join", "load", "expect", "proof")
"""Messages that each of the replica's ranks sends; the handler also gets the rank's number."""


class Child:
    """Runs the engine's steps and the worker's messages in the main thread.

    A second thread reads messages, a third one sends signs of life.
    """

    def __init__(self, connection: Connection):
        self.connections: dict[int, Connection] = {0: connection}
        """The connections to the replica's ranks, by their number in the replica."""
        self.inbox: queue.SimpleQueue[tuple[int, tuple]] = queue.SimpleQueue()
        """(the rank's number in the replica, message)"""
        self.steps = 0
        """Number of the engine's steps so far, by which the worker sees its progress."""
        self._sending = threading.Lock()

    def say(self, *message: Any, place: int = 0) -> None:
        """Send a message to a rank of the replica; safe to call from several threads."""
        with self._sending:
            self.connections[place].send(message)

    def read(self) -> None:
        """Put the worker's messages into the inbox. Runs in a thread of its own."""
        try:
            while True:
                self.inbox.put((0, self.connections[0].recv()))
        except (EOFError, OSError):
            # The worker is gone: end this process, its scratch folder (which the worker made for it
            # alone), and the engine's own processes.
            shutil.rmtree(os.environ["TMPDIR"], ignore_errors=True)
            end_own_group()

    def accept(self, listener: Listener, ranks: int) -> None:
        """Let the replica's other ranks connect, and read each in a thread of its own."""
        with listener:
            joined = 1
            while joined < ranks:
                # A connection without the key is not one of the replica's ranks.
                with contextlib.suppress(AuthenticationError):
                    connection = listener.accept()
                    joined += 1
                    threading.Thread(target=self.follow, args=(connection,), daemon=True).start()

    def follow(self, connection: Connection) -> None:
        """Put a later rank's messages into the inbox; the first one has the rank's number."""
        # If a rank ends, the whole job ends; nothing is to be done here.
        with contextlib.suppress(EOFError, OSError):
            # The first message has the rank's number.
            _, place, bucket = connection.recv()
            self.connections[place] = connection
            self.inbox.put((place, ("join", bucket)))
            while True:
                self.inbox.put((place, connection.recv()))

    def tell_alive(self) -> None:
        """Send signs of life until the connection ends. Runs in a thread of its own."""
        with contextlib.suppress(OSError):
            while True:
                time.sleep(ALIVE_S)
                self.say("alive", self.steps)

    def run(self) -> None:
        """Start the engine with the first message, then serve for ever."""
        setup = self.connections[0].recv()
        # Signs of life are sent while the engine loads, too.
        threading.Thread(target=self.read, daemon=True).start()
        threading.Thread(target=self.tell_alive, daemon=True).start()

        try:
            self.start(**setup)
        except BaseException as error:
            traceback.print_exc()
            self.say("failed", f"{type(error).__name__}: {error}")
            sys.exit(1)

        self.say("answer", self.engine.layout())
        while True:
            self.turn()

    def start(
        self,
        engine_class: type,
        model: Any,
        config: Any,
        place: dict[str, Any],
        bucket: Any,
        door: tuple[str, bytes],
    ) -> None:
        """Build and start the engine; what takes seconds to import is imported here.

        `place` has role, device, seed and tp. `bucket` is a Bucket's handle. `door` has the address
        to which the replica's other ranks connect, and the key that they must know.
        """
        import torch

        from hybridflow.core.contracts.worker import RankContext
        from hybridflow.core.processes.look import name_of
        from hybridflow.core.processes.page import FOLDER, begin, doing
        from hybridflow.core.values.parallel import ParallelLayout, generation_layout

        folder = os.environ.get(FOLDER)
        begin(folder, f"engine of {name_of(folder, os.getppid())}")

        # The engine drives all devices of its replica, as if it were rank 0 of a pool of its own.
        tp = place["tp"]
        layout = ParallelLayout(dp=tp)
        generation = generation_layout(layout, tp=tp, grouping="consecutive") if tp > 1 else None
        self.device = torch.device(place["device"])
        context = RankContext(place["role"], 0, layout, self.device, place["seed"], generation)

        with doing("start"):
            self.engine = engine_class(model, config, context)
            self.engine.start()
        self.readers: dict[int, Any] = {}
        self.on_join(0, bucket)
        # Later ranks connect when the first one says that this has started.
        if tp > 1:
            address, key = door
            listener = Listener(address, "AF_UNIX", authkey=key)
            threading.Thread(target=self.accept, args=(listener, tp), daemon=True).start()

    def turn(self) -> None:
        """Handle every waiting message, then take a step of the engine.

        Without requests, and during a weight update, it waits for messages.
        """
        from hybridflow.core.errors import HybridFlowError
        from hybridflow.core.processes.page import doing

        while not self.engine.busy or not self.inbox.empty() or self.engine.updating:
            place, (name, *arguments) = self.inbox.get()
            if name in OF_A_RANK:
                arguments = [place, *arguments]
            try:
                with doing(name):
                    value = getattr(self, f"on_{name}")(*arguments)
            except HybridFlowError as error:
                value = error
            # Added and aborted requests are answered by events.
            if name not in ("add", "abort"):
                self.say("answer", value, place=place)
            elif value is not None:
                self.say("error", str(value))

        # After a failed step all requests end, and the process lives on.
        try:
            with doing("generate"):
                done = self.engine.step()
        except HybridFlowError as error:
            self.say("error", str(error))
            self.engine.abort()
            return

        self.steps += 1
        for completion in done:
            self.say("done", completion)

    def on_add(self, requests: Any) -> None:
        """Add requests. A refused one gets a completion with its prefix, as the worker waits."""
        from hybridflow.core.contracts.rollout import Completion
        from hybridflow.core.errors import HybridFlowError

        for request in requests:
            try:
                self.engine.add(request)
            except HybridFlowError as error:
                self.say("error", str(error))
                ids, logprobs, versions = request.prefix()
                self.say("done", Completion(request.id, ids, logprobs, versions, "abort"))

    def on_abort(self, ids: Any) -> None:
        """End requests early; their completions come with a later step."""
        self.engine.abort(ids)

    def on_begin_update(self, version: int) -> None:
        """Begin the engine's update of weights; it generates nothing until `on_end_update`."""
        self.engine.begin_update(version)

    def on_join(self, place: int, bucket: Any) -> None:
        """Note the bucket of a rank of the replica."""
        from hybridflow.kit.hosting.bucket import BucketReader

        self.readers[place] = BucketReader(bucket, self.device)

    def on_load(self, place: int, load: Any) -> bytes | None:
        """Let the engine take the contents of this rank's bucket."""
        return self.engine.take(place, self.readers[place], load)

    def on_expect(self, place: int, wanted: Any) -> None:
        """Tell the engine the boxes that this rank's proof is about."""
        self.engine.expect_of(place, wanted)

    def on_proof(self, place: int) -> Any:
        """Return the engine's proof of this rank's weights."""
        return self.engine.proof_of(place)

    def on_end_update(self) -> None:
        """End the engine's update of weights, after which it generates with them."""
        self.engine.end_update()

    def on_sleep(self) -> None:
        """Free the engine's device memory."""
        self.engine.sleep()

    def on_wake(self, cache: bool = True) -> None:
        """Allocate the device memory again; without `cache` not that of keys and values."""
        self.engine.wake(cache)


def main() -> None:
    """Serve the worker at the other end of the socket whose descriptor is the first argument."""
    # The worker handles Ctrl-C.
    with contextlib.suppress(AttributeError, OSError):
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    Child(Connection(int(sys.argv[1]))).run()


if __name__ == "__main__":
    main()
