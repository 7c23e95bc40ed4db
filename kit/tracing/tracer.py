"""Traces a weight loader to find where it puts each box of each parameter; no byte is copied.

The loader gets meta tensors, one parameter after the other. A dispatch mode records the operations
on them:

    loader                                          the tracer notes
    tensor.copy_(source[8:16])                      box [8:16] -> window of the tensor
    tensor[0].copy_(source.view(4, 2, 8)[:, 0])     boxes of the source -> windows
    tensor.fill_(0)                                 a fill (padding)
    tensor.copy_(source * 2)                        opaque: it is computed

Views are followed, and copies that keep the values (`contiguous`, `cat`). Any other operation on a
source makes its parameter opaque, with the reason; so the map is either correct or has no entry.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import attrs
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hybridflow.core.values.weights import Box, Param
from hybridflow.kit.tracing.windows import NoBoxError, Piece, Window, merged, pieces_of_view

aten = torch.ops.aten
SAME_VALUES = (aten.clone.default, aten._to_copy.default)
"""Operations that, if the dtype is unchanged, return the source's values in its order."""

Load = Callable[[list[tuple[str, torch.Tensor]]], Any]
"""A weight loader: it takes (name, whole parameter) pairs."""


@attrs.frozen
class LoaderMap:
    """Where a loader puts the boxes of each parameter."""

    pieces: Mapping[str, tuple[Piece, ...]]
    """Name -> boxes with their windows; () for a parameter that the loader copies nowhere."""
    fills: tuple[tuple[Window, float], ...]
    """Constants that the loader writes, such as padding."""
    opaque: Mapping[str, str]
    """Name -> the reason why no map describes what the loader does with the parameter."""
    touched: Mapping[str, frozenset[str]]
    """Name -> the tensors that the loader writes into."""

    def boxes(self, name: str) -> tuple[Box, ...]:
        """Return disjoint boxes that together are the part of a parameter that the loader reads."""
        disjoint: list[Box] = []
        for box, _ in self.pieces[name]:
            rest = [box]
            for other in disjoint:
                rest = [part for one in rest for part in one.minus(other)]
            disjoint += rest
        return tuple(disjoint)


def trace(
    load: Load, tensors: Mapping[str, torch.Tensor], params: Mapping[str, Param]
) -> LoaderMap:
    """Call `load` with each of the parameters, and return where it puts them in `tensors`.

    `tensors` (name -> parameter or buffer, on any device, meta too) keep their values. A loader
    that raises makes the parameter opaque, with its error as the reason; the tensors written until
    then are in `touched`.
    """
    watch = _Watch(tensors)
    if params:
        _hand_over(watch, load, list(params.items()))
    pieces = {
        name: merged(dict.fromkeys(found))
        for name, found in watch.pieces.items()
        if name not in watch.opaque
    }
    touched = {name: frozenset(tensors) for name, tensors in watch.touched.items()}
    return LoaderMap(pieces, tuple(dict.fromkeys(watch.fills)), watch.opaque, touched)


def _hand_over(watch: _Watch, load: Load, params: list[tuple[str, Param]]) -> None:
    """Call the loader with all parameters, and recursively with halves where it does not just copy.

    Many calls would be slow: a loader walks the whole model at each. A parameter that is not just
    copied ends up in a call of its own, so that the reason is noted under its name.
    """
    known = dict(watch.opaque)
    fills = len(watch.fills)
    if _clean(watch, load, dict(params)) or len(params) == 1:
        return

    # The notes of such a call are dropped.
    watch.opaque = known
    del watch.fills[fills:]
    middle = len(params) // 2
    _hand_over(watch, load, params[:middle])
    _hand_over(watch, load, params[middle:])


def _clean(watch: _Watch, load: Load, group: Mapping[str, Param]) -> bool:
    """Call the loader with these parameters; return whether it just copies them."""
    # Sources live until the call has ended, so that no other tensor gets the storage of one.
    sources = {
        name: torch.empty(param.shape, dtype=param.dtype, device="meta")
        for name, param in group.items()
    }
    keys = {_key(source): (name, group[name]) for name, source in sources.items()}
    asked = set()

    def handed() -> Generator[tuple[str, torch.Tensor], None, None]:
        for key, (name, param) in keys.items():
            asked.add(name)
            watch.forget()
            watch.begin(name, param)
            watch.sources[key] = (name, param)
            yield name, sources[name]

    # A list for a single parameter, as loaders expect; a generator for many.
    pairs = handed()
    try:
        with torch.no_grad(), _in_this_thread(), watch:
            load(list(pairs) if len(group) == 1 else pairs)  # type: ignore[arg-type]
    except Exception as error:  # it reads values, or does not know the name
        text = str(error).splitlines()[0] if str(error) else ""
        watch.spoil(watch.name, f"{type(error).__name__}: {text}")

    # A source that the loader keeps may be copied in a later call.
    pairs.close()
    left = {
        name: (key, StorageWeakRef(sources[name].untyped_storage()))
        for key, (name, _) in keys.items()
    }
    watch.forget()
    sources.clear()
    for name, (key, storage) in left.items():
        if storage.expired():
            watch.sources.pop(key, None)
        else:
            watch.spoil(name, "the loader keeps it for later")
    return len(asked) == len(group) and asked.isdisjoint(watch.opaque)


@contextmanager
def _in_this_thread() -> Iterator[None]:
    """Run the tasks of thread pools in this thread, since a dispatch mode sees only its own."""
    submit = ThreadPoolExecutor.submit

    def call(self, function, /, *args, **kwargs):
        done: Future = Future()
        try:
            done.set_result(function(*args, **kwargs))
        except BaseException as error:
            done.set_exception(error)
        return done

    ThreadPoolExecutor.submit = call  # type: ignore[method-assign]
    try:
        yield
    finally:
        ThreadPoolExecutor.submit = submit  # type: ignore[method-assign]


def _key(tensor: torch.Tensor) -> int:
    """Return a number that is equal for tensors which share a storage, as long as it lives."""
    return tensor.untyped_storage()._cdata


class _Watch(TorchDispatchMode):
    """A dispatch mode that records what the loader does with sources and tensors."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]):
        super().__init__()
        # Tied tensors are known by the first of their names.
        self.homes = {
            _key(tensor): (name, tensor) for name, tensor in reversed(list(tensors.items()))
        }
        """The storages that the loader writes into."""
        self.sources: dict[int, tuple[str, Param]] = {}
        """The storages of parameters that the loader was given."""
        self.copies: dict[int, tuple[torch.Tensor, list[tuple[Box, torch.Tensor]]]] = {}
        """Contiguous copies of views -> (box of the copy, view with its values) pairs."""
        self.derived: dict[int, torch.Tensor] = {}
        """Tensors computed from a source, kept alive so that their storages are not reused."""
        self.pieces: dict[str, list[Piece]] = {}
        self.fills: list[tuple[Window, float]] = []
        self.opaque: dict[str, str] = {}
        self.touched: dict[str, set[str]] = {}
        self.name = ""
        self.param = Param((), torch.float32)

    def begin(self, name: str, param: Param) -> None:
        """Note that the operations that follow are about this parameter."""
        self.name = name
        self.param = param
        self.pieces[name] = []
        self.touched[name] = set()

    def forget(self) -> None:
        """Drop the copies and computed tensors of the parameter."""
        self.derived.clear()
        self.copies.clear()

    def spoil(self, name: str, reason: str) -> None:
        """Make the parameter opaque; the first reason counts."""
        self.opaque.setdefault(name, reason)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is aten.copy_.default:
            target, source = args[:2]
            if _key(target) in self.homes or self._from_source(source):
                return self._copy(target, source)

        written = list(_written(func, args))
        at_home = [tensor for tensor in written if _key(tensor) in self.homes]
        self.touched[self.name] |= {self.homes[_key(tensor)][0] for tensor in at_home}
        if at_home:
            self._write(func, args, written)
            return args[0]

        # Operations on other tensors are not recorded.
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if not any(self._from_source(tensor) for tensor in inputs):
            return func(*args, **kwargs)
        return self._derive(func, args, kwargs, inputs, written)

    # Writes into tensors of the engine

    def _copy(self, to: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
        """Note a copy of a source's view into a tensor, or into one of the loader's own."""
        of = of.expand(to.shape)  # raises as copy_ does
        if _key(to) not in self.homes:
            self.derived[_key(to)] = to
            return to

        home, tensor = self.homes[_key(to)]
        self.touched[self.name].add(home)
        if not to.numel():
            pass
        elif _key(of) not in self.sources and _key(of) not in self.copies:
            self.spoil(self.name, "it is computed")
        else:
            offset = int(to.storage_offset() - tensor.storage_offset())
            try:
                if to.dtype != tensor.dtype or of.dtype != self.param.dtype:
                    raise NoBoxError("its bits are read as another dtype")
                self.pieces[self.name] += self._traced(of, home, offset, to.stride())
            except NoBoxError as error:
                self.spoil(self.name, str(error))
        return to

    def _write(self, func, args, written) -> None:
        """Note another write into a tensor: a fill of a constant; anything else makes it opaque."""
        constant = {aten.fill_.Scalar: True, aten.zero_.default: False}.get(func)
        if constant is None:
            if any(tensor.numel() for tensor in written):
                self.spoil(self.name, f"{func} writes it")
            return

        # An empty part of a tensor is filled with nothing.
        target = args[0]
        home, tensor = self.homes[_key(target)]
        if target.numel():
            offset = target.storage_offset() - tensor.storage_offset()
            window = Window(home, offset, tuple(target.shape), target.stride())
            self.fills.append((window, float(args[1]) if constant else 0.0))

    # --- operations on a source ---

    def _from_source(self, tensor: torch.Tensor) -> bool:
        key = _key(tensor)
        return key in self.sources or key in self.copies or key in self.derived

    def _known(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor's values are a source's, in an order that is known."""
        key = _key(tensor)
        return key in self.sources or key in self.copies

    def _derive(self, func, args, kwargs, inputs, written) -> Any:
        """Run an operation on a view or copy of a source, and record its result."""
        first = args[0]
        same = (
            func in SAME_VALUES
            and kwargs.get("dtype") in (None, first.dtype)
            and _key(first) not in self.derived
        )
        if same and first.is_contiguous():
            return aten.alias.default(first)
        if any(self._known(tensor) for tensor in written):
            self.spoil(self.name, f"{func} changes it")

        # Meta tensors stay on meta, whatever device the loader asks for.
        if func is aten._to_copy.default:
            kwargs = {**kwargs, "device": "meta"}
        out = func(*args, **kwargs)

        if same and out.is_contiguous():
            self.copies[_key(out)] = (out, [(Box.full(out.shape), first)])
            return out
        if func is aten.cat.default and out.is_contiguous() and all(map(self._known, inputs)):
            dim = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % out.ndim
            self.copies[_key(out)] = (out, _concatenated(out, first, dim))
            return out

        made = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        for tensor in made:
            if not self._known(tensor) and _key(tensor) not in self.homes:
                self.derived[_key(tensor)] = tensor
        return out

    def _traced(
        self, view: torch.Tensor, home: str, offset: int, stride: tuple[int, ...]
    ) -> list[Piece]:
        """Return the source's boxes that a view shows, each with its window.

        A copy is traced back to its source. Raises NoBoxError.
        """
        if _key(view) in self.sources:
            name, param = self.sources[_key(view)]
            if name != self.name:
                raise NoBoxError(f"values of {name} come with it")
            return pieces_of_view(param.shape, view, home, offset, stride)

        # For a copy: trace the part of the view in each of its regions further.
        copy, parts = self.copies[_key(view)]
        found: list[Piece] = []
        for box, window in pieces_of_view(tuple(copy.shape), view, home, offset, stride):
            for region, original in parts:
                common = box.intersect(region)
                if common is None:
                    continue
                shift = sum(
                    (a - b) * step
                    for a, b, step in zip(common.start, box.start, window.stride, strict=True)
                )
                part = original[common.within(region)]
                found += self._traced(part, home, window.offset + shift, window.stride)
        return found


def _written(func, args) -> Iterator[torch.Tensor]:
    """Yield the tensors among the arguments that an operation writes into."""
    for spec, argument in zip(func._schema.arguments, args, strict=False):
        writes = spec.alias_info is not None and spec.alias_info.is_write
        if writes and isinstance(argument, torch.Tensor):
            yield argument


def _concatenated(
    out: torch.Tensor, parts: list[torch.Tensor], dim: int
) -> list[tuple[Box, torch.Tensor]]:
    """Return the box of each part in a concatenation."""
    boxes = []
    start = 0
    for part in parts:
        stop = start + part.shape[dim]
        boxes.append((Box.part(out.shape, dim, start, stop), part))
        start = stop
    return boxes
