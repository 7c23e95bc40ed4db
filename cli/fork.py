"""`hybridflow fork`: a run that begins at a checkpoint of another one."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any

from hybridflow.cli.statuses import STOPPED
from hybridflow.core.contracts.command import Command
from hybridflow.core.errors import ConfigError
from hybridflow.core.running.checkpoint import Checkpoints
from hybridflow.core.values.files import BESIDE, CHECKPOINTS, CONFIG, FORK, MARK
from hybridflow.core.values.sealed import read_sealed, write_sealed
from hybridflow.settle.config.load import import_from, read_config
from hybridflow.settle.config.waiting import wait_briefly


class ForkCommand(Command):
    """A plugin of kind "command", name "fork"."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("run", type=Path, help="the folder of a run, or of its stage")
        parser.add_argument(
            "--step", type=int, required=True, help="the step whose checkpoint it begins at"
        )
        parser.add_argument(
            "overrides",
            nargs="*",
            default=[],
            metavar="key=value",
            help="settings that differ from the run's, for example actor.optimizer.lr=1e-5",
        )

    def run(self, arguments: argparse.Namespace) -> int:
        """Run the fork to its end; the same command resumes a fork that was interrupted.

        Status 0 when it has finished, STOPPED when it was told to stop.
        """
        source = arguments.run
        tables = _tables(source, arguments.step)
        merged, _ = read_config(tables, arguments.overrides)
        wait_briefly(merged)  # before torch is imported
        from hybridflow.settle.launch import load_config, run
        from hybridflow.settle.stages import located_model

        checkpoints = Checkpoints(source / CHECKPOINTS, 1)
        steps = checkpoints.steps()
        if arguments.step not in steps:
            kept = ", ".join(map(str, steps)) or "none"
            raise ConfigError(
                f"--step {arguments.step}: {source} has no checkpoint of it (kept steps: {kept}); "
                "run.keep_checkpoints keeps more"
            )

        # Paths to models of earlier stages are resolved from the run's folder.
        for role, table in tables.items():
            if isinstance(table, dict) and isinstance(table.get("model"), dict):
                table["model"] = located_model(table["model"], source, role)
        [job] = load_config(tables, arguments.overrides)
        if job.run.steps <= arguments.step:
            raise ConfigError(
                f"run.steps: is {job.run.steps}, and the fork begins after step {arguments.step}; "
                "give more"
            )
        _begin(job.folder, checkpoints.path(arguments.step), source, arguments.step)
        outcome = run(tables, arguments.overrides, resume=True)
        return 0 if outcome.state == "finished" else STOPPED


def _tables(source: Path, step: int) -> dict[str, Any]:
    """Return the tables of a run's config, with a name of its own for the fork."""
    mark = source / MARK
    if not mark.is_file():
        raise ConfigError(
            f"{source}: is not the folder of a run (it has no {MARK}); of a run with stages "
            "give the stage's, such as runs/arithmetic/grpo"
        )
    written = read_sealed(mark)
    if beside := written.get(BESIDE):
        import_from(beside)  # the run's rewards, say
    tables: dict[str, Any] = written[CONFIG]
    own = tables.get("run", {})
    name = f"{source.name}-from-{step}"
    tables["run"] = {**own, "folder": str(source.parent), "name": name}
    return tables


def _begin(folder: Path, checkpoint: Path, source: Path, step: int) -> None:
    """Copy the checkpoint into the fork's folder, unless the fork has begun before.

    Raises ConfigError where the folder has another run.
    """
    origin = {"run": str(source.resolve()), "step": step}
    file = folder / FORK
    ours = file.is_file() and read_sealed(file) == origin
    if not ours and folder.exists() and any(folder.iterdir()):
        raise ConfigError(
            f"{folder}: is there already, and no fork of {source} at step {step}; give this one a "
            "name of its own (run.name=...)"
        )
    folder.mkdir(parents=True, exist_ok=True)
    write_sealed(file, origin)

    # A run that has begun has checkpoints of its own; a copy in part is made again.
    target = folder / CHECKPOINTS
    if any(target.glob("step-*")):
        return
    partial = target / f"partial-{checkpoint.name}"
    shutil.rmtree(partial, ignore_errors=True)
    shutil.copytree(checkpoint, partial)
    partial.rename(target / checkpoint.name)
