"""A damaged file of a run is refused, an older checkpoint is taken and told, or nothing of the result changes.

Twenty damages; `make damage` makes 200, or HYBRIDFLOW_DAMAGES of them.
"""

from __future__ import annotations

import os
import random

import pytest
from helpers.damage import WAYS, damage, wrong
from helpers.tiny import exported

COUNT = int(os.environ.get("HYBRIDFLOW_DAMAGES", "20"))


@pytest.mark.parametrize("number", range(COUNT))
def test_a_damaged_file_changes_no_result(number, trained, four_steps, resume):
    way = WAYS[number % len(WAYS)]
    file = damage(trained, random.Random(number), way)
    status, printed = resume()
    told = f"{way} of {file}\n{printed}"
    assert wrong(status, printed, way, file) == "", told
    assert status or exported(trained) == four_steps, told
