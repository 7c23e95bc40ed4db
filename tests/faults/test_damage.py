"""A damaged file of a run is refused, an older checkpoint is taken and told, or nothing of the result changes.

Twenty damages; `make damage` makes 200, or HYBRIDFLOW_DAMAGES of them.
"""

from __future__ import annotations

import os
import random

import pytest
from helpers.damage import WAYS, damage

COUNT = int(os.environ.get("HYBRIDFLOW_DAMAGES", "20"))


@pytest.mark.parametrize("number", range(COUNT))
def test_a_damaged_file_changes_no_result(number, trained, four_steps, resume):
    done = damage(trained, random.Random(number), WAYS[number % len(WAYS)])
    status, printed = resume()
    assert "Traceback" not in printed, f"{done}\n{printed}"
    if status:
        assert "hybridflow: " in printed, f"{done}\n{printed}"
    else:
        assert (trained / "export/actor/model.safetensors").read_bytes() == four_steps, done
