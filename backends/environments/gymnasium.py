"""Environment "gymnasium": a world of Gymnasium, whose observations and actions are texts here.

https://gymnasium.farama.org
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Discrete, Space, Text

from hybridflow.core.contracts.environment import Answer, Environment, Start, Turn
from hybridflow.core.errors import ConfigError
from hybridflow.core.names import did_you_mean

_HIGHLIGHTED = re.compile(r"\x1b\[(?:\d+;)*4[0-7]m(.*?)\x1b\[0m", re.DOTALL)
"""Characters with a coloured background, by which worlds of text mark where the player is."""
_COLOUR = re.compile(r"\x1b\[[\d;]*m")


class Gymnasium(Environment):
    """An episode of a registered world, whose actions are Discrete or Text.

    The model's action is the last of the actions' names that its turn contains, in any case of
    letters. A turn without one changes nothing: it gets `invalid_reward` and the observation again.
    The world begins by the row's field `seed` where it has one, else by the sequence's own seed.
    """

    def __init__(
        self,
        id: str,
        actions: Sequence[str] = (),
        settings: Mapping[str, Any] | None = None,
        observe: str = "value",
        opening: str = "{observation}",
        answer: str = "{observation}",
        invalid_reward: float = 0.0,
        single_tokens: bool = False,
    ):
        """Only checks the options; the world is made when the episode begins.

        id: name of a registered world, as gymnasium.make takes it ("module:Name-v0" imports it).
        actions: their names, in the order of their numbers. A world whose actions are Text has
            none: the turn's text is its action.
        settings: further keyword arguments of gymnasium.make.
        observe: "value", the observation with commas between its numbers, or "ansi", the world
            as it draws itself, with brackets around what it highlights.
        opening, answer: the texts before the first and after each other turn, of {observation}
            and {reward}.
        invalid_reward: reward of a turn without an action.
        single_tokens: whether a turn ends with the first name of an action, a token of its own.
        """
        self.id = id
        self.settings = dict(settings or {})
        self.observe = observe
        self.texts = {"opening": opening, "answer": answer}
        self.invalid_reward = invalid_reward
        self.names = [name.lower() for name in actions]
        if single_tokens:
            self.stops = tuple(actions)
        self._check(actions)
        # Longer names first, so that "north" is not found in "northeast".
        longest = sorted(self.names, key=len, reverse=True)
        self._name = re.compile("|".join(map(re.escape, longest)))
        self._world: Any = None
        self._seen: Any = None

    def _check(self, actions: Sequence[str]) -> None:
        """Raise ConfigError with all problems of the options."""
        problems = []
        name = self.id.rpartition(":")[2]
        if ":" not in self.id and name not in gymnasium.registry:
            hint = did_you_mean(name, gymnasium.registry)
            problems.append(f"id: Gymnasium has no world {name!r}{hint}")
        if "" in actions or len(set(self.names)) < len(self.names):
            problems.append(f"actions are {list(actions)}; they must be different names")
        if self.observe not in ("value", "ansi"):
            problems.append(f'observe is {self.observe!r}; it must be "value" or "ansi"')
        for option, text in self.texts.items():
            try:
                text.format(observation="", reward=0.0)
            except (KeyError, IndexError, ValueError) as error:
                problems.append(
                    f"{option} is {text!r}, which cannot be filled in "
                    f"({type(error).__name__}: {error}); fields are {{observation}} and {{reward}}"
                )
        if problems:
            raise ConfigError([f"option {problem}" for problem in problems])

    def reset(self, start: Start) -> Answer:
        drawn: dict[str, Any] = {"render_mode": "ansi"} if self.observe == "ansi" else {}
        self._world = gymnasium.make(self.id, **drawn, **self.settings)
        self._check_actions(self._world.action_space)
        self._seen, _ = self._world.reset(seed=int(start.meta.get("seed", start.seed)))
        return self._said("opening", 0.0)

    def step(self, turn: Turn) -> Answer:
        action = self._action(turn.text)
        if action is None:
            return self._said("answer", self.invalid_reward)
        self._seen, reward, terminated, truncated, _ = self._world.step(action)
        if terminated or truncated:
            return Answer(reward=float(reward), done=True)
        return self._said("answer", float(reward))

    def close(self) -> None:
        if self._world is not None:
            self._world.close()

    def _check_actions(self, space: Space) -> None:
        """Raise ConfigError where the world's actions are not those of the option."""
        if isinstance(space, Discrete) and space.n == len(self.names):
            return
        if isinstance(space, Text) and not self.names:
            return
        need = "have no names"
        if isinstance(space, Discrete):
            need = f"need {space.n} names"
        elif not isinstance(space, Text):
            need = "are neither Discrete nor Text; wrap the world so that they are"
        raise ConfigError(
            f"option actions has {len(self.names)} names; the actions of "
            f"{self.id!r}, {space}, {need}"
        )

    def _action(self, text: str) -> Any:
        """Return the world's action for a turn's text; None where it has none."""
        space = self._world.action_space
        if isinstance(space, Text):
            return text.strip() if space.contains(text.strip()) else None
        found = self._name.findall(text.lower())
        return int(space.start) + self.names.index(found[-1]) if found else None

    def _said(self, option: str, reward: float) -> Answer:
        observation = written(self._seen)
        if self.observe == "ansi":
            observation = _plain(self._world.render())
        text = self.texts[option].format(observation=observation, reward=f"{reward:g}")
        return Answer(text, reward, state=observation)


def written(observation: Any) -> str:
    """Return an observation as text.

    Numbers are separated by commas, the fields of a dict are lines "name: value".
    """
    if isinstance(observation, str):
        return observation
    if isinstance(observation, Mapping):
        return "\n".join(f"{name}: {written(value)}" for name, value in observation.items())
    if isinstance(observation, (tuple, list, np.ndarray)) and np.ndim(observation) != 0:
        return ",".join(map(written, observation))
    return f"{observation:g}" if isinstance(observation, (float, np.floating)) else str(observation)


def _plain(drawn: str) -> str:
    """Return a drawing without the codes of a terminal, and brackets where it highlights."""
    return _COLOUR.sub("", _HIGHLIGHTED.sub(r"[\1]", drawn)).strip("\n")
