"""Moves the weights and optimizers of a process's roles on and off the device that they share.

Roles with `offload` leave the device only when another role works, so that successive calls of one
role move its parts once:

    actor   generate     all roles leave, the engine allocates its caches
    ref     logprobs     ref's weights are loaded
    actor   logprobs     ref leaves, the actor's weights are loaded
    actor   update       the optimizer is loaded too
    actor   update       nothing moves
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from hybridflow.core.contracts.training import PARTS, TrainingBackend


@attrs.define(eq=False)
class Residents:
    """The backends of one process that are offloaded, by role. One object per process."""

    backends: dict[str, TrainingBackend] = attrs.field(factory=dict)
    present: dict[str, set[str]] = attrs.field(factory=dict)
    """Role -> its parts that are on the device."""

    def join(self, role: str, backend: TrainingBackend) -> None:
        """Add a backend that has just been built on the device, and offload it."""
        # All of its parts are on the device.
        self.backends[role] = backend
        self.present[role] = set(PARTS)
        self._leave(role, PARTS)

    def part(self, role: str) -> None:
        """Remove a role, whose worker is closed."""
        self.backends.pop(role, None)
        self.present.pop(role, None)

    def enter(self, role: str, parts: Sequence[str], alone: bool = False) -> None:
        """Offload the other roles, and load these parts of a role if it is offloaded itself.

        alone: the role's other parts are offloaded, as the call needs more memory.
        """
        # The other roles leave the device, then the parts that this role does not need.
        for other in self.backends:
            if other != role:
                self._leave(other, PARTS)
        if role not in self.backends:
            return
        if alone:
            self._leave(role, [part for part in PARTS if part not in parts])

        # Parts that are on the device already do not move.
        lacking = [part for part in parts if part not in self.present[role]]
        if lacking:
            self.backends[role].onload(lacking)
            self.present[role].update(lacking)

    def clear(self) -> None:
        """Offload all roles, so that an engine may use the device."""
        for role in self.backends:
            self._leave(role, PARTS)

    def _leave(self, role: str, parts: Sequence[str]) -> None:
        leaving = [part for part in parts if part in self.present[role]]
        if leaving:
            self.backends[role].offload(leaving)
            self.present[role].difference_update(leaving)
