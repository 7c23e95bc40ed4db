"""The form in which transformers saves a model: canonical names, and boxes of stored parameters.

Transformers runs some models with parameters other than those of their checkpoints. For instance,
it stacks the experts of a mixture, and splits the stack when it saves:

    stored: experts.gate_up_proj [2, 8, 4]         saved: experts.0.gate_proj.weight [4, 4]
                                                          experts.0.up_proj.weight   [4, 4]
                                                          experts.1.gate_proj.weight ...

Canonical names and shapes are the saved ones. The mapping of boxes is found by tracing
transformers' own conversion, so that it needs no rules about names.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import attrs
import torch

from hybridflow.core.errors import ModelError
from hybridflow.core.values.weights import Box, LazyShard, Param, Shard, Shards, WeightLayout
from hybridflow.kit.tracing.tracer import trace
from hybridflow.kit.tracing.windows import Window, strides_of


@attrs.frozen
class Part:
    """A box of a stored parameter, saved as a box of a canonical one."""

    stored: Box
    name: str
    """The canonical name."""
    saved: Box
    dims: tuple[int, ...]
    """The stored dimension of each dimension of the canonical parameter."""

    def common(self, held: Box) -> tuple[Box, Box] | None:
        """Return the common box of `held`, in stored and in canonical indexes; None without one."""
        stored = self.stored.intersect(held)
        if stored is None:
            return None
        # The two differ by a shift along each canonical dimension; a stored dimension that has none
        # (the number of the expert) has one index here.
        start = []
        stop = []
        for dim, of in enumerate(self.dims):
            shift = self.saved.start[dim] - self.stored.start[of]
            start.append(stored.start[of] + shift)
            stop.append(stored.stop[of] + shift)
        return stored, Box(tuple(start), tuple(stop))

    def view(self, values: torch.Tensor, held: Box, box: Box) -> torch.Tensor:
        """Return the stored box `box` out of the values of `held`, with canonical dimensions."""
        # Dimensions without a canonical one have one index, and go.
        part = values[box.within(held)]
        others = [dim for dim in range(part.ndim) if dim not in self.dims]
        return part.permute(*others, *self.dims).reshape(*(box.shape[dim] for dim in self.dims))


@attrs.frozen
class SavedForm:
    """How the stored parameters of one model make up the saved ones."""

    shapes: Mapping[str, tuple[int, ...]]
    """Canonical name -> shape, without tied names."""
    ties: Mapping[str, str]
    """Tied canonical name -> the canonical name whose values it shares."""
    parts: Mapping[str, tuple[Part, ...]]
    """Stored name -> its parts; only of parameters that are saved in another form."""

    @classmethod
    def of(cls, model: Any) -> SavedForm:
        """Return the form in which transformers saves this model, which may be on meta.

        Raises ModelError where the conversion cannot be described by boxes.
        """
        stored = {
            name: torch.empty(values.shape, dtype=values.dtype, device="meta")
            for name, values in model.state_dict().items()
        }
        tied = {
            name: source for name, source in model.all_tied_weights_keys.items() if name != source
        }
        # Most models are saved as they are.
        saved = _revert(model, stored)
        if saved.keys() == stored.keys() and all(saved[name] is stored[name] for name in saved):
            shapes = {name: tuple(v.shape) for name, v in stored.items() if name not in tied}
            return cls(shapes, tied, {})

        # Tied parameters may be saved under other names, too.
        parts = _trace(model, stored, saved)
        renamed = {name: of[0].name for name, of in parts.items() if name in tied.keys() | tied}
        ties = {renamed.get(name, name): renamed.get(of, of) for name, of in tied.items()}
        shapes = {name: tuple(v.shape) for name, v in saved.items() if name not in ties}
        return cls(shapes, ties, parts)

    # --- a trainer's side ---

    def layout(self, layout: WeightLayout) -> WeightLayout:
        """Return a layout of stored parameters as one of canonical parameters."""
        if not self.parts:
            return layout
        # Each stored parameter gives its boxes to the canonical ones that it is saved as.
        params: dict[str, Param] = {}
        held: dict[str, dict[int, tuple[Box, ...]]] = {}
        shards = layout.shards()
        for stored, param in layout.params.items():
            for part in self.parts.get(stored, (None,)):
                if part is None:
                    params[stored] = param
                    held[stored] = dict(shards[stored])
                    continue
                params[part.name] = Param(self.shapes[part.name], param.dtype)
                _add(held.setdefault(part.name, {}), shards[stored], part)
        return WeightLayout.by_name(params, held, layout.ranks, self.ties, layout.opaque)

    def shards(self, shards: Iterable[tuple[str, Box, Shard]]) -> Iterator[tuple[str, Box, Shard]]:
        """Yield stored shards as canonical ones: views of their values."""
        for name, held, values in shards:
            if name not in self.parts:
                yield name, held, values
                continue
            for part in self.parts[name]:
                common = part.common(held)
                if common is not None:
                    yield part.name, common[1], _part_of(part, values, held, common)

    def whole(
        self, parameters: Iterable[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield whole stored parameters as whole canonical ones.

        A canonical parameter is yielded with the last stored one that has values of it. Of tied
        ones the other name may be among the stored (gpt_neox: embed_out).
        """
        lacking = {
            part.name: torch.Size(self.shapes[part.name]).numel()
            for parts in self.parts.values()
            for part in parts
            if part.name in self.shapes
        }
        # A canonical parameter of several stored ones waits here until all have come.
        made: dict[str, torch.Tensor] = {}
        for name, held, values in self.shards(
            (name, Box.full(values.shape), values) for name, values in parameters
        ):
            assert isinstance(values, torch.Tensor)
            if name not in lacking:
                yield name, values
                continue
            if held == Box.full(self.shapes[name]):
                yield name, values
                continue
            if name not in made:
                made[name] = values.new_empty(self.shapes[name])
            made[name][held.slices()] = values
            lacking[name] -= held.numel
            if not lacking[name]:
                yield name, made.pop(name)


def _add(held: dict[int, tuple[Box, ...]], shards: Shards, part: Part) -> None:
    """Add to `held` (rank -> boxes) the part's canonical boxes that each rank holds."""
    for rank, boxes in shards.items():
        found = [common[1] for box in boxes if (common := part.common(box)) is not None]
        held[rank] = (*held.get(rank, ()), *found)


def _part_of(part: Part, values: Shard, held: Box, common: tuple[Box, Box]) -> Shard:
    """Return the canonical view of a common box; for a LazyShard, another LazyShard of it."""
    stored, saved = common
    if isinstance(values, torch.Tensor):
        return part.view(values, held, stored)
    lazy = values
    whole = tuple(slice(0, size) for size in held.shape)
    return LazyShard(saved.shape, lambda: part.view(lazy[whole], held, stored))


def _revert(model: Any, stored: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return these stored tensors as transformers saves them."""
    from transformers.core_model_loading import revert_weight_conversion

    return revert_weight_conversion(model, dict(stored))


def _trace(
    model: Any, stored: Mapping[str, torch.Tensor], saved: Mapping[str, torch.Tensor]
) -> dict[str, tuple[Part, ...]]:
    """Return the parts of each stored parameter that is saved under other names or shapes."""
    # The conversion makes new tensors; copying them into `homes` shows their sources.
    homes = {name: torch.empty_like(v, device="meta") for name, v in saved.items()}

    def save(pairs: list[tuple[str, torch.Tensor]]) -> None:
        for name, values in _revert(model, dict(pairs)).items():
            homes[name].copy_(values)

    params = {name: Param(tuple(values.shape), values.dtype) for name, values in stored.items()}
    found = trace(save, homes, params)
    if found.opaque:
        name, reason = next(iter(found.opaque.items()))
        raise ModelError(
            f"{type(model).__name__}: transformers saves {name} in a way that boxes cannot "
            f"describe ({reason}), so its weights cannot be brought to an engine"
        )

    # A parameter that is saved as it is needs no parts.
    parts = {}
    for name, pieces in found.pieces.items():
        own = tuple(_part(box, window, saved[window.tensor].shape) for box, window in pieces)
        full = Box.full(params[name].shape)
        if own != (Part(full, name, full, tuple(range(len(full.start)))),):
            parts[name] = own
    return parts


def _part(box: Box, window: Window, shape: torch.Size) -> Part:
    """Return a piece as a Part: its window is a box of the contiguous tensor of `shape`."""
    strides = strides_of(shape)
    start = tuple(window.offset // step % size for step, size in zip(strides, shape, strict=True))
    # Along each canonical dimension runs the stored one with its stride.
    dims = []
    stop = []
    unused = [dim for dim, size in enumerate(window.size) if size > 1]
    ones = [dim for dim, size in enumerate(window.size) if size == 1]
    for dim, step in enumerate(strides):
        along = next((d for d in unused if window.stride[d] == step and shape[dim] > 1), None)
        if along is None:  # one index alone
            along = ones.pop()
        else:
            unused.remove(along)
        dims.append(along)
        stop.append(start[dim] + window.size[along])
    if unused:
        raise ModelError(f"{window.tensor}: what is saved there is no box of it")
    return Part(box, window.tensor, Box(start, tuple(stop)), tuple(dims))
