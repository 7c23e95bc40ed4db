"""Any engine, one request after the other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from hybridflow.core.contracts.rollout import Completion, Request, RolloutEngine


class Stepper:
    """`add` and `step` for any engine. One without them works batch by batch: what is added meanwhile waits."""

    def __init__(self, engine: RolloutEngine):
        self.engine = engine
        self._waiting: list[Request] = []
        self._stream: Iterator[Completion] = iter(())
        self._open: set[int] = set()
        self._done: list[Completion] = []
        engine.disown()

    @property
    def busy(self) -> bool:
        if self.engine.continuous:
            return self.engine.busy
        return bool(self._waiting or self._open or self._done)

    def add(self, request: Request) -> None:
        if self.engine.continuous:
            self.engine.add(request)
        else:
            self.engine.check_ready()
            self._waiting.append(request)

    def step(self) -> list[Completion]:
        if self.engine.continuous:
            return self.engine.step()
        done, self._done = self._done, []
        if done:
            return done
        if not self._open and self._waiting:
            batch, self._waiting = self._waiting, []
            self._open = {r.id for r in batch}
            self._stream = self.engine.submit(batch)
        if (completion := next(self._stream, None)) is None:
            return []
        self._open.discard(completion.id)
        return [completion]

    def abort(self, ids: Iterable[int] | None = None) -> None:
        if self.engine.continuous:
            self.engine.abort(ids)
            return
        wanted = {r.id for r in self._waiting} | self._open if ids is None else set(ids)
        self._done += [
            Completion(r.id, *r.prefix(), "abort") for r in self._waiting if r.id in wanted
        ]
        self._waiting = [r for r in self._waiting if r.id not in wanted]
        if running := wanted & self._open:
            self.engine.abort(running)
