"""A damaged file of a run is refused, an older checkpoint is taken and told, or nothing of the result changes.

Twenty damages; `make damage` makes 200, or HYBRIDFLOW_DAMAGES of them.
"""

from __future__ import annotations

import os
import random

import pytest
from helpers.damage import WAYS, damage
from helpers.tiny import exported

COUNT = int(os.environ.get("HYBRIDFLOW_DAMAGES", "20"))


REFUSED = ("run.json", "done.json")
"""Files without which nobody knows what the run was; any other one has a way round it."""


@pytest.mark.parametrize("number", range(COUNT))
def test_a_damaged_file_changes_no_result(number, trained, four_steps, resume):
    way = WAYS[number % len(WAYS)]
    file = damage(trained, random.Random(number), way)
    status, printed = resume()
    told = f"{way} of {file}\n{printed}"
    assert "Traceback" not in printed, told
    if status:
        assert file.name in REFUSED or (way == "folder" and file.suffix == ".jsonl"), told
        assert file.name in printed, told
    else:
        assert exported(trained) == four_steps, told
