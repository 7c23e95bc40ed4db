from __future__ import annotations

import attrs
import pytest
from helpers import fake_jobs
from helpers.paths import matrix

from hybridflow.core.contracts.training import OptimizerConfig
from hybridflow.core.values.model import ModelSpec
from hybridflow.core.values.parallel import ParallelLayout
from hybridflow.kit.fakes.process import Asked, NotRehearsed, rehearse
from hybridflow.kit.testing import tiny_config


@matrix  # test_child.py has a process, test_rehearsal.py the phases
def test_a_role_tells_its_phases_and_this_process_stays_as_it_is():
    found = fake_jobs.told(fake_jobs.reference_folder())
    assert list(found) == ["build", "rest", "forward", "update", "step", "away"]

    # As in test_rehearsal.py: of qwen2's parameters each rank has half, in float32, with two moments.
    layer = (32 * 32 + 32) + 2 * (16 * 32 + 16) + 32 * 32 + 3 * 48 * 32 + 64
    held = (32 * 32 + 32 + 2 * layer) // 2
    assert 0 <= found["build"]["after"] - 4 * held < 200
    assert 0 <= found["rest"]["after"] - 12 * held < 800
    assert found["update"]["after"] - found["step"]["after"] == pytest.approx(4 * held, abs=500)
    assert found["update"]["peak"] > found["forward"]["peak"] > found["rest"]["after"]
    assert found["away"]["after"] < 1000


@matrix
def test_a_backend_that_cannot_run_there_says_why():
    asked = Asked(
        backend="fsdp",
        config=None,
        model=ModelSpec(tiny_config("qwen2"), None, 0),
        optimizer=OptimizerConfig(),
        layout=ParallelLayout(dp=2),
    )
    with pytest.raises(NotRehearsed, match=r"fsdp does not run on a GPU that is not there .*lora"):
        list(rehearse(asked))
    with pytest.raises(NotRehearsed, match="nobody"):
        list(rehearse(attrs.evolve(asked, backend="nobody")))
