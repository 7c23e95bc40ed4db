"""The weights that an engine's own loader reads on each rank, found for `hybridflow reshard`.

Formulas (kit/layouts.py) cover known architectures. An engine that can build its model on meta can
run its own loader instead, for any config.json:

    config.json --child process--> engine's model on meta --its loader, traced--> boxes per tp rank
                                                                                          |
    WeightLayout: equal tp ranks of all replicas take the same boxes  <-------------------'
"""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs
import torch

from hybridflow.core.errors import ModelError
from hybridflow.core.values.model_shape import ModelShape
from hybridflow.core.values.parallel import GenerationLayout
from hybridflow.core.values.weights import Box, Param, Shards, WeightLayout


@attrs.frozen(eq=False)
class TracedRanks:
    """The boxes of a model's saved parameters that each tp rank of an engine reads."""

    shapes: Mapping[str, tuple[int, ...]]
    """Canonical name -> shape, without tied names."""
    ties: Mapping[str, str]
    """Tied name -> the name whose values it shares."""
    boxes: tuple[Mapping[str, tuple[Box, ...]], ...]
    """For each tp rank: canonical name -> boxes."""
    opaque: Mapping[str, str]
    """Canonical names of parameters that every rank reads whole -> the reason."""

    def params(self, dtype: torch.dtype) -> dict[str, Param]:
        """Return the parameters, stored as `dtype`."""
        return {name: Param(shape, dtype) for name, shape in self.shapes.items()}

    def layout(self, generation: GenerationLayout, dtype: torch.dtype) -> WeightLayout:
        """Return the boxes that every rank of the generation layout reads."""
        ranks_at: list[list[int]] = [[] for _ in self.boxes]
        for replica in generation.replicas:
            for position, rank in enumerate(replica[0]):
                ranks_at[position].append(rank)

        # Parameters that are cut alike share their shards: planning is then fast.
        memo: dict[tuple, Shards] = {}
        held: dict[str, Shards] = {}
        for name in self.shapes:
            cut = tuple(boxes[name] for boxes in self.boxes)
            if cut not in memo:
                memo[cut] = {
                    rank: own for own, ranks in zip(cut, ranks_at, strict=True) for rank in ranks
                }
            held[name] = memo[cut]
        ranks = sorted(rank for ranks in ranks_at for rank in ranks)
        return WeightLayout.by_name(self.params(dtype), held, ranks, self.ties, self.shapes)

    def shape(self) -> ModelShape:
        """Return a shape with parameters alone, for backends that cut them all by one rule."""
        return ModelShape(0, 0, 1, 1, 0, 0, 0, layer={}, before=self.shapes, ties=self.ties)


class AsksLoader:
    """Mixin for an engine's `Config` whose weight loader can be traced without starting it."""

    __slots__ = ()

    def loader_missing(self) -> str | None:
        """Return why the loader cannot run here ("vLLM is not installed"); None if it can."""
        raise NotImplementedError

    def traced(self, fields: Mapping[str, Any], tp: int, dtype: torch.dtype) -> TracedRanks:
        """Return the boxes that each of `tp` ranks reads of a model with these config.json fields.

        It takes seconds, and is cached in this process. Raises ModelError for a model that the
        engine does not support.
        """
        raise NotImplementedError


_answers: dict[tuple[str, str], TracedRanks] = {}
"""(module, request) -> the answer of a child of this process."""


def ask_child(module: str, engine: str, request: Mapping[str, Any]) -> TracedRanks:
    """Run `module` in a child process, and return its answer to `request`, which is JSON.

    The child is called with two paths: that of the request, and that of the file for its answer,
    which it writes by `answer`. It is a process of its own because engines change global state.
    Answers are cached. Raises ModelError with the engine's error.
    """
    text = json.dumps(request, sort_keys=True)
    if (module, text) not in _answers:
        with tempfile.TemporaryDirectory() as folder:
            asked = Path(folder) / "request.json"
            answered = Path(folder) / "answer"
            asked.write_text(text)
            command = [sys.executable, "-m", module, str(asked), str(answered)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if not answered.exists():
                lines = [line for line in done.stderr.splitlines() if line.strip()]
                raise ModelError(
                    f"{engine} was asked what its loader takes, and its process ended with exit "
                    f"status {done.returncode}: {lines[-1] if lines else 'without a word'}"
                )
            # Written by our own child, into a folder that is ours alone
            said = pickle.loads(answered.read_bytes())
        if isinstance(said, str):
            raise ModelError(f"{engine} does not take this model: {said}")
        _answers[module, text] = said
    return _answers[module, text]


def answer(ask: Callable[..., TracedRanks]) -> None:
    """Answer the request of a child's command line: write the result of `ask`, or its error."""
    request, answered = map(Path, sys.argv[1:])
    said: TracedRanks | str
    try:
        said = ask(**json.loads(request.read_text()))
    except ModelError as error:
        said = str(error)
    except Exception as error:
        text = str(error).strip().splitlines()
        said = f"{type(error).__name__}: {text[-1] if text else ''}"
    answered.write_bytes(pickle.dumps(said))
