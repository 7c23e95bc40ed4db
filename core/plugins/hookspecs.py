"""The hooks of hybridflow: one to register plugins, three to watch a run. Nothing per micro-batch goes through a hook.

A plugin module marks its functions with `hookimpl` and takes the arguments that it wants, by name:

    from hybridflow.core.plugins import Descriptor, hookimpl

    @hookimpl
    def hybridflow_plugins():
        return [Descriptor("reward", "length", "acme.length:LengthReward")]

Hooks are called on the controller. docs/plugins.md has a page for each, tests/core/plugins/test_registry.py a test.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    from hybridflow.core.plugins.descriptor import Descriptor

PROJECT = "hybridflow"
"""The name of the pluggy project, and of the entry-point group."""

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)
"""Marks a function as the implementation of the hook of that name."""


@hookspec
def hybridflow_plugins() -> list[Descriptor]:  # type: ignore[empty-body]
    """The plugins of this package. Called once, when plugins are listed: import nothing heavy here."""


@hookspec
def hybridflow_step_end(run: Any, step: int, metrics: Mapping[str, float]) -> None:
    """A step of the algorithm is over: data drawn, models updated, weights on their way to the engine.

    `run` is the run as the controller knows it (read it, change nothing), `step` counts from 1, `metrics` are those of
    the step. The next step waits for this call.
    """


@hookspec
def hybridflow_checkpoint(run: Any, step: int, folder: Path) -> None:
    """A checkpoint of `step` is complete in `folder`: every file is there and it can be resumed from."""


@hookspec
def hybridflow_metrics(run: Any, step: int, metrics: Mapping[str, float]) -> None:
    """Metrics were logged, by name, as trackers get them: those of a step and those of a validation."""
