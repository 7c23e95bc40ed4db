"""Settings of the backend that only reads weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import attrs

from hybridflow.core.contracts.footprint import Footprint
from hybridflow.core.contracts.training import TrainingSettings
from hybridflow.core.values.model_shape import ModelShape, ModelSize
from hybridflow.core.values.parallel import ParallelLayout
from hybridflow.kit.huggingface.config import LoRAConfig
from hybridflow.kit.huggingface.shapes import shape_of


@attrs.frozen
class SavedConfig(TrainingSettings):
    """Settings of the weights' files beside those of the model's own folder."""

    checkpoint: str | None = None
    """Folder of the role in a run's checkpoint (checkpoints/step-.../actor). Parameters that it
    lacks, such as the frozen ones of a model with adapters, come from the model's own folder."""
    lora: LoRAConfig | None = None
    """For a checkpoint of adapters: their settings in the run, by which they are merged."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Data type in which engines and exports get the weights. "auto": that of their files. Adapters
    are merged in it, so with adapters it must be the trainer's."""

    def model_shape(self, hf_config: Mapping[str, Any]) -> ModelShape:
        """Return the shape of a Llama-like model; raises ConfigError for any other."""
        return shape_of(hf_config)

    def footprint(
        self, size: ModelSize, layout: ParallelLayout, trained: bool, micro_batches: int
    ) -> Footprint:
        """Return an empty footprint: the weights stay in their files."""
        return Footprint(resident=0.0)
