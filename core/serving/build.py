"""An engine by its plugin's name, built and started."""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
from typing import Any

from hybridflow.core.contracts.rollout import RolloutEngine, engine_settings
from hybridflow.core.contracts.worker import RankContext
from hybridflow.core.plugins import registry
from hybridflow.core.values.model import ModelSpec


def start_engine(engine: RolloutEngine) -> None:
    """Start it, here or in its own process, within its settings' `start_timeout_s`.

    Nothing can stop a library that hangs in this process: the stacks are printed, and the process ends.
    """
    settings = engine_settings(engine.config)
    seconds = settings.start_timeout_s
    if settings.own_process or seconds is None:
        engine.start()
        return
    over = threading.Timer(seconds, _give_up, [type(engine).__name__, seconds])
    over.daemon = True
    over.start()
    try:
        engine.start()
    finally:
        over.cancel()


def _give_up(name: str, seconds: float) -> None:
    faulthandler.dump_traceback(all_threads=True)
    print(
        f"{name} did not start within {seconds:.0f} s (rollout.start_timeout_s): its process ends",
        file=sys.stderr,
        flush=True,
    )
    os._exit(1)


def build_engine(
    name: str, model: ModelSpec, config: Any, context: RankContext, logs: str | None = None
) -> RolloutEngine:
    """Not started yet. logs: the folder for the log of an engine in a process of its own."""
    engine_class: type[RolloutEngine] = registry().get("rollout_engine", name)
    return engine_class.build(model, config, context, logs)
