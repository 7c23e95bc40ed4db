"""How much memory a phase takes, against a block of known size."""

import sys

import pytest
import torch

from hybridflow.core.workers.memory import measured


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_phase_takes_what_is_in_use_inside_it_and_freed_again():
    size = 1 << 28
    with measured(torch.device("cpu")) as peak:
        block = torch.ones(size // 4)
        del block
    if not peak.most:
        pytest.skip("the kernel does not let a process reset its peak")
    assert size <= peak.most - peak.before < 1.2 * size
