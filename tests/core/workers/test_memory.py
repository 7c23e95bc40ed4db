"""How much memory a phase takes, against a block of known size, in a process that keeps nothing yet."""

import subprocess
import sys

import pytest

PROBE = """
import torch
from hybridflow.core.workers.memory import measured
with measured(torch.device("cpu")) as peak:
    block = torch.ones(1 << 26)
    del block
print(peak.most, peak.before)
"""
SIZE = 4 << 26


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_phase_takes_what_is_in_use_inside_it_and_freed_again():
    out = subprocess.run(
        [sys.executable, "-c", PROBE], capture_output=True, text=True, check=True
    ).stdout.split()
    most, before = map(int, out)
    if not most:
        pytest.skip("the kernel does not let a process reset its peak")
    assert SIZE <= most - before < 1.2 * SIZE
