"""A store in memory that counts, and what tests do with batches."""

from __future__ import annotations

import numpy as np
import torch

from hybridflow.core.groups.wire import Decoder, Encoder
from hybridflow.core.values.batch import Batch, PromisedTable, View


class CountingStore:
    """Copies in, hands out views that cannot be written to, as Ray's store does; counts objects and bytes."""

    def __init__(self):
        self.blocks, self.fetched = [], []

    def put(self, block):
        copies = [np.array(a) for a in block]
        for copy in copies:
            copy.flags.writeable = False
        self.blocks.append(copies)
        return len(self.blocks) - 1

    def get(self, handle):
        self.fetched.append(handle)
        return self.blocks[handle]

    @property
    def bytes_put(self):
        return sum(a.nbytes for block in self.blocks for a in block)


EVERYBODYS = CountingStore()


def sent(value, store=EVERYBODYS, replies=()):
    """The value as it arrives on the other side; `replies` are the batches that pending calls have come to."""
    encoder = Encoder(store)
    blob = encoder.dumps(value)
    return Decoder(blob, encoder.handles, store, lambda at: replies[at]).load()


def promised(batch, rows=True, names=True):
    """The batch as a call's result that is not there yet; its rows and names known beforehand or not."""
    table = PromisedTable(
        lambda: batch, batch.rows if rows else None, batch.names if names else None
    )
    return Batch.of_views([View((table,))])


def plain(column):
    """A column as a list of plain values, one per row."""
    if column.kind == "object":
        return list(column.values)
    return [torch.as_tensor(row).double().tolist() for row in column]


def rows_of(batch):
    """The batch as a list of dicts."""
    columns = {name: plain(batch[name]) for name in batch.names}
    return [{name: values[i] for name, values in columns.items()} for i in range(batch.rows)]
