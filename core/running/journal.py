"""What a run has generated, in files from which it can be trained again without engines.

With run.journal a run's folder has

    journal/
      step-00000012.json     the calls of `generate` of the step, in order: role and checksums
      step-00000012-0.npz    what the first of them has returned, about 12 bytes a token

of every step that has ended. A run with run.replay draws its prompts as that one did, and gets the
responses to them from these files.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import attrs

from hybridflow.core.context import Generated
from hybridflow.core.errors import DamagedError, HybridFlowError
from hybridflow.core.groups.group import WorkerGroup
from hybridflow.core.values.batch import Batch
from hybridflow.core.values.files import JOURNAL
from hybridflow.core.values.sealed import flush_file, read_sealed, write_sealed
from hybridflow.core.workers.tasks import drawn

PREFIX, SUFFIX = "step-", ".json"


@attrs.frozen
class Journal:
    """The journal in a run's folder."""

    run: Path
    """The run's folder."""

    @property
    def folder(self) -> Path:
        """The folder of its files."""
        return self.run / JOURNAL

    def steps(self) -> list[int]:
        """Return the steps that it has, in order."""
        found = []
        for file in self.folder.glob(f"{PREFIX}*{SUFFIX}"):
            digits = file.name.removeprefix(PREFIX).removesuffix(SUFFIX)
            if digits.isdigit():
                found.append(int(digits))
        return sorted(found)

    def whole(self) -> int:
        """Return up to which step it has every one, from the first on."""
        steps = set(self.steps())
        return next(step for step in range(len(steps) + 1) if step + 1 not in steps)

    def begin(self, step: int) -> None:
        """Forget the steps after this one, from which the run goes on."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for later in self.steps():
            if later > step:
                self._file(later).unlink()
                for file in self.folder.glob(f"{self._file(later).stem}-*.npz"):
                    file.unlink()

    def write(self, step: int, calls: Sequence[Generated], data: WorkerGroup) -> None:
        """Write what a step has generated; data: the worker that writes it.

        Raises HybridFlowError for rows that cannot be written.
        """
        writes = []
        for number, call in enumerate(calls):
            rows = drawn(call.prompts).join(*call.added)
            writes.append(data.journal(rows, self.rows(step, number)))
        fields = []
        for number, (call, written) in enumerate(zip(calls, writes, strict=True)):
            rows_sum, prompts_sum = written.result()
            flush_file(Path(self.rows(step, number)))
            fields.append({"role": call.role, "rows": rows_sum, "prompts": prompts_sum})
        # The step is in the journal with this file, after all others have reached the disk.
        write_sealed(self._file(step), {"calls": fields})

    def calls(self, step: int) -> list[dict[str, str]]:
        """Return role and checksums of each call of a step. Raises DamagedError."""
        calls: list[dict[str, str]] = read_sealed(self._file(step))["calls"]
        return calls

    def rows(self, step: int, number: int) -> str:
        """Return the path of the file of a step's call."""
        return str(self._file(step).absolute().with_suffix("")) + f"-{number}.npz"

    def _file(self, step: int) -> Path:
        return self.folder / f"{PREFIX}{step:08d}{SUFFIX}"


@attrs.frozen
class Replay:
    """Responses from the journal of another run, in the place of engines."""

    journal: Journal
    data: WorkerGroup

    def __call__(self, step: int, number: int, role: str, prompts: Batch) -> Batch:
        """Return what that run's `generate` call number `number` of a step has returned.

        Raises HybridFlowError where it made no such call, or made it for other prompts.
        """
        try:
            calls = self.journal.calls(step)
        except DamagedError as error:
            raise HybridFlowError(f"run.replay: {error}") from error
        if number >= len(calls) or calls[number]["role"] != role:
            did = ", ".join(f"{call['role']}.generate" for call in calls) or "none"
            raise HybridFlowError(
                f"run.replay: step {step} makes call {number + 1} of generate, by {role}, and the "
                f"run in {self.journal.run} made these: {did}; what an algorithm generates, and "
                "the scores that decide about that, must be those of that run"
            )
        sums = (calls[number]["rows"], calls[number]["prompts"])
        rows: Batch = self.data.replay(prompts, self.journal.rows(step, number), *sums)
        return rows
