"""Compares what a loader does with real values with what its map says, every element.

names --pattern--> the loader --> tensors, NaN before
                                    |  windows have the pattern's values, fills their constant,
                                    v  and nothing else was written
                                  the map is right
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence

import torch

from hybridflow.core.values.weights import Box, Param
from hybridflow.kit.tracing.tracer import Load, LoaderMap

AT_ONCE = 1 << 22
"""Elements of a pattern that are computed at once, as integers of 8 bytes."""
NAN = float("nan")


def pattern(name: str, param: Param, box: Box, device: torch.device) -> torch.Tensor:
    """Return the values that a proof gives to a box of a parameter.

    They are integers from -128 to 127, which every float dtype has exactly, mixed from the name and
    an element's place in the whole parameter.
    """
    values = torch.empty(box.shape, dtype=param.dtype, device=device)
    flat = values.view(-1)
    start = 0
    while start < box.numel:
        part = next(box.flat_range(start, min(start + AT_ONCE, box.numel)))
        flat[start : start + part.numel] = _mixed(name, part, device).flatten().to(param.dtype)
        start += part.numel
    return values


def _mixed(name: str, box: Box, device: torch.device) -> torch.Tensor:
    """Return integers from -128 to 127 of the box's shape."""
    mixed = torch.full((), zlib.crc32(name.encode()), dtype=torch.int64, device=device)
    for start, stop in zip(box.start, box.stop, strict=True):
        index = torch.arange(start, stop, device=device)
        mixed = (mixed.unsqueeze(-1) + index) * -7046029254386353131
        mixed = mixed ^ (mixed >> 31)
    return (mixed >> 17 & 255) - 128


def problems_of(
    load: Load,
    map: LoaderMap,
    params: Mapping[str, Param],
    tensors: Mapping[str, torch.Tensor],
    names: Sequence[str],
    twins: Mapping[str, Sequence[str]],
) -> Iterator[str]:
    """Load parameters into tensors that take no others, and yield a sentence for each problem.

    twins: further names under which a parameter's values are loaded. What an opaque parameter gives
    is not compared; the other values of its tensors are. Values of float tensors are NaN
    afterwards, or computed ones.
    """
    floats = {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point()}
    for tensor in floats.values():
        tensor.data.fill_(NAN)
    device = next(iter(tensors.values())).device if tensors else torch.device("cpu")
    for name in names:
        whole = Box.full(params[name].shape)
        for given in (name, *twins.get(name, ())):
            # A loader may change what it is given.
            try:
                load([(given, pattern(name, params[name], whole, device))])
            except Exception as error:
                yield f"its loader refuses {given}: {type(error).__name__}: {error}"

    # What is as it should be becomes NaN again, so that nothing else may be left.
    for name in names:
        for box, window in map.pieces.get(name, ()):
            if window.tensor not in floats:
                continue
            held = window.of(floats[window.tensor])
            if not torch.equal(held, pattern(name, params[name], box, device).to(held.dtype)):
                yield f"its loader brings other values of {name} to {window.tensor} than was traced"
            held.fill_(NAN)
    for window, value in map.fills:
        if window.tensor in floats:
            filled = window.of(floats[window.tensor])
            filled.masked_fill_(filled == value, NAN)
    computed = {tensor for name in map.opaque for tensor in map.touched[name]}
    for name, tensor in floats.items():
        if name not in computed and not bool(tensor.isnan().all()):
            yield f"its loader writes more of {name} than was traced"
