"""Weights of a model whose tensors keep the form in which its loader fills them.

The loader is asked once where the boxes of each parameter go. From then on boxes are copied there,
and each rank receives its own alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import attrs
import torch

from hybridflow.core.contracts.rollout import Proof, Wanted
from hybridflow.core.errors import HybridFlowError, ModelError
from hybridflow.core.values.weights import Box, Param
from hybridflow.kit.arrivals import Arrivals
from hybridflow.kit.tracing.coverage import uncovered, unfilled
from hybridflow.kit.tracing.proofs import WindowSums
from hybridflow.kit.tracing.proving import problems_of
from hybridflow.kit.tracing.tracer import Load, LoaderMap, trace


class PlacedWeights:
    """Where the boxes of each parameter go in the tensors of one rank's model."""

    def __init__(
        self,
        load: Load,
        tensors: Mapping[str, torch.Tensor],
        params: Mapping[str, Param],
        ties: Mapping[str, str],
        who: str,
    ):
        """Trace the loader.

        `tensors`: the model's, by name. `who`: the model's name in messages. Raises ModelError for
        a parameter that the loader refuses.
        """
        self.load = load
        self.tensors = dict(tensors)
        self.params = dict(params)
        self.who = who
        self.map: LoaderMap = trace(load, self.tensors, self.params)
        for name, reason in self.map.opaque.items():
            if not self.map.touched[name]:
                raise ModelError(f"{who} does not take {name}: {reason}")
        self.aliases: dict[str, str] = {}
        """Tied names that have a tensor of their own -> the name whose values it holds."""
        self._fill_untied(ties)
        self.version: int | None = None
        """That of the update which `arrived` counts."""
        self._note_memory()
        self.begin(None)

    def _fill_untied(self, ties: Mapping[str, str]) -> None:
        """Bring tied values to a tensor of their own, where the model does not tie it."""
        for name, origin in ties.items():
            if not self._empty() or origin in self.map.opaque:
                return
            twin = trace(self.load, self.tensors, {name: self.params[origin]})
            pieces = twin.pieces.get(name, ())
            # A model that ties has no place for it, or takes it for the other one again.
            new = {window.tensor for _, window in pieces} & self._empty()
            if not new:
                continue

            # From now on the origin's boxes go to both tensors.
            self.aliases[name] = origin
            both = (*self.map.pieces[origin], *pieces)
            touched = self.map.touched[origin] | twin.touched[name]
            self.map = attrs.evolve(
                self.map,
                pieces={**self.map.pieces, origin: both},
                fills=tuple(dict.fromkeys((*self.map.fills, *twin.fills))),
                touched={**self.map.touched, origin: touched},
            )

    @property
    def _targets(self) -> frozenset[str]:
        """Tensors that take values; the others are constants."""
        return frozenset().union(*self.map.touched.values())

    def _empty(self) -> set[str]:
        return set(unfilled(self.tensors, self._targets))

    def boxes(self, name: str) -> tuple[Box, ...]:
        """Return the boxes of a parameter that this rank takes; () of an opaque one."""
        return () if name in self.map.opaque else self.map.boxes(name)

    def rebind(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Take the model's tensors as they are now; return whether any has other memory.

        An engine may replace them, and what is written into the old ones would be lost. Raises
        HybridFlowError for one of another form.
        """
        renewed = False
        for name in self._targets:
            now, before = tensors.get(name), self.tensors[name]
            if now is None or _form(now) != _form(before):
                form = "no tensor" if now is None else _form(now)
                raise HybridFlowError(f"{self.who}: {name} is {form} now, and was {_form(before)}")
            renewed |= now.data_ptr() != self._pointers[name]
        self.tensors = dict(tensors)
        self._note_memory()
        return renewed

    def _note_memory(self) -> None:
        self._pointers = {name: self.tensors[name].data_ptr() for name in self._targets}

    def begin(self, version: int | None) -> None:
        """Begin an update: nothing of it has arrived."""
        self.version = version
        self.arrived = Arrivals({name: self.boxes(name) for name in self.params})

    @torch.no_grad()
    def fill(self) -> None:
        """Write the constants of the loader, such as padding, which no parameter brings."""
        for window, value in self.map.fills:
            window.of(self.tensors[window.tensor]).fill_(value)

    @torch.no_grad()
    def receive(self, name: str, box: Box, values: torch.Tensor) -> None:
        """Copy a box to its places; it may be a part of one that this rank takes."""
        self.arrived.note(name, box)
        for own, window in self.map.pieces[name]:
            common = box.intersect(own)
            if common is not None:
                target = window.of(self.tensors[window.tensor])
                target[common.within(own)].copy_(values[common.within(box)])

    def proof(self, wanted: Wanted) -> Proof:
        """Return what the model's tensors hold of these boxes, and which version brought it."""
        sums = self._sums
        sums.expect(wanted)
        for tensor in self._targets:
            sums.look(tensor, self.tensors[tensor])
        values = sums.totals()
        return {
            name: (self.version if self.arrived.whole(name) else None, values.get(name, 0))
            for name in wanted
        }

    @cached_property
    def _sums(self) -> WindowSums:
        return WindowSums(self.map.pieces)

    # --- the proof ---

    @torch.no_grad()
    def prove(self) -> None:
        """Load known values by the loader, and compare every element with what the map says.

        The model's weights are NaN afterwards. Raises ModelError where the map is not what the
        loader does, or a tensor gets no values.
        """
        for name in sorted(self._empty()):
            raise self._problem(f"none of the checkpoint's parameters gives {name} its values")
        for problem in uncovered(self.map, self.tensors):
            raise self._problem(problem)

        twins: dict[str, list[str]] = {}
        for twin, origin in self.aliases.items():
            twins.setdefault(origin, []).append(twin)
        targets = {name: self.tensors[name] for name in self._targets}
        for problem in problems_of(
            self.load, self.map, self.params, targets, list(self.params), twins
        ):
            raise self._problem(problem)

    def _problem(self, what: str) -> ModelError:
        return ModelError(
            f"{self.who}: {what}, so weights cannot be brought to their places; this engine cannot "
            "run the model"
        )


def _form(tensor: torch.Tensor) -> tuple:
    """Return what windows depend on."""
    return tuple(tensor.shape), tensor.stride(), tensor.dtype
