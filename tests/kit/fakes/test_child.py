from __future__ import annotations

import json
import pickle
import subprocess
import sys

from helpers.paths import matrix

from hybridflow.backends.fsdp.config import FSDPConfig
from hybridflow.core.contracts.training import OptimizerConfig
from hybridflow.core.values.model import ModelSpec
from hybridflow.core.values.parallel import ParallelLayout
from hybridflow.kit.fakes.process import SAID, Asked
from hybridflow.kit.testing import tiny_config


@matrix
def test_it_says_each_phase_of_what_a_file_asks_for(tmp_path):
    asked = Asked(
        backend="fsdp", config=FSDPConfig(precision="bf16"), model=ModelSpec(tiny_config("llama"), None, 0),
        optimizer=OptimizerConfig(), layout=ParallelLayout(dp=2), forward={"rows": 1, "tokens": 8},
        update={"rows": 1, "tokens": 8, "count": 2}, offload=True,
    )  # fmt: skip
    request = tmp_path / "asked"
    request.write_bytes(pickle.dumps(asked))
    command = [sys.executable, "-m", "hybridflow.kit.fakes.child", str(request)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=200)
    said = [
        json.loads(line.removeprefix(SAID))
        for line in done.stdout.splitlines()
        if line.startswith(SAID)
    ]
    phases = dict(said)
    assert [name for name, _ in said] == ["build", "rest", "forward", "update", "step", "away"]

    # llama with hidden size 32: two tables of 32 x 32, a norm, and per layer q and o 32x32, k and v 16x32, gate, up and
    # down 48x32, two norms. Of a parameter 4 bytes are its master, and 8 its moments; half is held.
    parameters = 2 * 32 * 32 + 32 + 2 * (2 * 32 * 32 + 2 * 16 * 32 + 3 * 48 * 32 + 64)
    assert 0 <= phases["build"]["after"] - 2 * parameters < 500
    assert 0 <= phases["rest"]["after"] - 6 * parameters < 1000
    assert phases["away"]["after"] < 500
