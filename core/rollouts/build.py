"""Builds an engine by its plugin's name, and starts it."""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
from typing import Any

from hybridflow.core.contracts.rollout import RolloutEngine, engine_settings
from hybridflow.core.contracts.worker import RankContext
from hybridflow.core.plugins import registry
from hybridflow.core.processes.page import doing
from hybridflow.core.values.model import ModelSpec


def start_engine(engine: RolloutEngine) -> None:
    """Start the engine, here or in its own process, within its settings' `start_timeout_s`.

    Nothing can stop a library that hangs in this process: past the limit the stacks are printed,
    and the process ends with status 1.
    """
    settings = engine_settings(engine.config)
    seconds = settings.start_timeout_s

    # An engine in a process of its own applies the limit itself.
    if settings.own_process or seconds is None:
        engine.start()
        return

    timer = threading.Timer(seconds, _give_up, [type(engine).__name__, seconds])
    timer.daemon = True
    timer.start()
    try:
        with doing("the engine's start", seconds):
            engine.start()
    finally:
        timer.cancel()


def _give_up(name: str, seconds: float) -> None:
    faulthandler.dump_traceback(all_threads=True)
    print(
        f"{name} did not start within {seconds:.0f} s (rollout.start_timeout_s): its process ends",
        file=sys.stderr,
        flush=True,
    )
    os._exit(1)  # not sys.exit, which would wait for the thread that hangs


def build_engine(
    name: str, model: ModelSpec, config: Any, context: RankContext, logs: str | None = None
) -> RolloutEngine:
    """Return the engine of that name, not started yet.

    logs: the folder for the log of an engine in a process of its own.
    """
    engine_class: type[RolloutEngine] = registry().get("rollout_engine", name)
    return engine_class.build(model, config, context, logs)
