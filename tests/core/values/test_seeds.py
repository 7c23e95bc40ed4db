"""Seeds of sequences, against another program."""

from __future__ import annotations

from hybridflow.core.values.seeds import row_seed


def test_seeds_are_of_the_run_and_the_sample():
    """As `printf '3:0' | b2sum -l 64` gives them, without the highest bit of the number."""
    for seed, sample, digest in ((3, 0, "58f32a4ac3cc4ecf"), (12345, 678, "79cdb9bd65b2965c")):
        assert row_seed(seed, sample) == int.from_bytes(bytes.fromhex(digest), "little") // 2
    assert len({row_seed(seed, sample) for seed in range(30) for sample in range(30)}) == 900
