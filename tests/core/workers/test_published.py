"""By how many steps a token lags, from the versions of the steps' weights."""

from __future__ import annotations

import numpy as np

from hybridflow.core.workers.published import Published


def test_a_token_lags_by_the_steps_since_its_weights_were_the_newest():
    published = Published()
    # Two updates in steps 1 and 3, none in step 2.
    for step, version in ((1, 0), (2, 2), (3, 2), (4, 4)):
        published.add({step - 1: version})
    published.add({3: 6})  # a second phase of the step, after an update
    versions = np.array([0, 1, 2, 3, 4, 5])
    assert published.lags(versions, 4).tolist() == [3, 3, 1, 1, 0, 0]
    assert published.lags(np.array([0, 2, 4]), 3).tolist() == [2, 0, 0]
    assert published.lags(np.array([], np.int64), 4).tolist() == []
    # Versions of steps that no bound reaches are forgotten.
    for step in range(5, 40):
        published.add({step - 1: 2 * step})
    assert sorted(published.versions) == list(range(39 - 16, 39))
    late = Published()
    late.add({7: 5})
    assert late.lags(np.array([4, 5]), 8).tolist() == [1, 0]
