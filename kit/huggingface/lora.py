"""LoRA (arXiv:2106.09685) on Hugging Face models by peft, for training backends.

An adapted linear layer computes W x + scale B A x, with scale = alpha / rank. Only the adapters A
and B are trained (and a value or score head, which is new). Engines and exported folders get the
merged weights W + scale B A.
"""

from __future__ import annotations

import warnings
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
    """The adapters of a role's model.

    Their canonical names are those of peft's own files, less their prefix: LAYER.lora_A.weight and
    LAYER.lora_B.weight. Methods take `whole`: the adapters' values by canonical name.
    """

    def __init__(self, role: RoleModel, config: LoRAConfig, seed: int):
        """Put adapters into the model: B is zeros, A is drawn from `seed`, both float32.

        Raises ModelError where the model has no layers to adapt.
        """
        # A is equal on every rank, and the caller's random state stays as it was.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            targets, self.config = inject(role.hf, config)
        self.scale = config.alpha / config.rank
        self.of = {
            f"{name}.weight": (f"{name}.lora_A.weight", f"{name}.lora_B.weight") for name in targets
        }
        """Adapted parameter -> its A [rank, in] and B [out, rank]."""
        self.names: set[str] = set()
        """The names of all A and B."""
        for pair in self.of.values():
            self.names.update(pair)

        # Freeze everything but adapters and a new head, which get float32 masters.
        parameters = role.hf.named_parameters()
        trained = [p for name, p in parameters if canonical(name) in self.names]
        if role.kind != "policy":
            trained += role.head.parameters()
        role.requires_grad_(False)
        for parameter in trained:
            parameter.requires_grad_(True)
            parameter.data = parameter.data.float()

    def merged(
        self, name: str, box: Box, values: torch.Tensor, whole: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        """Return W + scale B A of a box whose values of W are `values`, added in float32.

        A parameter that is not adapted is returned unchanged. The bits of an element may depend on
        the box, so parts that are compared or sent must come from the result of one box.
        """
        if name not in self.of or not box.numel:
            return values
        name_a, name_b = self.of[name]
        return merge(values, whole[name_a], whole[name_b], self.scale, box)

    def shard(
        self, name: str, box: Box, values: torch.Tensor, whole: Mapping[str, torch.Tensor]
    ) -> torch.Tensor | LazyShard:
        """Return `merged`, computed when it is read, so that no second model is in memory."""
        if name not in self.of:
            return values
        return LazyShard(box.shape, lambda: self.merged(name, box, values, whole))

    def export(self, whole: Mapping[str, torch.Tensor], folder: Path) -> None:
        """Write adapter_config.json and adapter_model.safetensors."""
        write_adapter(self.config, {name: whole[name] for name in self.names}, folder)


def write_adapter(config: Any, adapters: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Write adapters as peft.PeftModel.from_pretrained reads them, with peft's `config` of them.

    adapters: canonical name, LAYER.lora_A.weight or LAYER.lora_B.weight, -> whole values.
    """
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(folder)
    # peft finds its parameters behind this prefix.
    tensors = {
        f"base_model.model.{name}": adapters[name].detach().cpu().clone()
        for name in sorted(adapters)
    }
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})


def merge(
    values: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float, box: Box
) -> torch.Tensor:
    """Return W + scale B A of a box of W [out, in], whose values are `values`, in their dtype.

    a: [rank, in]; b: [out, rank], both whole.
    """
    a = a.to(values.device, torch.float32)
    b = b.to(values.device, torch.float32)

    # A box of B A takes its rows of B and its columns of A.
    rows, columns = box.slices()
    delta = b[rows].contiguous() @ a[:, columns].contiguous()
    return torch.add(values.float(), delta, alpha=scale).to(values.dtype)


def target_layers(hf: Any, config: LoRAConfig) -> list[str]:
    """Return the full names of the linear layers of a Hugging Face model to adapt.

    These are all of the trunk, or those that the config names. Raises ModelError for a name of the
    config without a layer, and a model without linear layers.
    """
    # The head is no part of the trunk, and is not adapted.
    trunk = {id(module) for module in hf.base_model.modules()}
    inner = [
        name
        for name, module in hf.named_modules()
        if isinstance(module, nn.Linear) and id(module) in trunk
    ]
    targets = inner
    if config.target_modules:
        targets = [name for name in inner if _named(name, config.target_modules)]
        # Each of the config's names must be that of a layer.
        missing = [end for end in config.target_modules if not _names_any(end, targets)]
        if missing:
            known = dict.fromkeys(name.rpartition(".")[2] for name in inner)
            raise ModelError(
                f"backend.lora.target_modules: no linear layer of the model is named "
                f"{_list(missing)}; it has {_list(known)}"
            )
    if not targets:
        raise ModelError(
            f"backend.lora: a {hf.config.model_type!r} model has no linear layers to adapt"
        )
    return targets


def _named(name: str, ends: Iterable[str]) -> bool:
    """Return whether a layer's name is one of `ends`, or ends with one of them behind a dot."""
    return any(name == end or name.endswith(f".{end}") for end in ends)


def _names_any(end: str, names: Iterable[str]) -> bool:
    """Return whether one of the layers' names ends with `end`."""
    return any(_named(name, (end,)) for name in names)


def inject(hf: Any, config: LoRAConfig) -> tuple[list[str], Any]:
    """Replace the layers to adapt by peft's; return their names, and peft's config of them.

    Raises ModelError for a model without such layers, and for one of which peft adapts others: it
    takes names of DeepSeek's MLPs for those of its experts.
    """
    from peft import inject_adapter_in_model

    targets = target_layers(hf, config)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        inject_adapter_in_model(_peft_config(config, targets), hf, ADAPTER)
    adapted = [name.removesuffix(".lora_A") for name, _ in hf.named_modules() if _is_a(name)]
    if set(adapted) != set(targets):
        others = sorted(set(adapted) ^ set(targets))
        raise ModelError(
            f"backend.lora: peft adapts other layers of a {hf.config.model_type!r} model than "
            f"it is told ({_list(others[:3])}, ...); name those of attention in "
            "backend.lora.target_modules"
        )
    return targets, exported_config(config, targets)


def _is_a(name: str) -> bool:
    return name.endswith(".lora_A")


def exported_config(config: LoRAConfig, layers: Iterable[str]) -> Any:
    """Return peft's config of the adapters of `layers`, for files.

    It has the layers' short names, such as "q_proj".
    """
    ends = {name.rpartition(".")[2] for name in layers}
    return _peft_config(config, config.target_modules or ends)


def _peft_config(config: LoRAConfig, targets: Iterable[str]) -> Any:
    from peft import LoraConfig

    # peft declares lora_alpha as an int, and takes any number.
    return LoraConfig(
        r=config.rank,
        lora_alpha=cast(int, config.alpha),
        target_modules=list(targets),
        lora_dropout=0.0,
        bias="none",
    )


def _list(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))
