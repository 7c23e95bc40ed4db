"""The hooks of hybridflow: one registers plugins, and four observe a run.

A plugin module marks its functions with `hookimpl` and takes the arguments that it wants, by name:

    from hybridflow.core.plugins import Descriptor, hookimpl

    @hookimpl
    def hybridflow_plugins():
        return [Descriptor("reward", "length", "acme.length:LengthReward")]

Hooks are called on the controller, never for a micro-batch. docs/plugins.md has a page for each of
them, and tests/core/plugins/test_lookup.py a test.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    from hybridflow.core.contracts.observer import Observer
    from hybridflow.core.plugins.descriptor import Descriptor

PROJECT = "hybridflow"
"""Name of the pluggy project, and of the entry-point group."""

# Each hook is a function below; an implementation may take any of its parameters.
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)
"""Marks a function as the implementation of the hook of its name."""


@hookspec
def hybridflow_plugins() -> list[Descriptor]:  # type: ignore[empty-body]
    """List the plugins of a package.

    It is called once, when plugins are listed: import nothing slow here.
    """


@hookspec
def hybridflow_observers(job: Any) -> list[Observer]:  # type: ignore[empty-body]
    """Make the observers of a run of this job, which see its samples and times too.

    It is called once for each start of a job, before any process is started.
    """


@hookspec
def hybridflow_step_end(run: Any, step: int, metrics: Mapping[str, float]) -> None:
    """A step of the algorithm has ended: models are updated; engines follow at the next generate.

    With run.max_staleness engines have the new weights, and the next step is generated already.

    `run` is the controller's run, to be read but not changed. `step` counts from 1, and `metrics`
    are those of the step, by name. The next step waits for this call.
    """


@hookspec
def hybridflow_checkpoint(run: Any, step: int, folder: Path) -> None:
    """A checkpoint of `step` is complete in `folder`, and a run can resume from it."""


@hookspec
def hybridflow_metrics(run: Any, step: int, metrics: Mapping[str, float]) -> None:
    """Metrics of a step or of a validation were logged: the same, by name, as trackers get."""
