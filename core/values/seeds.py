"""Seeds of sequences."""

from __future__ import annotations

import hashlib


def row_seed(seed: int, sample: int) -> int:
    """Return the seed of one sequence, 63 bits.

    It depends only on the run's seed and the sample's number, not on ranks or batches.
    """
    digest = hashlib.blake2b(f"{seed}:{sample}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
