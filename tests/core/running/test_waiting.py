import time

import pytest

from hybridflow.core.running.waiting import said_meanwhile


def test_it_speaks_until_the_work_is_over():
    said: list[str] = []
    with said_meanwhile(said.append, lambda: "building", every_s=0.02):
        while len(said) < 2:
            time.sleep(0.005)
    count = len(said)
    time.sleep(0.1)
    assert len(said) == count and said[0].startswith("building (0 s)")


def test_it_stops_when_the_work_fails():
    said: list[str] = []
    with pytest.raises(RuntimeError), said_meanwhile(said.append, lambda: "building", every_s=0.02):
        raise RuntimeError
    time.sleep(0.1)
    assert said == []
