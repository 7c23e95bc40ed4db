"""The weights of vLLM's model, copied box by box to where its own loader would put them.

A parameter of the checkpoint may be fused, cut, padded or repacked by vLLM. The positions of its
boxes are found by tracing vLLM's loader (kit/tracing):

    canonical box --window--> tensor of a layer, as the loader knows it
                                 |
              direct             | processed
              the live tensor    | a tensor made for this update; vLLM's own processing of the layer
              is that tensor     | then brings its values into the live ones (packed for a CPU, say)

In both cases the live tensors keep their storage, so CUDA graphs stay valid.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from hybridflow.backends.vllm.patches import process_as_at_first
from hybridflow.core.values.weights import Box, Param
from hybridflow.kit.tracing.coverage import unfilled
from hybridflow.kit.tracing.placed import STAGED, PlacedWeights
from hybridflow.kit.tracing.proving import take_pattern, write_pattern


class MappedWeights(PlacedWeights):
    """The weights of one rank of vLLM; layers that it processes get values in their loaded form."""

    def __init__(
        self,
        model: Any,
        model_config: Any,
        params: Mapping[str, Param],
        ties: Mapping[str, str],
        device: torch.device,
    ):
        """Trace the loader. Raises ModelError for a parameter that it refuses."""
        self.model = model
        self.model_config = model_config
        self.layers = dict(model.named_modules())
        with self._on_meta():
            who = f"{type(model).__name__} of vLLM"
            super().__init__(model.load_weights, tensors_of(model), params, ties, who, device)
        self.direct: set[str] = set()
        """Layers whose live tensors have the values exactly as loaded."""
        self._processed: set[tuple] = set()
        """Kinds of layers whose live tensors differ from the loaded ones."""
        self._open: set[str] = set()
        """Layers for which this update has made tensors in the loaded form."""
        self._lacks: Counter[str] = Counter()
        """The number of parameters that each layer lacks in this update."""

    # --- an update ---

    @torch.no_grad()
    def begin(self, version: int) -> None:
        """Begin an update; an unfinished earlier one is dropped."""
        from vllm.model_executor.model_loader.reload import layerwise

        # An earlier update may have ended half-way.
        if self.updating:
            self._finalize()
        super().begin(version)
        layerwise.initialize_layerwise_reload(self.model)
        # Live tensors that get the values exactly as loaded need no second form.
        for name in self.direct:
            layer = self.layers[name]
            layerwise._place_kernel_tensors(layer, self._info(name))
            self._info(name).reset()
            # Their padding belongs to no parameter either.
            self._fill(name)

        self._lacks.clear()
        for name, boxes in self.arrived.held.items():
            if any(box.numel for box in boxes):
                self._lacks.update(self._layers_of(name))
        # Where a loader computes, what it keeps may come later: until the end one is lacking.
        for name in self.map.opaque:
            self._lacks.update(self._layers_of(name))

    def _layers_of(self, name: str) -> set[str]:
        """Return the layers into which the loader writes a parameter."""
        return {_layer(tensor) for tensor in self.map.touched[name]}

    @torch.no_grad()
    def came(self, name: str) -> None:
        """Process the layers that are complete, so that few exist in two forms."""
        # vLLM's loader writes into these.
        if name in self.map.opaque:
            for tensor in self.map.touched[name]:
                self.tensor(tensor)
        super().came(name)
        for layer in self._layers_of(name):
            self._lacks[layer] -= 1
            if not self._lacks[layer] and layer in self._open:
                self._process(layer)

    @torch.no_grad()
    def end(self) -> None:
        """Let vLLM process the layers that were written and are not processed yet."""
        self.arrived.check()
        # Tensors that are computed from live ones: packed copies, absorbed projections
        for name in self.direct:
            _process_again(self.layers[name])
        for name in list(self._open):
            self._process(name)
        self._finalize()
        super().end()

    def _process(self, layer: str) -> None:
        """Move the values of a layer into its live tensors by vLLM's own processing."""
        from vllm.model_executor.model_loader.reload import layerwise

        # Packed values cannot be read back, so their checksums are computed here.
        self._look(layer)
        process_as_at_first(self.layers[layer])
        layerwise._layerwise_process(self.layers[layer], self._info(layer))
        self._open.discard(layer)

    def _look(self, layer: str) -> None:
        """Compute the checksums of a layer's tensors in their loaded form."""
        for full, tensor in self._taking(layer):
            self.sums.look(full, tensor)

    def readable(self) -> Iterator[str]:
        """Return the tensors with values as received; processed layers were read before that."""
        there = self.direct | self._open
        for name in super().readable():
            if name.startswith(STAGED) or _layer(name) in there:
                yield name

    def unreadable(self) -> set[str]:
        """Return the parameters whose values as received are in no tensor outside of an update."""
        packed = {name for name in self.params if not self._layers_of(name) <= self.direct}
        return packed.union(super().unreadable())

    def _finalize(self) -> None:
        """Restore tensors that were not written, and let attention layers recompute theirs."""
        from vllm.model_executor.model_loader.reload import layerwise

        layerwise.finalize_layerwise_reload(self.model, self.model_config)
        self._open.clear()

    def tensor(self, name: str) -> torch.Tensor:
        """Return a tensor to write to, by name: a live one, or one made for this update."""
        if name.startswith(STAGED):
            return super().tensor(name)
        layer, _, own = name.rpartition(".")
        if layer not in self.direct and layer not in self._open:
            self._open.add(layer)
            self._materialize(layer)
        return getattr(self.layers[layer], own)

    def _materialize(self, layer: str) -> None:
        """Allocate a layer's tensors in the loaded form, with the loader's constants in them."""
        from vllm.model_executor.model_loader.reload import layerwise

        module = self.layers[layer]
        info = self._info(layer)
        layerwise.materialize_layer(module, info)
        live = info.kernel_tensors[0] | info.kernel_tensors[1]
        for own, tensor in layerwise.get_layer_tensors(module).items():
            tensor.weight_loader = layerwise._get_original_loader(tensor)
            constant = _full(layer, own) not in self.targets
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
        """Replace the layers' tensors by meta tensors of the loaded form, and restore them."""
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
        """Load known values by vLLM's loader, and compare them with the traced map.

        The layers that share a parameter are loaded together, so that few tensors exist at a time.
        It also finds the direct layers. The model's weights are undefined afterwards. Raises
        ModelError where the loader does not follow the map, or a tensor gets no values.
        """
        with self._on_meta():
            for layers, names in self._together():
                for layer in layers:
                    self._materialize(layer)
                tensors = dict(pair for layer in layers for pair in self._taking(layer))
                self.compare(names, tensors, {})
                self.direct.update(layer for layer in layers if self._is_direct(layer))
        for name in unfilled(tensors_of(self.model), self.targets):
            raise self.problem(f"none of the checkpoint's parameters gives {name} its values")

    def _together(self) -> Iterator[tuple[list[str], list[str]]]:
        """Yield (layers, parameters) such that the parameters are loaded only into these layers."""
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
        """Yield the layer's own tensors that get loaded values, with their names in the model."""
        from vllm.model_executor.model_loader.reload import layerwise

        for own, tensor in layerwise.get_layer_tensors(self.layers[layer]).items():
            if _full(layer, own) in self.targets:
                yield _full(layer, own), tensor

    def _is_direct(self, layer: str) -> bool:
        """Process the layer with known values; return whether its live tensors keep them."""
        from vllm.model_executor.model_loader.reload import layerwise

        module = self.layers[layer]
        info = self._info(layer)
        if layerwise.is_deferred_attention_layer(module):
            return False

        # If a layer's live tensors differ, equal layers are not tested: processing a layer in each
        # update is always correct.
        kind: tuple = (type(module), type(getattr(module, "quant_method", None)))
        for name, tensor in layerwise.get_layer_tensors(module).items():
            kind += (name, tuple(tensor.shape), tensor.stride(), tensor.dtype)
        if kind in self._processed:
            return False
        assert info.kernel_tensors is not None
        live = info.kernel_tensors[0] | info.kernel_tensors[1]
        loaded = layerwise.get_layer_tensors(module)
        constants = {}
        for name, tensor in loaded.items():
            if _full(layer, name) in self.targets and tensor.is_floating_point():
                write_pattern(name, tensor.data)
            else:
                constants[name] = tensor.clone()
        # A live tensor can hold the loaded values only if its shape and dtype are the same.
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
            raise self.problem(
                f"its processing of {type(module).__name__} {layer} works only once ({error})"
            ) from error
        direct = fits and all(
            torch.equal(live[name], constants[name])
            if name in constants
            else take_pattern(name, Param(form.shape, form.dtype), Box.full(form.shape), live[name])
            for name, form in loaded.items()
        )
        if not direct:
            self._processed.add(kind)
        return direct


def _process_again(layer: Any) -> None:
    """Make vLLM recompute the tensors that it derives from a layer's weights."""
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
