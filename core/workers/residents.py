"""Which roles of a process have their weights and optimizer on the device they share.

Roles with `offload` leave only when somebody else works, so what one role does in a row moves
once:

    actor   generate     everybody leaves, the engine takes its caches
    ref     logprobs     ref's weights come
    actor   logprobs     ref leaves, the actor's weights come
    actor   update       the optimizer comes too
    actor   update       nothing moves
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from hybridflow.core.contracts.training import PARTS, TrainingBackend


@attrs.define(eq=False)
class Residents:
    """The backends of one process that move away, by role. One per process."""

    backends: dict[str, TrainingBackend] = attrs.field(factory=dict)
    present: dict[str, set[str]] = attrs.field(factory=dict)
    """Role -> its parts that are on the device."""

    def join(self, role: str, backend: TrainingBackend) -> None:
        """Let a built backend move from now on; it leaves the device."""
        # It was built on the device.
        self.backends[role] = backend
        self.present[role] = set(PARTS)
        self._leave(role, PARTS)

    def part(self, role: str) -> None:
        """Forget a role, whose worker is closed."""
        self.backends.pop(role, None)
        self.present.pop(role, None)

    def enter(self, role: str, parts: Sequence[str], alone: bool = False) -> None:
        """Make room for a role, and bring its parts; any role may enter.

        alone: its other parts leave, where memory is needed besides.
        """
        # Everybody else gives way, and what this role does not need.
        for other in self.backends:
            if other != role:
                self._leave(other, PARTS)
        if role not in self.backends:
            return
        if alone:
            self._leave(role, [part for part in PARTS if part not in parts])

        # What is there already does not move.
        lacking = [part for part in parts if part not in self.present[role]]
        if lacking:
            self.backends[role].onload(lacking)
            self.present[role].update(lacking)

    def clear(self) -> None:
        """Let everybody leave, so that an engine may take the device."""
        for role in self.backends:
            self._leave(role, PARTS)

    def _leave(self, role: str, parts: Sequence[str]) -> None:
        leaving = [part for part in parts if part in self.present[role]]
        if leaving:
            self.backends[role].offload(leaving)
            self.present[role].difference_update(leaving)
