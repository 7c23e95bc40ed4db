"""Checks that a weight loader leaves nothing out, on either side.

engine's model    every parameter of it gets its values from a parameter of the checkpoint
checkpoint        every element of its parameters is read by some rank
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import torch

from hybridflow.core.errors import ModelError
from hybridflow.core.values.weights import Box, Param


def unfilled(tensors: Mapping[str, torch.Tensor], filled: Collection[str]) -> Iterable[str]:
    """Yield each parameter of the model that no parameter of the checkpoint gives its values.

    filled: the tensors that a loader writes into.
    """
    # A tied parameter shares the storage of the other one, which gets the values.
    storages = {tensors[name].untyped_storage()._cdata for name in filled}
    for name, tensor in tensors.items():
        is_parameter = isinstance(tensor, torch.nn.Parameter)
        if is_parameter and tensor.untyped_storage()._cdata not in storages:
            yield name


def check_taken(
    params: Mapping[str, Param],
    ranks: Iterable[Mapping[str, Iterable[Box]]],
    who: str,
    model_type: str | None,
) -> None:
    """Raise ModelError if the ranks of a replica together do not read all of a parameter.

    ranks: for each rank, name -> boxes.
    """
    every = list(ranks)
    missing: dict[str, int] = {}
    for name, param in params.items():
        # The parts that remain without the boxes of any rank
        left = [Box.full(param.shape)]
        for boxes in every:
            for box in boxes.get(name, ()):
                left = [rest for one in left for rest in one.minus(box)]
        if elements := sum(box.numel for box in left):
            missing[name] = elements

    if missing:
        name, elements = next(iter(missing.items()))
        whole = params[name].numel
        what = "no" if elements == whole else f"only {whole - elements} of {whole} elements of"
        others = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ModelError(
            f"{who} takes {what} {name}{others} of this {model_type}: it would generate with other "
            "weights"
        )


def say_opaque(opaque: Mapping[str, str], count: int, engine: str) -> None:
    """Print which of an engine's `count` parameters come whole (name -> reason), and why."""
    for name, reason in list(opaque.items())[:1]:
        print(
            f"{len(opaque)} of {count} parameters come whole to each rank of {engine}, as no box "
            f"describes what its loader does: {name} ({reason}), ...",
            flush=True,
        )
