"""Mazes that a small model learns to leave, a step a turn: see maze.toml."""

from __future__ import annotations

import numpy as np

from hybridflow.core.contracts.environment import Answer, Environment, Start, Turn

STEPS = {"n": (0, -1), "e": (1, 0), "s": (0, 1), "w": (-1, 0)}
"""Move -> the change of (x, y); y counts from the north."""


class Maze(Environment):
    """A maze of size x size rooms, drawn by the row's `seed`; the model starts in one and looks for the exit in another.

    It hears which sides of its room are open and where the exit lies, as in `NW>SE:`, and answers with a move (n, e, s, w) that
    ends its turn. The reward is 1 at the exit. Into a wall, or with other letters, it stays where it is.
    """

    stops = tuple(STEPS)

    def __init__(self, size: int = 3, passages: int = 2):
        """passages: number of walls that are taken away from a maze in which one path leads from each room to each."""
        self.size = size
        self.passages = passages

    def reset(self, start: Start) -> Answer:
        self.draw(np.random.default_rng(start.meta["seed"]))
        return self.look()

    def draw(self, random: np.random.Generator) -> None:
        """Draw the passages, by random walks that join each room to those before (Aldous, Broder), and two rooms."""
        rooms = [(x, y) for x in range(self.size) for y in range(self.size)]
        self.open: set[frozenset[tuple[int, int]]] = set()
        at = rooms[0]
        joined = {at}
        while len(joined) < len(rooms):
            to = self.beside(at, str(random.choice(list(STEPS))))
            if to in rooms and to not in joined:
                self.open.add(frozenset((at, to)))
                joined.add(to)
            at = to if to in rooms else at

        walls = [frozenset((room, self.beside(room, step))) for room in rooms for step in "es"]
        walls = [wall for wall in walls if wall not in self.open and wall <= set(rooms)]
        self.open.update(
            walls[number] for number in random.permutation(len(walls))[: self.passages]
        )
        first, last = random.choice(len(rooms), 2, replace=False)
        self.at, self.exit = rooms[first], rooms[last]

    @staticmethod
    def beside(room: tuple[int, int], step: str) -> tuple[int, int]:
        return room[0] + STEPS[step][0], room[1] + STEPS[step][1]

    def look(self, reward: float = 0.0) -> Answer:
        sides = [
            step for step in STEPS if frozenset((self.at, self.beside(self.at, step))) in self.open
        ]
        east, south = self.exit[0] - self.at[0], self.exit[1] - self.at[1]
        towards = "S" * (south > 0) + "N" * (south < 0) + "E" * (east > 0) + "W" * (east < 0)
        said = f"{''.join(sides).upper()}>{towards}:"
        return Answer(said, reward, state=f"{self.at}")

    def step(self, turn: Turn) -> Answer:
        to = self.beside(self.at, turn.text) if turn.text in STEPS else self.at
        if frozenset((self.at, to)) in self.open:
            self.at = to
        if self.at == self.exit:
            return Answer(reward=1.0, done=True)
        return self.look()
