"""The weights of vLLM's model, written box by box into the places that its own loader names.

A parameter of the checkpoint may be fused, cut, padded or repacked by vLLM. Where its boxes go is
asked of vLLM's loader (kit/tracing), not written down here:

    canonical box --window--> tensor of a layer, as the loader knows it
                                 |
              direct             | processed
              the live tensor    | a tensor made for this update; vLLM's own processing of the layer
              is that tensor     | then brings its values into the live ones (packed for a CPU, say)

In both cases the live tensors keep their storage, so CUDA graphs stay valid.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from hybridflow.backends.vllm.patches import process_as_at_first
from hybridflow.core.errors import ModelError
from hybridflow.core.values.weights import Box, Param
from hybridflow.kit.tracing.coverage import uncovered, unfilled
from hybridflow.kit.tracing.proofs import WindowSums
from hybridflow.kit.tracing.proving import problems_of
from hybridflow.kit.tracing.tracer import LoaderMap, trace


class MappedWeights:
    """Where the boxes of each parameter go in the model of one rank, and how they come there."""

    def __init__(
        self, model: Any, model_config: Any, params: Mapping[str, Param], device: torch.device
    ):
        """Trace the loader. Raises ModelError for a parameter that it refuses."""
        self.model = model
        self.model_config = model_config
        self.params = dict(params)
        self.device = device
        self.layers = dict(model.named_modules())
        with self._on_meta():
            tensors = tensors_of(model)
            self.map: LoaderMap = trace(model.load_weights, tensors, params)
            problems = list(uncovered(self.map, tensors))
        self._targets = frozenset().union(*self.map.touched.values())
        """Tensors that take values; the others are constants, such as scales of attention."""
        for name, reason in self.map.opaque.items():
            if not self.map.touched[name]:
                raise ModelError(f"{type(model).__name__} of vLLM does not take {name}: {reason}")
        for problem in problems:
            raise self._problem(problem)
        self.direct: set[str] = set()
        """Layers whose live tensors hold values as they are loaded."""
        self._open: set[str] = set()
        """Layers that this update has made tensors for, as the loader knows them."""
        self._lacks: dict[str, int] = {}
        """The number of elements that each of them lacks, if boxes bring them all."""
        self._written: set[str] = set()
        """Direct layers that this update has written into."""
        self.sums = WindowSums(self.map.pieces)

    # --- what this rank takes ---

    def boxes(self, name: str) -> tuple[Box, ...]:
        """Return the boxes of a parameter that this rank takes: all of an opaque one."""
        if name in self.map.opaque:
            return (Box.full(self.params[name].shape),)
        return self.map.boxes(name)

    # --- an update ---

    @torch.no_grad()
    def begin(self) -> None:
        """Begin an update; what an earlier one left half done is dropped."""
        from vllm.model_executor.model_loader.reload import layerwise

        # An earlier update may have ended half-way.
        if self._open or self._written:
            self._finalize()
        layerwise.initialize_layerwise_reload(self.model)
        # Live tensors that take values as they are need no second form.
        for name in self.direct:
            layer = self.layers[name]
            layerwise._place_kernel_tensors(layer, self._info(name))
            self._info(name).reset()
            # No parameter brings their padding either.
            self._fill(name)
        self._lacks = self._elements()

    def _elements(self) -> dict[str, int]:
        """Return layer -> the number of elements that boxes bring to it.

        Layers into which vLLM's loader writes are left out: they are whole at the update's end.
        """
        # Windows count, not boxes: a box may go to two of them.
        elements: dict[str, int] = {}
        for pieces in self.map.pieces.values():
            for box, window in pieces:
                layer = _layer(window.tensor)
                elements[layer] = elements.get(layer, 0) + box.numel
        for name in self.map.opaque:
            for tensor in self.map.touched[name]:
                elements.pop(_layer(tensor), None)
        return elements

    @torch.no_grad()
    def receive(self, name: str, box: Box, values: torch.Tensor) -> None:
        """Copy a box into its windows; a box may be a part of one that this rank takes.

        A layer that is whole is processed at once, so that few are there in two forms.
        """
        for own, window in self.map.pieces[name]:
            common = box.intersect(own)
            if common is None:
                continue
            target = window.of(self._home(window.tensor))
            target[common.within(own)].copy_(values[common.within(box)])

            layer = _layer(window.tensor)
            if layer in self._lacks and layer not in self.direct:
                self._lacks[layer] -= common.numel
                if not self._lacks[layer]:
                    self._process(layer)

    @torch.no_grad()
    def load(self, name: str, whole: torch.Tensor) -> None:
        """Load a whole parameter, an opaque one, by vLLM's own loader."""
        for tensor in self.map.touched[name]:
            self._home(tensor)
        self.sums.take(name, whole)
        self.model.load_weights([(name, whole)])

    @torch.no_grad()
    def end(self) -> None:
        """Let vLLM process the layers that were written and are not processed yet."""
        # What live tensors are the source of: packed copies, absorbed projections
        for name in self._written:
            _process_again(self.layers[name])
        for name in list(self._open):
            self._process(name)
        self._finalize()

    def _process(self, layer: str) -> None:
        """Bring the values of a layer into its live tensors by vLLM's own processing."""
        from vllm.model_executor.model_loader.reload import layerwise

        # Packed values cannot be read back, so they are proven here.
        self._look(layer)
        process_as_at_first(self.layers[layer])
        layerwise._layerwise_process(self.layers[layer], self._info(layer))
        self._open.discard(layer)

    def _look(self, layer: str) -> None:
        """Add up what the tensors of a layer hold, as the loader knows them."""
        for full, tensor in self._taking(layer):
            self.sums.look(full, tensor)

    def held(self) -> dict[str, int]:
        """Return the checksums of what a proof wants."""
        for layer in self.direct | self._open:
            self._look(layer)
        sums = self.sums.totals()
        return {name: sums.get(name, 0) for name in self.sums.wanted}

    @property
    def unreadable(self) -> set[str]:
        """The parameters that outside of an update lie in no tensor as they came."""
        packed = {
            name
            for name, pieces in self.map.pieces.items()
            if any(_layer(window.tensor) not in self.direct for _, window in pieces)
        }
        return packed | set(self.map.opaque)

    def _finalize(self) -> None:
        """Put back what was not written, and let attention layers derive what they need."""
        from vllm.model_executor.model_loader.reload import layerwise

        layerwise.finalize_layerwise_reload(self.model, self.model_config)
        self._open.clear()
        self._written.clear()

    def _home(self, name: str) -> torch.Tensor:
        """Return the tensor that takes values: the live one, or one made for this update."""
        layer, _, tensor = name.rpartition(".")
        if layer in self.direct:
            self._written.add(layer)
        elif layer not in self._open:
            self._open.add(layer)
            self._materialize(layer)
        return getattr(self.layers[layer], tensor)

    def _materialize(self, layer: str) -> None:
        """Make real tensors of a layer's meta tensors, with the constants of the loader in them."""
        from vllm.model_executor.model_loader.reload import layerwise

        module = self.layers[layer]
        info = self._info(layer)
        layerwise.materialize_layer(module, info)
        live = info.kernel_tensors[0] | info.kernel_tensors[1]
        for own, tensor in layerwise.get_layer_tensors(module).items():
            tensor.weight_loader = layerwise._get_original_loader(tensor)
            constant = _full(layer, own) not in self._targets
            if constant and own in live and live[own].shape == tensor.shape:
                tensor.data.copy_(live[own])
        self._fill(layer)

    def _fill(self, layer: str) -> None:
        """Write the constants of the loader into a layer's tensors, such as padding."""
        for window, value in self.map.fills:
            owner, _, tensor = window.tensor.rpartition(".")
            if owner == layer:
                window.of(getattr(self.layers[layer], tensor)).fill_(value)

    def _info(self, layer: str) -> Any:
        from vllm.model_executor.model_loader.reload import layerwise

        return layerwise.get_layerwise_info(self.layers[layer])

    @contextmanager
    def _on_meta(self) -> Iterator[None]:
        """Give the layers meta tensors as the loader knows them; put the live ones back behind."""
        from vllm.model_executor.model_loader.reload import layerwise

        for name, layer in self.layers.items():
            info = self._info(name)
            info.kernel_tensors = layerwise.get_layer_params_buffers(layer)
            info.kernel_non_persistent_buffers = set(layer._non_persistent_buffers_set)
            layerwise.restore_layer_on_meta(layer, info)
            # After an earlier reload loaders are wrapped, and then load nothing.
            for tensor in layerwise.get_layer_tensors(layer).values():
                tensor.weight_loader = layerwise._get_original_loader(tensor)
        try:
            yield
        finally:
            for name, layer in self.layers.items():
                info = self._info(name)
                if info.kernel_tensors is not None:
                    layerwise._place_kernel_tensors(layer, info)
                info.reset()

    # --- the proof ---

    @torch.no_grad()
    def prove(self) -> None:
        """Load known values by vLLM's loader, and compare them with what the map says.

        The layers that share a parameter are loaded together, so that few tensors are there at a
        time. It also finds the direct layers. The model's weights mean nothing afterwards. Raises
        ModelError where the map is not what the loader does, or a tensor gets no values.
        """
        with self._on_meta():
            for layers, names in self._together():
                for layer in layers:
                    self._materialize(layer)
                tensors = dict(pair for layer in layers for pair in self._taking(layer))
                load = self.model.load_weights
                for problem in problems_of(load, self.map, self.params, tensors, names, {}):
                    raise self._problem(problem)
                self.direct.update(layer for layer in layers if self._is_direct(layer))
        for name in unfilled(tensors_of(self.model), self._targets):
            raise self._problem(f"none of the checkpoint's parameters gives {name} its values")

    def _together(self) -> Iterator[tuple[list[str], list[str]]]:
        """Yield (layers, parameters): the parameters that are loaded into these layers alone."""
        from vllm.model_executor.model_loader.reload import layerwise

        # Layers that a parameter joins are in one set.
        group_of = {
            name: {name}
            for name, layer in self.layers.items()
            if layerwise.get_layer_tensors(layer)
        }
        for tensors in self.map.touched.values():
            joined: set[str] = set()
            for tensor in tensors:
                joined |= group_of[_layer(tensor)]
            for layer in joined:
                group_of[layer] = joined

        # A parameter belongs to the set of any layer that it touches: they are one.
        names_of: dict[int, list[str]] = {}
        for name, tensors in self.map.touched.items():
            for tensor in list(tensors)[:1]:
                group = group_of[_layer(tensor)]
                names_of.setdefault(id(group), []).append(name)

        # Layers of one set share the object.
        seen: set[int] = set()
        for group in group_of.values():
            if id(group) not in seen:
                seen.add(id(group))
                yield sorted(group), names_of.get(id(group), [])

    def _taking(self, layer: str) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the layer's own tensors that take values, under their names in the model."""
        from vllm.model_executor.model_loader.reload import layerwise

        for own, tensor in layerwise.get_layer_tensors(self.layers[layer]).items():
            if _full(layer, own) in self._targets:
                yield _full(layer, own), tensor

    def _problem(self, what: str) -> ModelError:
        return ModelError(
            f"{type(self.model).__name__} of vLLM: {what}, so weights cannot be brought to their "
            "places; this engine cannot run the model"
        )

    def _is_direct(self, layer: str) -> bool:
        """Process the layer with random values; return whether its live tensors are what it got."""
        from vllm.model_executor.model_loader.reload import layerwise

        module = self.layers[layer]
        info = self._info(layer)
        if layerwise.is_deferred_attention_layer(module):
            return False
        for _, tensor in self._taking(layer):
            if tensor.is_floating_point():
                tensor.data.normal_()

        assert info.kernel_tensors is not None
        live = info.kernel_tensors[0] | info.kernel_tensors[1]
        loaded = {
            name: tensor.clone() for name, tensor in layerwise.get_layer_tensors(module).items()
        }
        # Values can stay where they are only in a tensor of the same form.
        fits = all(
            name in live
            and live[name].shape == tensor.shape
            and live[name].stride() == tensor.stride()
            and live[name].dtype == tensor.dtype
            for name, tensor in loaded.items()
        )
        process_as_at_first(module)
        try:
            layerwise._layerwise_process(module, info)
        except RuntimeError as error:
            raise self._problem(
                f"its processing of {type(module).__name__} {layer} works only once ({error})"
            ) from error
        return fits and all(torch.equal(live[name], tensor) for name, tensor in loaded.items())


def _process_again(layer: Any) -> None:
    """Let vLLM derive again what it derives from a layer's weights."""
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

    if isinstance(getattr(layer, "quant_method", None), QuantizeMethodBase):
        process_as_at_first(layer)
        layer.quant_method.process_weights_after_loading(layer)


def tensors_of(model: Any) -> dict[str, torch.Tensor]:
    """Return the model's parameters and buffers by name."""
    tensors = dict(model.named_buffers(remove_duplicate=False))
    return tensors | dict(model.named_parameters(remove_duplicate=False))


def _layer(tensor: str) -> str:
    """Return the name of the layer that a tensor of the model belongs to."""
    return tensor.rpartition(".")[0]


def _full(layer: str, tensor: str) -> str:
    """Return a tensor's name in the model from its layer's and its own."""
    return f"{layer}.{tensor}" if layer else tensor
