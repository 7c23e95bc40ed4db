"""A model that generates and is not trained: its weights are read from files, one by one.

    the model's folder     safetensors      \
    a run's checkpoint     boxes of entries  >  shards that are read when an engine asks for them
    and its adapters       A and B          /

An engine gets them as it gets a trainer's, by a sync. No rank keeps a parameter after it is read.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from hybridflow.core.contracts.training import TrainingBackend
from hybridflow.core.errors import HybridFlowError, ModelError
from hybridflow.core.values.weights import Box, LazyShard, Param, Shard, WeightLayout
from hybridflow.kit.checkpoint import SavedState

if TYPE_CHECKING:
    from hybridflow.kit.huggingface.loading import Folder
    from hybridflow.kit.huggingface.saved import SavedForm

MODEL = "model."
"""Prefix of the entries of a checkpoint's weights."""


class SavedBackend(TrainingBackend):
    """A plugin of kind "training_backend", name "saved"; every rank reads by itself."""

    _hf: Any
    """The class of the model, for exports."""
    _hf_config: Any
    """The Hugging Face config of the model, for exports."""
    _form: SavedForm
    """The mapping of a checkpoint's parameters to the canonical ones."""
    _folder: Folder | None
    """The files of the model's own folder; None where only transformers can read them."""
    _built: dict[str, torch.Tensor]
    """Canonical parameters of the model, whole on the host, where transformers has to build it."""
    _state: SavedState | None
    """The checkpoint; None without one."""
    _params: dict[str, Param]
    """The canonical parameters, in the dtypes of their files."""
    _common: torch.dtype
    """The dtype of the largest of them, which most parameters have."""
    _sources: dict[str, str]
    """Canonical parameter -> its entry in the checkpoint, for those that it has."""
    _adapters: dict[str, str]
    """Canonical name of an adapter's A or B -> the checkpoint's entry."""
    _last: tuple[str, torch.Tensor] | None
    """The entry that was read last: several canonical parameters may be parts of one."""

    def build(self) -> None:
        """Find the file of each parameter; no values are read."""
        from hybridflow.kit.huggingface.loading import empty_model
        from hybridflow.kit.huggingface.saved import SavedForm

        model, self._hf_config = empty_model(self.model_spec, torch.float32)
        self._hf = type(model)
        self._form = SavedForm.of(model)
        self._last = None
        self._state = None
        self._sources = {}
        self._params = {}
        self._adapters = {}
        if self.config.checkpoint is not None:
            self._open_checkpoint(Path(self.config.checkpoint))
        self._open_folder(self._form.shapes.keys() - self._params.keys())
        self._common = max(self._params.values(), key=lambda param: param.numel).dtype

    def _open_checkpoint(self, folder: Path) -> None:
        """Note the parameters that a checkpoint has. Raises CheckpointError and ModelError."""
        self._state = SavedState(folder, self.context.role)
        self.version = self._state.version

        # Adapters are not parameters of the model: they are merged into others.
        stored = {}
        for entry, (shape, dtype) in self._state.entries.items():
            name = entry.removeprefix(MODEL)
            if name == entry:
                continue
            if ".lora_A." in name or ".lora_B." in name:
                self._adapters[name] = entry
                continue
            stored[name] = Param(shape, dtype)
        if self._adapters and self.config.lora is None:
            raise ModelError(
                f"{folder} is a checkpoint of adapters ({min(self._adapters)}); their scale is "
                "needed to merge them: set backend.lora as in the run"
            )
        for name, param in stored.items():
            for canonical, box, _ in self._form.shards([(name, Box.full(param.shape), _unread)]):
                if canonical not in self._form.shapes:
                    raise ModelError(
                        f"{folder} has {canonical}, which this model does not: only a policy "
                        "generates, and not a value or score model"
                    )
                shape = self._form.shapes[canonical]
                if box != Box.full(shape):
                    raise ModelError(f"{folder}: {name} has a part of {canonical}, not all of it")
                self._params[canonical] = Param(shape, param.dtype)
                self._sources[canonical] = name

    def _open_folder(self, lacking: set[str]) -> None:
        """Note where the other parameters are."""
        from hybridflow.kit.huggingface.loading import Folder, build_hf_model

        self._folder = None
        self._built = {}
        if not lacking:
            return
        spec = self.model_spec
        if spec.path is not None and not spec.hf_config.get("quantization_config"):
            folder = Folder.of(Path(spec.path))
            dtypes = folder.dtypes()
            # Files of another form are left to transformers.
            if lacking <= dtypes.keys():
                self._folder = folder
                for name in lacking:
                    self._params[name] = Param(self._form.shapes[name], dtypes[name])
                return

        model, _ = build_hf_model(spec, getattr(self._hf_config, "dtype", None) or torch.float32)
        for name, values in self._form.whole(model.state_dict().items()):
            if name in lacking:
                self._built[name] = values
                self._params[name] = Param(tuple(values.shape), values.dtype)

    # --- weights ---

    def layout(self) -> WeightLayout:
        """Return a layout in which every rank has all parameters whole."""
        params = {}
        for name in self._form.shapes:
            param = self._params[name]
            params[name] = Param(param.shape, self._given(param.dtype))
        boxes = {name: (Box.full(param.shape),) for name, param in params.items()}
        ranks = range(self.context.layout.world)
        return WeightLayout(params, dict.fromkeys(ranks, boxes), dict(self._form.ties))

    def _given(self, stored: torch.dtype) -> torch.dtype:
        """Return the dtype of a parameter for engines and exports; wider ones keep their own."""
        wide = stored == torch.float32 and self._common != torch.float32
        if self.config.dtype == "auto" or wide:
            return stored
        dtype: torch.dtype = getattr(torch, self.config.dtype)
        return dtype

    def named_shards(self) -> Iterator[tuple[str, Box, Shard]]:
        """Yield the parameters, each of which is read from its file when its values are."""
        for name in self._form.shapes:
            shape = self._params[name].shape
            yield name, Box.full(shape), LazyShard(shape, partial(self._read, name))

    def full_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the parameters, read one after the other."""
        for name in self._form.shapes:
            yield name, self._read(name)

    def _read(self, name: str) -> torch.Tensor:
        """Return a canonical parameter, on the host, with adapters merged."""
        values = self._unmerged(name).to(self._given(self._params[name].dtype))
        lora = self.config.lora
        layer = name.removesuffix(".weight")
        pair = [f"{layer}.lora_{side}.weight" for side in "AB"]
        if self._state is None or lora is None or pair[0] not in self._adapters:
            return values

        from hybridflow.kit.huggingface.lora import merge

        a, b = (self._state.read(self._adapters[side]) for side in pair)
        return merge(values, a, b, lora.alpha / lora.rank, Box.full(values.shape))

    def _unmerged(self, name: str) -> torch.Tensor:
        """Return a canonical parameter as its file has it."""
        if name in self._built:
            return self._built[name]
        if name not in self._sources:
            assert self._folder is not None
            param = self._params[name]
            values = torch.empty(param.shape, dtype=param.dtype)
            self._folder.read([(name, Box.full(param.shape), values)])
            return values

        # An entry may hold many (the experts of a layer), which are read one after the other.
        source = self._sources[name]
        if self._last is None or self._last[0] != source:
            assert self._state is not None
            self._last = None
            self._last = (source, self._state.read(MODEL + source))
        whole = self._last[1]
        parts = self._form.shards([(source, Box.full(whole.shape), whole)])
        part = next(values for canonical, _, values in parts if canonical == name)
        assert isinstance(part, torch.Tensor)
        return part

    # --- files ---

    def export_hf(self, folder: Path, dtype: torch.dtype | None = None) -> None:
        """Write the model with adapters merged; without `dtype` in that of most of its weights."""
        from hybridflow.kit.huggingface.export import export_role

        generation = None
        if self._hf.can_generate():
            from transformers import GenerationConfig

            generation = GenerationConfig.from_model_config(self._hf_config)
        export_role(
            self.full_parameters(),
            self._hf,
            self._hf_config,
            generation,
            folder,
            dtype or self._given(self._common),
            self.context,
        )

    def export_adapter(self, folder: Path) -> None:
        """Write the checkpoint's adapters without the model, as peft reads them.

        Raises ModelError for a checkpoint that has none.
        """
        from hybridflow.kit.huggingface.lora import exported_config, write_adapter

        if self._state is None or self.config.lora is None or not self._adapters:
            raise ModelError(f"{self.config.checkpoint} is no checkpoint of adapters")
        layers = {name.rpartition(".lora_")[0] for name in self._adapters}
        values = {name: self._state.read(entry) for name, entry in self._adapters.items()}
        write_adapter(exported_config(self.config.lora, layers), values, folder)

    # --- not supported ---

    def forward(self, micros, needs, temperature=1.0):
        """Raise HybridFlowError."""
        self._refuse()

    def forward_backward(self, micros, needs, loss, temperature=1.0):
        """Raise HybridFlowError."""
        self._refuse()

    def optim_step(self):
        """Raise HybridFlowError."""
        self._refuse()

    def save(self, folder: Path) -> None:
        """Raise HybridFlowError."""
        self._refuse()

    def load(self, folder: Path) -> None:
        """Raise HybridFlowError."""
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise HybridFlowError(
            f"{self.context.role}: the backend saved reads weights for generation and computes "
            "nothing; name a backend that trains, such as fsdp"
        )


_unread = LazyShard((), lambda: torch.empty(()))
"""A placeholder for values where only names and boxes are needed."""
