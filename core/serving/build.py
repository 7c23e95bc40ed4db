"""An engine by its plugin's name, in the worker's process or in one of its own."""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
from typing import Any

from hybridflow.core.model import ModelSpec
from hybridflow.core.plugins import registry
from hybridflow.core.rollout import RolloutEngine
from hybridflow.core.serving.hosted import HostedEngine
from hybridflow.core.worker import RankContext

OWN_PROCESS = "process"
"""Capability of rollout engines: "shared" (the default), "own", or "either": then the config's `own_process` says."""


def own_process(name: str, config: Any) -> bool:
    kind = registry().descriptor("rollout_engine", name).capabilities.get(OWN_PROCESS, "shared")
    return kind == "own" or (kind == "either" and bool(getattr(config, "own_process", False)))


def start_engine(engine: RolloutEngine) -> None:
    """Start it, here or in its own process, within its config's `start_timeout_s`.

    Nothing can stop a library that hangs in this process: the stacks are printed, and the process ends.
    """
    seconds = getattr(engine.config, "start_timeout_s", None)
    if isinstance(engine, HostedEngine) or seconds is None:
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
    if own_process(name, config):
        return HostedEngine(engine_class, model, config, context, logs)
    return engine_class(model, config, context)
