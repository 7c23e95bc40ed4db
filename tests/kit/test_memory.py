"""Freed memory stays with the process, so that the next large column finds its pages."""

import subprocess
import sys

import pytest

PROBE = """
import numpy as np
from hybridflow.kit.memory import KEPT_BYTES, keep_freed_memory
def resident(): return int(open("/proc/self/statm").read().split()[1]) * 4096
def grown_after_freeing(nbytes):
    before = resident(); block = np.ones(nbytes, np.uint8); del block
    return resident() - before
print(grown_after_freeing(1 << 28), keep_freed_memory(), grown_after_freeing(1 << 28), grown_after_freeing(KEPT_BYTES + 1))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_freed_memory_is_kept_up_to_a_limit():
    out = subprocess.run(
        [sys.executable, "-c", PROBE], capture_output=True, text=True, check=True
    ).stdout.split()
    if out[1] == "False":
        pytest.skip("the C library is not glibc")
    before, kept, beyond = int(out[0]), int(out[2]), int(out[3])
    assert before < 1 << 26 < 1 << 27 < kept
    assert beyond < 1 << 26
