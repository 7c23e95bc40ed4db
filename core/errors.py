"""Errors for users. Their messages have the problem, the actual value and the remedy."""

from __future__ import annotations


class HybridFlowError(Exception):
    """Base of every error that hybridflow raises on purpose."""


class ConfigError(HybridFlowError):
    """One or more problems of a configuration, all reported at once."""

    def __init__(self, problems: list[str] | str):
        self.problems = [problems] if isinstance(problems, str) else list(problems)

        count = len(self.problems)
        number = "a problem" if count == 1 else f"{count} problems"
        lines = [f"the configuration has {number}:", *(f"  - {text}" for text in self.problems)]
        super().__init__("\n".join(lines))

    def __reduce__(self):
        return type(self), (self.problems,)


class PluginError(HybridFlowError):
    """A plugin is unknown, broken, claimed twice, or lacks what it needs."""


class DataError(HybridFlowError):
    """A data set is missing, empty or has rows that cannot be used."""


class ModelError(HybridFlowError):
    """A model or its tokenizer is missing or does not fit."""


class RewardError(HybridFlowError):
    """A reward raised, or returned something that is not a finite number."""


class EnvironmentFailure(HybridFlowError):
    """An environment raised, or returned something that is not a valid Answer."""


class CheckpointError(HybridFlowError):
    """A checkpoint cannot be written or read; the previous one is untouched."""


class DamagedError(CheckpointError):
    """A file of a run or a checkpoint is not as it was written; an older one may be complete."""


class WorkerError(HybridFlowError):
    """A worker failed.

    The error carries the place (rank, role, phase) and the worker's own traceback as text.
    """

    def __init__(
        self, message: str, *, role: str, phase: str, rank: int | None, remote_traceback: str = ""
    ):
        self.message = message
        self.role = role
        self.phase = phase
        self.rank = rank
        self.remote_traceback = remote_traceback

        where = f"role {role!r}, phase {phase!r}" + ("" if rank is None else f", rank {rank}")
        text = f"{message} [{where}]"
        if remote_traceback:
            text += f"\n--- traceback of the worker ---\n{remote_traceback}"
        super().__init__(text)

    # An exception is pickled as its class and its positional arguments, and this one's are named.
    def __reduce__(self):
        fields = dict(
            role=self.role, phase=self.phase, rank=self.rank, remote_traceback=self.remote_traceback
        )
        return _rebuild_worker_error, (type(self), self.message, fields)


class MismatchError(WorkerError):
    """An engine's logprobs are not those of the trainer, so its tokens were not trained on."""


class WorkerDied(WorkerError):
    """The process of a worker has ended (killed, out of memory, crashed)."""


class HangError(HybridFlowError):
    """A process of the run has stood still for longer than run.patience_s."""


class DamagedPartError(WorkerError, DamagedError):
    """A worker found its part of a checkpoint damaged."""


def _rebuild_worker_error(cls, message, fields):
    """Return a WorkerError from its pickled parts."""
    return cls(message, **fields)
