"""A role's rehearsal in a process of its own: a fake device is registered for a whole process.

    for name, phase in rehearse(Asked(...)):      # as each phase ends
        ...

The child gets a file with the request, and writes a line of JSON for each phase. Its model has
zeros for weights, and takes no space on disk.

    build -> rest (an update has been) -> forward -> update -> step -> away
"""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs

from hybridflow.core.contracts.training import OptimizerConfig
from hybridflow.core.errors import HybridFlowError
from hybridflow.core.values.model import ModelSpec
from hybridflow.core.values.parallel import ParallelLayout

SAID = "rehearsed: "
"""Prefix of the lines that the child writes for its parent."""


class NotRehearsed(HybridFlowError):
    """A backend does not run on the fake device; the message says why."""


@attrs.frozen(kw_only=True)
class Asked:
    """A role to rehearse, on one rank of its layout."""

    backend: str
    """Name of a plugin of kind "training_backend"."""
    config: Any
    model: ModelSpec
    optimizer: OptimizerConfig | None
    """Settings of the optimizer; None: the role is not trained."""
    layout: ParallelLayout
    forward: dict[str, int] | None = None
    """Fields of the forward pass's Rows; None: no forward pass is rehearsed."""
    update: dict[str, int] | None = None
    """Fields of the update's Rows."""
    offload: bool = False
    """Whether the model is offloaded at the end."""


def rehearse(asked: Asked) -> Iterator[tuple[str, dict[str, int]]]:
    """Yield (phase, fields of its Phase) as each ends; with `wrong_device` if it ran elsewhere.

    Raises NotRehearsed with the child's error.
    """
    with tempfile.TemporaryDirectory() as folder:
        request = Path(folder) / "asked"
        request.write_bytes(pickle.dumps(asked))
        errors = Path(folder) / "errors"
        # The output of libraries goes into a file: a full pipe would block the child.
        with open(errors, "w") as log:
            child = subprocess.Popen(
                [sys.executable, "-m", "hybridflow.kit.fakes.child", str(request)],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        # Phases come as lines, beside whatever else the child prints.
        assert child.stdout is not None
        try:
            for line in child.stdout:
                if line.startswith(SAID):
                    name, phase = json.loads(line.removeprefix(SAID))
                    yield name, phase
            status = child.wait()
        finally:
            # The child is ended if the caller reads no further.
            if child.poll() is None:
                child.kill()
                child.wait()
        # The last line of a traceback is the error.
        if status:
            lines = [line for line in errors.read_text().splitlines() if line.strip()]
            reason = lines[-1] if lines else "it said nothing"
            raise NotRehearsed(
                f"the backend {asked.backend} does not run on a GPU that is not there "
                f"(exit status {status}): {reason}"
            )
