"""Errors that a user reads: what happened, what was got, what to do."""

from __future__ import annotations


class HybridFlowError(Exception):
    """Base of every error that hybridflow raises on purpose."""


class ConfigError(HybridFlowError):
    """One or more problems of a configuration, all reported at once."""

    def __init__(self, problems: list[str] | str):
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        count = len(self.problems)
        head = (
            "the configuration has a problem"
            if count == 1
            else f"the configuration has {count} problems"
        )
        super().__init__(head + ":\n" + "\n".join(f"  - {p}" for p in self.problems))

    def __reduce__(self):
        return type(self), (self.problems,)


class PluginError(HybridFlowError):
    """A plugin is unknown, broken, a duplicate, or lacks what it needs."""


class DataError(HybridFlowError):
    """A data set is missing, empty or has rows that cannot be used."""


class ModelError(HybridFlowError):
    """A model or its tokenizer is missing or does not fit."""


class RewardError(HybridFlowError):
    """A reward raised, or returned something that is not a finite number."""


class EnvironmentFailure(HybridFlowError):
    """An environment raised, or returned something that is not an Answer to go on with."""


class CheckpointError(HybridFlowError):
    """A checkpoint cannot be written or read; the previous one is untouched."""


class WorkerError(HybridFlowError):
    """A worker failed: carries where (rank, role, phase) and the worker's own traceback."""

    def __init__(
        self, message: str, *, role: str, phase: str, rank: int | None, remote_traceback: str = ""
    ):
        self.message, self.role, self.phase, self.rank = message, role, phase, rank
        self.remote_traceback = remote_traceback
        where = f"role {role!r}, phase {phase!r}" + ("" if rank is None else f", rank {rank}")
        text = f"{message} [{where}]"
        super().__init__(
            text
            + (f"\n--- traceback of the worker ---\n{remote_traceback}" if remote_traceback else "")
        )

    def __reduce__(self):
        args = dict(
            role=self.role, phase=self.phase, rank=self.rank, remote_traceback=self.remote_traceback
        )
        return _rebuild_worker_error, (type(self), self.message, args)


class WorkerDied(WorkerError):
    """The process of a worker is gone (killed, out of memory, crashed)."""


def _rebuild_worker_error(cls, message, args):
    return cls(message, **args)
