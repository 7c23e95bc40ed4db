"""LoRA (arXiv:2106.09685) on Hugging Face models by peft, for backends that train those.

The linear layers that are adapted compute W x + scale B A x, scale = alpha / rank. Adapters are trained (and a value
or score head, which is new); engines and exported folders get the merged weights W + scale B A.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from hybridflow.core.errors import ModelError
from hybridflow.core.values.weights import Box, LazyShard
from hybridflow.kit.huggingface.config import LoRAConfig
from hybridflow.kit.huggingface.modeling import ADAPTER, RoleModel, canonical


class Adapters:
    """The adapters of a role's model. `whole`: their values, by canonical name, as `merged` and `export` need them.

    Canonical names are those of peft's own files, less their prefix: LAYER.lora_A.weight, LAYER.lora_B.weight.
    """

    def __init__(self, role: RoleModel, config: LoRAConfig, seed: int):
        """Put them into the model; B is zeros, A drawn from `seed`, both float32. Raises ModelError."""
        targets = _targets(role, config)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.config = _inject(role.hf, config, targets)
        self.scale = config.alpha / config.rank
        self.of = {
            f"{name}.weight": (f"{name}.lora_A.weight", f"{name}.lora_B.weight") for name in targets
        }
        """Adapted parameter -> its A [rank, in] and B [out, rank]."""
        self.names = {name for pair in self.of.values() for name in pair}
        trained = [p for name, p in role.hf.named_parameters() if canonical(name) in self.names]
        role.requires_grad_(False)
        for parameter in (*trained, *(role.head.parameters() if role.kind != "policy" else ())):
            parameter.requires_grad_(True)
            parameter.data = parameter.data.float()

    def merged(
        self, name: str, box: Box, values: torch.Tensor, whole: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        """W + scale B A of `box` (its values are `values`), added in float32; `values` itself of other parameters.

        Its bits depend on the box: who compares or sends parts takes them from one box's result.
        """
        if name not in self.of or not box.numel:
            return values
        a, b = (whole[n].to(values.device, torch.float32) for n in self.of[name])
        rows, columns = box.slices()
        delta = b[rows].contiguous() @ a[:, columns].contiguous()
        return torch.add(values.float(), delta, alpha=self.scale).to(values.dtype)

    def shard(
        self, name: str, box: Box, values: torch.Tensor, whole: Mapping[str, torch.Tensor]
    ) -> torch.Tensor | LazyShard:
        """`merged`, when it is read: no second model is in memory."""
        if name not in self.of:
            return values
        return LazyShard(box.shape, lambda: self.merged(name, box, values, whole))

    def export(self, whole: Mapping[str, torch.Tensor], folder: Path) -> None:
        """adapter_config.json and adapter_model.safetensors, as peft.PeftModel.from_pretrained reads them."""
        from safetensors.torch import save_file

        folder.mkdir(parents=True, exist_ok=True)
        self.config.save_pretrained(folder)
        tensors = {
            f"base_model.model.{name}": whole[name].detach().cpu().clone()
            for name in sorted(self.names)
        }
        save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})


def _targets(role: RoleModel, config: LoRAConfig) -> list[str]:
    """Full names of the linear layers to adapt: those of the trunk, or those that the config names."""
    trunk = {id(m) for m in role.hf.base_model.modules()}
    linear = {name: m for name, m in role.hf.named_modules() if isinstance(m, nn.Linear)}
    inner = [name for name, module in linear.items() if id(module) in trunk]
    if not config.target_modules:
        found = inner
    else:
        found = [
            n for n in inner if any(n == t or n.endswith(f".{t}") for t in config.target_modules)
        ]
        lost = [
            t
            for t in config.target_modules
            if not any(n == t or n.endswith(f".{t}") for n in found)
        ]
        if lost:
            raise ModelError(f"backend.lora.target_modules: no linear layer of the model is named {_list(lost)}; "
                             f"it has {_list(dict.fromkeys(n.rpartition('.')[2] for n in inner))}")  # fmt: skip
    if not found:
        raise ModelError(
            f"backend.lora: a {role.hf.config.model_type!r} model has no linear layers to adapt"
        )
    return found


def _inject(hf: nn.Module, config: LoRAConfig, targets: list[str]) -> Any:
    """peft's layers in place of the targets; peft's config of them."""
    from peft import LoraConfig, inject_adapter_in_model

    made: Any = LoraConfig(
        r=config.rank,
        lora_alpha=cast(int, config.alpha),
        target_modules=targets,
        lora_dropout=0.0,
        bias="none",
    )
    inject_adapter_in_model(made, hf, ADAPTER)
    made.target_modules = set(
        config.target_modules or [name.rpartition(".")[2] for name in targets]
    )
    return made


def _list(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))
