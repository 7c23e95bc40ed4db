"""Compares what a loader does with real values with what its map says, every element.

names --pattern--> the loader --> tensors, NaN before
                                    |  what is right in a window or a fill becomes DONE
                                    v
                                  DONE alone: the map is right, and leaves nothing out
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache

import torch

from hybridflow.core.values.weights import Box, Param
from hybridflow.kit.tracing.tracer import Load, LoaderMap

PERIOD = 1048573
"""Places in the table where a row may begin: a prime, so that a parameter's rows begin apart."""
STEP = 648055
"""Elements of the table from the beginning of a row to that of the next, modulo PERIOD: the golden
section, so that rows which are near in a parameter are far in the table."""
AT_ONCE = 1 << 20
"""Elements of a pattern that are made at once: their memory is used again, which costs a CPU less
than new memory does."""
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
NAN = -1
"""As bits: a NaN in every float dtype, and none that arithmetic makes. The largest integer, which
marks what is DONE, is another one."""


def pattern(name: str, param: Param, box: Box, device: torch.device) -> torch.Tensor:
    """Return the values that a proof gives to a box of a parameter.

    They are integers from -128 to 127, which every float dtype has exactly. A row, along the last
    dimension, is a part of one table of mixed numbers; its name and its place in the whole
    parameter say which part.
    """
    *leading, last = param.shape or (1,)
    *starts, first = box.start or (0,)
    *stops, end = box.stop or (1,)
    row = torch.zeros((), dtype=torch.int64, device=device)
    for size, start, stop in zip(leading, starts, stops, strict=True):
        row = row.unsqueeze(-1) * size + torch.arange(start, stop, device=device)
    begin = (row * STEP + zlib.crc32(name.encode())) % PERIOD
    table = _table(PERIOD + (1 << last.bit_length()), param.dtype, device)
    rows = table[first:].unfold(0, end - first, 1)
    return rows[begin].reshape(box.shape)


@lru_cache(maxsize=8)
def _table(length: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return integers from -128 to 127, mixed from their places."""
    mixed = torch.arange(length, device=device)
    for _ in range(2):
        mixed = mixed * -7046029254386353131
        mixed = mixed ^ (mixed >> 31)
    return ((mixed >> 17 & 255) - 128).to(dtype)


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
    bits = {name: bits_of(tensor) for name, tensor in tensors.items() if tensor.is_floating_point()}
    for unset in bits.values():
        unset.fill_(NAN)
    device = next(iter(tensors.values())).device if tensors else torch.device("cpu")
    for name in names:
        for given in (name, *twins.get(name, ())):
            # A loader may change what it is given.
            values = torch.empty(params[name].shape, dtype=params[name].dtype, device=device)
            write_pattern(name, values)
            try:
                load([(given, values)])
            except Exception as error:
                yield f"its loader refuses {given}: {type(error).__name__}: {error}"

    for name in names:
        for box, window in map.pieces.get(name, ()):
            if window.tensor not in bits:
                continue
            held = window.of(tensors[window.tensor].data)
            if not take_pattern(name, params[name], box, held):
                yield f"its loader brings other values of {name} to {window.tensor} than was traced"
                bits_of(held).fill_(_done(held.dtype))
    for window, value in map.fills:
        if window.tensor in bits:
            filled = window.of(bits[window.tensor])
            dtype = tensors[window.tensor].dtype
            constant = torch.full((), value, dtype=dtype, device=device)
            filled.masked_fill_(filled == bits_of(constant), _done(dtype))

    computed = {tensor for name in map.opaque for tensor in map.touched[name]}
    for name, held in bits.items():
        done = _done(tensors[name].dtype)
        if name in computed or _is_all(held, done):
            continue
        if lacking := int((held == NAN).sum()):
            yield f"nothing gives {lacking} of {held.numel()} elements of {name} their values"
        if not _is_all(held.masked_fill_(held == NAN, done), done):
            yield f"its loader writes more of {name} than was traced"


def write_pattern(name: str, values: torch.Tensor) -> None:
    """Write a whole parameter's pattern."""
    param = Param(tuple(values.shape), values.dtype)
    for part in _parts(Box.full(param.shape)):
        values[part.slices()] = pattern(name, param, part, values.device)


def take_pattern(name: str, param: Param, box: Box, values: torch.Tensor) -> bool:
    """Return whether a box holds its pattern in the tensor's dtype; mark as DONE where it does."""
    done = _done(values.dtype)
    for part in _parts(box):
        expected = bits_of(pattern(name, param, part, values.device).to(values.dtype))
        # A row's pattern is a view of the table, which stays as it is.
        bits_of(values[part.within(box)]).bitwise_xor_(expected ^ done)
    return _is_all(bits_of(values), done)


def _parts(box: Box) -> Iterator[Box]:
    """Cut a box into parts of few elements."""
    start = 0
    while start < box.numel:
        part = next(box.flat_range(start, min(start + AT_ONCE, box.numel)))
        yield part
        start += part.numel


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor's memory as integers: their operations are many times faster on a CPU."""
    return tensor.data.view(_INTEGERS[tensor.element_size()])


def _done(dtype: torch.dtype) -> int:
    return torch.iinfo(_INTEGERS[dtype.itemsize]).max


def _is_all(bits: torch.Tensor, value: int) -> bool:
    """Return whether all elements have the value."""
    if not bits.numel():
        return True
    least, most = bits.aminmax()
    return int(least) == value == int(most)
