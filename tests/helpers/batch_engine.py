"""A rollout engine that takes whole batches alone, as a third party may bring one."""

from __future__ import annotations

from hybridflow.backends.transformers.engine import TransformersEngine
from hybridflow.kit import batches


class BatchEngine(batches.BatchEngine):
    """An engine with `submit` alone, around one that can do more."""

    def __init__(self, inner: TransformersEngine):
        super().__init__(inner.model, inner.config, inner.context)
        self.inner = inner
        self.version = inner.version

    def start(self):
        self.inner.start()

    def submit(self, requests):
        return self.inner.submit(requests)

    def layout(self):
        return self.inner.layout()

    def receive(self, name, box, tensor):
        self.inner.receive(name, box, tensor)

    def begin_update(self, version):
        super().begin_update(version)
        self.inner.begin_update(version)

    def end_update(self):
        self.inner.end_update()
        super().end_update()

    def abort_batch(self, ids):
        self.inner.abort(ids)
