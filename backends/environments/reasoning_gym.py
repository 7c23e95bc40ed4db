"""Tasks of reasoning-gym: a data source that draws them, and the reward and environment that score.

https://github.com/open-thought/reasoning-gym
"""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import reasoning_gym
from reasoning_gym.composite import DatasetSpec
from reasoning_gym.dataset import ProceduralDataset
from reasoning_gym.factory import DATASETS
from reasoning_gym.utils import extract_answer

from hybridflow.core.contracts.data_source import DataConfig, DataSource
from hybridflow.core.contracts.environment import Answer, Environment, Start, Turn
from hybridflow.core.contracts.reward import Reward, RewardSample
from hybridflow.core.errors import ConfigError, RewardError
from hybridflow.core.names import did_you_mean

TASK = "reasoning_gym"
"""The field of a row with its task: dataset, settings, seed, rows and index."""


class TaskSource(DataSource):
    """Rows of one of reasoning-gym's datasets: `prompt`, its question; `messages`, the same as a
    chat; `answer`. Options:

    dataset: its name, as "chain_sum"; "composite" mixes several by its setting `datasets`.
    settings: its settings, as { max_digits = 2 }.
    system: text of a system message in the field `messages`, for models that chat.
    rows: number of questions that are drawn, all when the source is made (default 2000).
    seed: from which they are drawn (default 0).
    split: "train" (the default) or "held-out".
    held_out: number of held-out rows (default 200).

    A question that is drawn twice is one row. With the same options but `split`, train and held-out
    sets have no row in common.
    """

    def __init__(self, config: DataConfig):
        super().__init__(config)
        options = self.read_options(
            dataset="", settings={}, rows=2000, seed=0, split="train", held_out=200, system=""
        )
        names = ("dataset", "settings", "seed", "rows")
        task: dict[str, Any] = {name: options[name] for name in names}
        dataset = _dataset(json.dumps(task, sort_keys=True))
        found: dict[str, tuple[int, str]] = {}
        for index in range(options["rows"]):
            entry = dataset[index]
            answer = "" if entry["answer"] is None else str(entry["answer"])
            found.setdefault(entry["question"], (index, answer))

        cut = options["held_out"]
        if options["split"] not in ("train", "held-out") or not 0 < cut < len(found):
            raise ConfigError(
                f"data.options: split is {options['split']!r}, held_out {cut} of {len(found)} "
                f'different questions ({options["rows"]} were drawn); split must be "train" or '
                '"held-out", and some questions must be left to each'
            )
        system = [{"role": "system", "content": options["system"]}] if options["system"] else []
        rows = [
            {
                "prompt": question,
                "messages": [*system, {"role": "user", "content": question}],
                "answer": answer,
                TASK: task | {"index": index},
            }
            for question, (index, answer) in found.items()
        ]
        self._rows = rows[:cut] if options["split"] == "held-out" else rows[cut:]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, i: int) -> dict[str, Any]:
        return copy.deepcopy(self._rows[i])


class TaskReward(Reward):
    """The score that the task's dataset gives to the answer, 0 to 1: many give parts of it.

    The answer is the whole response without white space around it, or with `tag` what stands in
    the last <tag>...</tag>; a response without it has none.
    """

    def __init__(self, tag: str = ""):
        """`tag`: for example "answer"."""
        self.tag = tag

    def __call__(self, samples: Sequence[RewardSample]) -> list[float]:
        return [score(sample.meta, self.answer(sample)) for sample in samples]

    def answer(self, sample: RewardSample) -> str | None:
        """Return the answer of a response; None if it lacks the tag."""
        return answer_of(sample.response, self.tag)


class Tries(Environment):
    """The task as an environment: an answer that is not right may be given again.

    The episode's return is the score of the last answer, as `TaskReward` has it.
    """

    def __init__(self, tries: int = 3, tag: str = "", again: str = "\nThat is wrong. Try again.\n"):
        """Only checks the options.

        tries: number of answers at most. tag: see `TaskReward`. again: text after a wrong one.
        """
        if tries < 1 or not again:
            raise ConfigError(
                f"option tries is {tries}, again {again!r}; there must be one at least, and a text"
            )
        self.tries = tries
        self.tag = tag
        self.again = again
        self._meta: Mapping[str, Any] = {}

    def reset(self, start: Start) -> Answer:
        self._meta = start.meta
        return Answer()

    def step(self, turn: Turn) -> Answer:
        value = score(self._meta, answer_of(turn.text, self.tag))
        if value >= 1.0 or turn.number + 1 >= self.tries:
            return Answer(reward=value, done=True)
        return Answer(self.again, state=f"try {turn.number + 1}")


def answer_of(text: str, tag: str) -> str | None:
    """Return what the model gives as its answer, None where it lacks the tag."""
    return extract_answer(text, tag) if tag else text.strip()


def score(meta: Mapping[str, Any], answer: str | None) -> float:
    """Return the score, 0 to 1, of the answer to a row of TaskSource.

    Raises RewardError for a row of another source.
    """
    task = meta.get(TASK)
    if task is None:
        raise RewardError(
            f'the row has no field {TASK!r}; it must be of the data source "reasoning_gym"'
        )
    dataset, entry = _task(json.dumps(task, sort_keys=True))
    return float(dataset.score_answer(answer, entry))


@functools.lru_cache(maxsize=1024)
def _task(text: str) -> tuple[ProceduralDataset, dict[str, Any]]:
    """Return a task's dataset and entry, drawn once more: entries are more than JSON."""
    task = json.loads(text)
    index = task.pop("index")
    dataset = _dataset(json.dumps(task, sort_keys=True))
    return dataset, dataset[index]


@functools.lru_cache(maxsize=64)
def _dataset(text: str) -> ProceduralDataset:
    """Make a task's dataset. Raises ConfigError for an unknown one, or settings that do not fit."""
    task = json.loads(text)
    name, settings = task["dataset"], task["settings"]
    if name not in DATASETS:
        hint = did_you_mean(name, DATASETS)
        raise ConfigError(f"data.options.dataset: reasoning-gym has no dataset {name!r}{hint}")
    taken = {"seed": task["seed"], "size": task["rows"], **settings}
    try:
        if name == "composite":
            taken["datasets"] = [DatasetSpec(**part) for part in settings.get("datasets", [])]
        return reasoning_gym.create_dataset(name, **taken)
    except (AssertionError, TypeError, ValueError) as error:
        raise ConfigError(
            f"data.options.settings {settings!r} do not fit reasoning-gym's {name!r}: {error}"
        ) from error
