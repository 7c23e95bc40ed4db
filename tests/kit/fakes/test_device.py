from __future__ import annotations

from helpers import fake_jobs
from helpers.ranks import fresh


def test_operations_run_without_values_and_mixing_devices_raises():
    found = fresh(fake_jobs.device)
    assert found["gradient"] == ((3, 4), "fakegpu")
    assert found["item"] == (1.0, False, 1)  # what the host reads is 1, and False for truth values
    assert found["here"] == [[2.0, 2.0], [2.0, 2.0]]  # tensors of the CPU keep their values
    assert found["host"] == ("cpu", True) and found["home"] == [0.0] * 5
    assert found["module"] == "fakegpu"
    assert found["mixed"] and found["flag"]

    # The host waits for what it reads, and not for copies that it need not wait for.
    assert found["waits"] == {
        "a number": {"item": 1}, "a list": {"copy": 1}, "home": {"copy": 1}, "equal": {"equal": 1},
        "into the host's": {"copy": 1}, "later": {}, "to the device": {}, "on the device": {}, "of inference": {"copy": 1},
        "mask": True,
    }  # fmt: skip

    # Attention: its result (2 x 4 x 512 x 8 numbers) and a sum per head and token; 512 x 512 scores of 8 heads are 8 MB. Its
    # backward pass: gradients of queries, of keys and of values, and the gradient that it is given.
    result, key = 2 * 4 * 512 * 8 * 4, 2 * 2 * 512 * 8 * 4
    forward, backward, shapes = found["attention"]
    assert forward == result + 2 * 4 * 512 * 4
    assert backward == 2 * result + 2 * key
    assert shapes == [(2, 4, 512, 8), (2, 2, 512, 8), (2, 2, 512, 8)]
