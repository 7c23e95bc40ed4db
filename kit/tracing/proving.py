"""Runs a weight loader on known values, and compares every element with its traced map.

names --pattern--> the loader --> tensors, NaN before
                                    |  correct values of windows and fills become DONE
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
"""Number of offsets in the table at which a row may begin: a prime, so that rows differ."""
STEP = 648055
"""Elements of the table from the beginning of a row to that of the next, modulo PERIOD: the golden
section, so that rows which are near in a parameter are far in the table."""
AT_ONCE = 1 << 20
"""Elements of a pattern that are made at once: reusing their memory is faster on a CPU than
allocating more."""
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
NAN = -1
"""The bits of a NaN in every float dtype, which arithmetic does not produce. DONE elements are
marked by another NaN, the largest integer."""


def pattern(name: str, param: Param, box: Box, device: torch.device) -> torch.Tensor:
    """Return the test values of a box of a parameter.

    They are integers from -128 to 127, which every float dtype represents exactly. A row, along the
    last dimension, is a part of one table of pseudo-random numbers; the parameter's name and the
    row's index in the whole parameter determine which part.
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
    """Return pseudo-random integers from -128 to 127, hashes of their indices."""
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
    """Load test values of `names`, and yield a sentence for each difference from the map.

    No other parameters may be loaded into `tensors`. twins: further names under which a parameter's
    values are loaded. Tensors of opaque parameters are only compared in their other windows. Float
    tensors have NaN or computed values afterwards.
    """
    bits = {name: bits_of(tensor) for name, tensor in tensors.items() if tensor.is_floating_point()}
    for unset in bits.values():
        unset.fill_(NAN)
    device = next(iter(tensors.values())).device if tensors else torch.device("cpu")
    for name in names:
        for given in (name, *twins.get(name, ())):
            # A loader may change its argument.
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
    """Fill `values`, a whole parameter, with its test values (see `pattern`)."""
    param = Param(tuple(values.shape), values.dtype)
    for part in _parts(Box.full(param.shape)):
        values[part.slices()] = pattern(name, param, part, values.device)


def take_pattern(name: str, param: Param, box: Box, values: torch.Tensor) -> bool:
    """Return whether a box has its test values in the tensor's dtype; set correct ones to DONE."""
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
