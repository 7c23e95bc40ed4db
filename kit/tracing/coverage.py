"""Whether a loader's map leaves anything out, on either side.

the model's side    every element of a tensor that takes values lies in one window, or is a fill
our side            every element of a parameter is taken by some rank, or the parameter is opaque
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import torch

from hybridflow.core.values.weights import Box, Param
from hybridflow.kit.tracing.tracer import LoaderMap


def uncovered(map: LoaderMap, tensors: Mapping[str, torch.Tensor]) -> Iterable[str]:
    """Yield a sentence for each tensor of which an element has no source, or has two.

    Tensors into which the loader of an opaque parameter writes are left out.
    """
    computed = {name for opaque in map.opaque for name in map.touched[opaque]}
    windows: dict[str, list] = {}
    for pieces in map.pieces.values():
        for _, window in pieces:
            windows.setdefault(window.tensor, []).append(window)
    fills: dict[str, list] = {}
    for window, _ in map.fills:
        fills.setdefault(window.tensor, []).append(window)

    # Every element must have one source.
    for name in windows.keys() | fills.keys():
        if name in computed:
            continue
        # Elements are counted, one tensor at a time.
        tensor = tensors[name]
        sources = torch.zeros(
            tensor.untyped_storage().nbytes() // tensor.itemsize, dtype=torch.int8
        )
        counted = sources.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
        for window in windows.get(name, ()):
            window.of(counted).add_(1)
        if bool((counted > 1).any()):
            yield f"two values come to one element of {name}"
        for window in fills.get(name, ()):
            window.of(counted).fill_(1)
        lacking = int((counted == 0).sum())
        if lacking:
            yield f"nothing gives {lacking} of {tensor.numel()} elements of {name} their values"


def unfilled(tensors: Mapping[str, torch.Tensor], filled: Collection[str]) -> Iterable[str]:
    """Yield each parameter of the model that no parameter of the checkpoint gives its values.

    filled: the tensors that a loader writes into.
    """
    # A tied parameter has them from its twin, with which it shares the storage.
    storages = {tensors[name].untyped_storage()._cdata for name in filled}
    for name, tensor in tensors.items():
        is_parameter = isinstance(tensor, torch.nn.Parameter)
        if is_parameter and tensor.untyped_storage()._cdata not in storages:
            yield name


def untaken(
    params: Mapping[str, Param], ranks: Iterable[Mapping[str, Iterable[Box]]]
) -> Iterable[tuple[str, int]]:
    """Yield (name, elements) of each parameter of which the ranks together take only a part.

    ranks: for each rank, name -> boxes.
    """
    every = list(ranks)
    for name, param in params.items():
        # What is left of it when every rank has taken its boxes
        left = [Box.full(param.shape)]
        for boxes in every:
            for box in boxes.get(name, ()):
                left = [rest for one in left for rest in one.minus(box)]
        elements = sum(box.numel for box in left)
        if elements:
            yield name, elements
