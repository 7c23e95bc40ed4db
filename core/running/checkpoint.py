"""Checkpoints: written beside the others, complete or not there at all; the newest few are kept."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from hybridflow.core.errors import CheckpointError

PREFIX = "step-"
FORMAT = 2
"""Of state.json and of what lies beside it; checkpoints of another format are not read."""


class Checkpoints:
    """The checkpoints of a run, in `folder`."""

    def __init__(self, folder: Path, keep: int):
        self.folder, self.keep = folder, keep

    def steps(self) -> list[int]:
        """Steps with a complete checkpoint, in order."""
        if not self.folder.is_dir():
            return []
        names = [
            p.name
            for p in self.folder.iterdir()
            if p.name.startswith(PREFIX) and (p / "state.json").is_file()
        ]
        return sorted(
            int(n.removeprefix(PREFIX)) for n in names if n.removeprefix(PREFIX).isdigit()
        )

    def path(self, step: int) -> Path:
        return self.folder / f"{PREFIX}{step:08d}"

    def write(self, step: int, state: dict[str, Any], save: Any) -> Path:
        """`save(folder)` writes the models. Whatever fails, what was there before stays as it was.

        Raises CheckpointError with the cause (a full disk, say).
        """
        final = self.path(step)
        partial = final.with_name(f"partial-{final.name}")
        try:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            save(partial)
            with open(partial / "state.json", "w") as file:
                json.dump({"format": FORMAT, **state}, file)
                file.flush()
                os.fsync(file.fileno())
            if final.exists():
                shutil.rmtree(final)
            partial.rename(final)
        except Exception as error:
            shutil.rmtree(partial, ignore_errors=True)
            last = self.steps()
            kept = (
                f"the checkpoint of step {last[-1]} is whole" if last else "there is no earlier one"
            )
            raise CheckpointError(
                f"the checkpoint of step {step} could not be written to {self.folder}: {error}; {kept}. Free disk space or "
                "change run.folder, and go on with --resume"
            ) from error
        for old in self.steps()[: -self.keep]:
            shutil.rmtree(self.path(old), ignore_errors=True)
        return final

    def read(self, step: int) -> dict[str, Any]:
        """What `write` was given. Raises CheckpointError for a file that cannot be read, and for another format."""
        try:
            state = json.loads((self.path(step) / "state.json").read_text())
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"the checkpoint {self.path(step)} cannot be read: {error}"
            ) from error
        found = state.get("format") if isinstance(state, dict) else None
        if found != FORMAT:
            written = "an older" if found is None else "another"
            raise CheckpointError(
                f"the checkpoint {self.path(step)} was written by {written} hybridflow (format {found}, this one reads "
                f"{FORMAT}); go on with the version that run.json names, or begin anew with --overwrite"
            )
        return state
