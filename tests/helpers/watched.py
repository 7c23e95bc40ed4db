"""What the tests of whole steps share."""

from __future__ import annotations

import torch

from hybridflow.core.values.batch import Batch


class Watched:
    """Before a policy-gradient algorithm: keeps what its updates were made of, in `batch`."""

    def minibatches(self, ctx, batch):
        self.batch = batch
        return super().minibatches(ctx, batch)


def column(batch: Batch, name: str) -> torch.Tensor:
    """Padded, on this process."""
    found = batch[name]
    return found.padded() if found.lengths is not None else torch.as_tensor(found.values)
