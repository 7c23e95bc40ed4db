"""The child of process.py: rehearses one role, and writes a line of JSON for each phase."""

from __future__ import annotations

import json
import pickle
import sys
from pathlib import Path
from typing import Any

import attrs

from hybridflow.core.plugins import registry
from hybridflow.kit.fakes.device import NAME
from hybridflow.kit.fakes.folder import write_hollow_folder
from hybridflow.kit.fakes.process import SAID, Asked
from hybridflow.kit.fakes.rehearsal import MicroBatches, rehearsed


def main(request: Path) -> None:
    """Rehearse the role of the request file, and write each phase when it has ended."""
    # The file comes from this process's own parent.
    asked: Asked = pickle.loads(request.read_bytes())

    # Only the config is needed, so that models without weights on this machine can be rehearsed.
    folder = write_hollow_folder(request.parent / "model", asked.model.hf_config)
    spec = attrs.evolve(asked.model, path=str(folder))
    backend_class = registry().get("training_backend", asked.backend)
    place = (asked.optimizer, asked.layout)
    with rehearsed(backend_class, spec, asked.config, *place) as run:
        _say(run, "build")
        if asked.update is not None:
            rows = MicroBatches(**asked.update)

            # The optimizer's state exists from the first update on, however small.
            run.update("first", MicroBatches(rows=1, tokens=8))
            run.phases["rest"] = run.phases["first: step"]
            _say(run, "rest")
        # A pass beside the optimizer, as in a step.
        if asked.forward is not None:
            run.forward("forward", MicroBatches(**asked.forward))
            _say(run, "forward")
        if asked.update is not None:
            run.update("update", rows)
            _say(run, "update")
            run.phases["step"] = run.phases["update: step"]
            _say(run, "step")
        # Beside other roles.
        if asked.offload:
            run.offload("away")
            _say(run, "away")

        # A backend that holds its weights elsewhere is not counted correctly.
        if NAME not in run.result().devices:
            found = ", ".join(sorted(run.result().devices))
            _say_line("elsewhere", {"devices": found})


def _say(run: Any, name: str) -> None:
    _say_line(name, attrs.asdict(run.phases[name]))


def _say_line(name: str, fields: dict[str, Any]) -> None:
    print(SAID + json.dumps([name, fields]), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
