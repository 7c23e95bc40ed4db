"""The connection of a replica's later ranks to the engine's process, which the first rank owns."""

from __future__ import annotations

from multiprocessing.connection import Client
from typing import Any

from hybridflow.core.errors import HybridFlowError
from hybridflow.kit.hosting.process import EngineDied


class Follower:
    """A socket by which a later rank of a replica sends its messages to the engine's process."""

    def __init__(self, address: str, key: bytes):
        """Connect. Raises EngineDied where the process does not listen any more."""
        try:
            self.connection = Client(address, authkey=key)
        except (OSError, EOFError) as error:
            raise EngineDied(f"the process of the rollout engine is gone ({error})") from error

    def ask(self, name: str, *arguments: Any, timeout_s: float) -> Any:
        """Send a message and return the answer.

        Raises EngineDied when the process ends, or is silent for `timeout_s`, and the
        HybridFlowError with which it answered.
        """
        try:
            self.connection.send((name, *arguments))
            if not self.connection.poll(timeout_s):
                raise EngineDied(
                    f"the process of the rollout engine gave no answer to {name} within "
                    f"{timeout_s:.0f} s"
                )
            _, value = self.connection.recv()
        except (OSError, EOFError) as error:
            raise EngineDied(f"the process of the rollout engine is gone ({error})") from error
        if isinstance(value, HybridFlowError):
            raise value
        return value

    def close(self) -> None:
        """Close the connection; safe to call twice."""
        self.connection.close()
