"""Programs that attack the sandbox: none gets at what is not its own, and each ends within its limits."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

from helpers.attacks import attacks
from helpers.canaries import canaries
from helpers.waiting import eventually

from campaign.cases import Result
from hybridflow.kit.sandbox import jail, process
from hybridflow.kit.sandbox.programs import run_program

BATCH = 25


class Programs:
    """A case is 25 of the attacks; an item is the name of one."""

    name = "programs"

    def draw(self, draws: random.Random) -> list[str]:
        names = [attack.name for attack in attacks(dict.fromkeys(NAMES, ""))]
        return draws.sample(names, BATCH)

    def do(self, items: Sequence[str], folder: Path) -> Result:
        result = Result()
        with canaries(folder) as canary:
            every = {attack.name: attack for attack in attacks(canary)}
            for name in items:
                attack = every[name]
                outcome = run_program(attack.program, "", attack.limits)
                result.counts["programs"] += 1
                if not attack.right(outcome):
                    result.problem(f"{name}: {outcome}")
            eventually(lambda: not [one for idle in process._idle for one in jail.below(idle.pid)])
        return result


NAMES = ("secret", "file", "folder", "variable", "process", "port", "abstract", "socket")
"""What `canaries` has."""
