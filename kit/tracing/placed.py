"""Weights of an engine's model, copied box by box to where its own loader would put them.

The loader is traced once to find where the boxes of each parameter go. From then on boxes are
copied there, and each rank receives only its own:

    box --window--> tensor of the model
    box ----------> staged tensor --the loader, once it is whole--> tensors of the model

The second way is for opaque parameters, which the loader does not simply copy box by box.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import attrs
import torch

from hybridflow.core.contracts.rollout import Proof, Wanted
from hybridflow.core.errors import HybridFlowError, ModelError
from hybridflow.core.values.weights import Box, Param
from hybridflow.kit.arrivals import Arrivals, check_box
from hybridflow.kit.tracing.coverage import unfilled
from hybridflow.kit.tracing.proofs import WindowSums
from hybridflow.kit.tracing.proving import problems_of
from hybridflow.kit.tracing.tracer import Load, LoaderMap, trace
from hybridflow.kit.tracing.windows import Window, strides_of

STAGED = "staged:"
"""Prefix of the names of staged tensors, before the parameter's name."""


class PlacedWeights:
    """Where the boxes of each parameter go in the tensors of one rank's model."""

    def __init__(
        self,
        load: Load,
        tensors: Mapping[str, torch.Tensor],
        params: Mapping[str, Param],
        ties: Mapping[str, str],
        who: str,
        device: torch.device,
    ):
        """Trace the loader.

        `tensors`: the model's, by name, on any device. `who`: the model's name in messages.
        `device`: that of the model. Raises ModelError for a parameter that the loader refuses.
        """
        self.load = load
        self.tensors = dict(tensors)
        self.params = dict(params)
        self.ties = dict(ties)
        self.who = who
        self.device = device
        self.map: LoaderMap = trace(load, self.tensors, self.params)
        for name, reason in self.map.opaque.items():
            if not self.map.touched[name]:
                raise ModelError(f"{who} does not take {name}: {reason}")
        self.aliases: dict[str, str] = {}
        """Tied names that have a tensor of their own -> the name whose values it holds."""
        self.version: int | None = None
        """Version of the update that `arrived` counts."""
        self.updating = False
        self._staged: dict[str, torch.Tensor] = {}
        """The tensors that this update has made for opaque parameters, by the parameter's name."""
        self._settle()

    def _settle(self) -> None:
        """Compute the attributes that follow from the loader's map."""
        staged = {}
        for name in self.map.opaque:
            shape = self.params[name].shape
            window = Window(STAGED + name, 0, shape, tuple(strides_of(shape)))
            staged[name] = ((Box.full(shape), window),)
        self.pieces = {**self.map.pieces, **staged}
        self.sums = WindowSums(self.pieces)
        self.targets = frozenset().union(*self.map.touched.values())
        """The model's tensors that take values; the others are constants."""
        self.arrived = Arrivals({name: self.boxes(name) for name in self.params})

    def boxes(self, name: str) -> tuple[Box, ...]:
        """Return the boxes of a parameter that this rank takes: all of an opaque one."""
        if name in self.map.opaque:
            return (Box.full(self.params[name].shape),)
        return self.map.boxes(name)

    def untie(self) -> None:
        """Copy tied values also to the second tensor, where the engine's model does not tie it."""
        for name, origin in self.ties.items():
            if not self._empty() or origin in self.map.opaque:
                return
            twin = trace(self.load, self.tensors, {name: self.params[origin]})
            pieces = twin.pieces.get(name, ())
            # A model that ties has no such tensor, or the same one under both names.
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
            self._settle()

    def _empty(self) -> set[str]:
        return set(unfilled(self.tensors, self.targets))

    # --- an update ---

    def rebind(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Replace the model's tensors by `tensors`, which the engine may have allocated anew.

        Values written into the old ones would be lost. Raises HybridFlowError for a tensor whose
        shape, strides or dtype differ.
        """
        for name in self.targets:
            now = tensors.get(name)
            before = self.tensors[name]
            if now is None or _form(now) != _form(before):
                form = "no tensor" if now is None else _form(now)
                raise HybridFlowError(f"{self.who}: {name} is {form} now, and was {_form(before)}")
        self.tensors = dict(tensors)

    def begin(self, version: int) -> None:
        """Begin an update; an unfinished earlier one is dropped."""
        self.version = version
        self.updating = True
        self._staged.clear()
        self.arrived = Arrivals(self.arrived.held)

    @torch.no_grad()
    def fill(self) -> None:
        """Write the constants of the loader, such as padding, which belong to no parameter."""
        for window, value in self.map.fills:
            window.of(self.tensor(window.tensor)).fill_(value)

    @torch.no_grad()
    def receive(self, name: str, box: Box, values: torch.Tensor) -> None:
        """Copy a box to its windows; it may be a part of one that this rank reads.

        Raises HybridFlowError for a name or shape that the model does not have, and for elements
        that have arrived before.
        """
        check_box(self.params, self.ties, name, box, values)
        whole = self.arrived.note(name, box)
        for own, window in self.pieces[name]:
            common = box.intersect(own)
            if common is not None:
                target = window.of(self.tensor(window.tensor))
                target[common.within(own)].copy_(values[common.within(box)])
        if whole:
            self.came(name)

    def tensor(self, name: str) -> torch.Tensor:
        """Return a tensor by name: one of the model's, or a staged one."""
        if not name.startswith(STAGED):
            return self.tensors[name]
        own = name.removeprefix(STAGED)
        if own not in self._staged:
            param = self.params[own]
            self._staged[own] = torch.empty(param.shape, dtype=param.dtype, device=self.device)
        return self._staged[own]

    def came(self, name: str) -> None:
        """Pass an opaque parameter, which is now whole, to the loader."""
        # The proof reads the staged values, and a loader may change its argument.
        if name in self.map.opaque:
            self.load([(name, self._staged[name].clone())])

    def end(self) -> None:
        """End the update. Raises HybridFlowError where a part of a parameter is missing."""
        self.arrived.check()
        self._staged.clear()
        self.updating = False

    # --- checksums ---

    def expect(self, wanted: Wanted) -> None:
        """Note the boxes that the next proof is about."""
        self.sums.expect(wanted)

    def proof(self) -> Proof:
        """Return, for each expected parameter, its version and the checksum of its boxes.

        For opaque parameters the checksum is that of the values passed to the loader; outside of an
        update the version is None.
        """
        for tensor in self.readable():
            self.sums.look(tensor, self.tensor(tensor))
        values = self.sums.totals()
        unread = () if self.updating else self.unreadable()
        return {
            name: (
                self.version if self.arrived.whole(name) else None,
                None if name in unread else values.get(name, 0),
            )
            for name in self.sums.wanted
        }

    def readable(self) -> Iterable[str]:
        """Return the names of tensors that now have the values exactly as received."""
        return (*self.targets, *(STAGED + name for name in self._staged))

    def unreadable(self) -> Collection[str]:
        """Return the parameters whose values as received are lost once the update has ended."""
        return self.map.opaque

    # --- the proof of the map ---

    @torch.no_grad()
    def prove(self) -> None:
        """Load known values by the loader, and compare every element with the traced map.

        The model's weights are NaN afterwards. Raises ModelError where the loader does not follow
        the map, or a tensor gets no values.
        """
        for name in sorted(self._empty()):
            raise self.problem(f"none of the checkpoint's parameters gives {name} its values")

        twins: dict[str, list[str]] = {}
        for twin, origin in self.aliases.items():
            twins.setdefault(origin, []).append(twin)
        targets = {name: self.tensors[name] for name in self.targets}
        self.compare(list(self.params), targets, twins)

    def compare(
        self,
        names: Sequence[str],
        tensors: Mapping[str, torch.Tensor],
        twins: Mapping[str, Sequence[str]],
    ) -> None:
        """Raise ModelError where the loader writes other values than the map predicts."""
        for problem in problems_of(self.load, self.map, self.params, tensors, names, twins):
            raise self.problem(problem)

    def problem(self, what: str) -> ModelError:
        return ModelError(
            f"{self.who}: {what}, so weights cannot be brought to their places; this engine cannot "
            "run the model"
        )


def _form(tensor: torch.Tensor) -> tuple:
    """Return the properties of a tensor on which windows depend: shape, strides and so on."""
    return tuple(tensor.shape), tensor.stride(), tensor.dtype
