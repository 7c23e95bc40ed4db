"""Found by Python as it starts where this folder is in PYTHONPATH: time.time may jump, by the seconds in a file."""

import os
import time

_real = time.time


def _jumping() -> float:
    try:
        with open(os.environ["CAMPAIGN_CLOCK"]) as file:
            return _real() + float(file.read() or 0)
    except (KeyError, OSError, ValueError):
        return _real()


time.time = _jumping
