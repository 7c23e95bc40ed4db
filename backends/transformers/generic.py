"""The decoder for every other architecture: Hugging Face's own model and cache, under the same scheduler and sampler.

Rows share their columns, so they are admitted together: a new wave starts when the last one is done. Finished rows
leave the cache on the way, as in the fast decoder.
"""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import torch

from hybridflow.backends.transformers.weights import Place
from hybridflow.core.errors import ModelError


class GenericDecoder:
    """Drives `model(...)` with a DynamicCache; prompts are padded at the left."""

    joins = False

    def __init__(self, config, dtype: torch.dtype, device: torch.device):
        from transformers import AutoModelForCausalLM
        from transformers.initialization import no_init_weights

        try:
            with no_init_weights(), device:
                self.model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        except ValueError as error:
            raise ModelError(
                f"transformers has no causal model for {config.model_type!r}: {error}"
            ) from error
        self.model.tie_weights()  # no_init_weights leaves this out too
        self.model.eval().requires_grad_(False)
        self.config, self.dtype, self.device = config, dtype, device
        accepted = inspect.signature(self.model.forward).parameters
        self._takes_positions = "position_ids" in accepted
        self._options = {"logits_to_keep": 1} if "logits_to_keep" in accepted else {}
        self.ties = {
            n: source for n, source in self.model.all_tied_weights_keys.items() if n != source
        }
        self.places = {
            name: Place.whole(parameter.data)
            for name, parameter in self.model.named_parameters(remove_duplicate=False)
            if name not in self.ties
        }
        self.free()

    def row_bytes(self, capacity: int) -> int:
        """Bytes of the KV cache for one sequence of `capacity` tokens."""
        c = self.config.get_text_config()
        heads = getattr(c, "num_key_value_heads", None) or c.num_attention_heads
        size = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
        return 2 * c.num_hidden_layers * heads * size * capacity * self.dtype.itemsize

    def reserve(self, rows: int, capacity: int) -> None:
        """Forgets all rows; the cache grows as it is used."""
        self.free()
        self.capacity = capacity

    def free(self) -> None:
        self.cache: Any = None
        self._mask: Any = None
        self.capacity, self.longest = 0, 0

    @torch.inference_mode()
    def keep(self, index: np.ndarray) -> None:
        """Row i becomes what row index[i] was; the others are gone."""
        if len(index) == 0:
            self.cache, self.longest = None, 0
            return
        rows = torch.from_numpy(index).to(self.device)
        self.cache.batch_select_indices(rows)
        self._mask = self._mask[rows]

    @torch.inference_mode()
    def admit(self, contexts: list[np.ndarray], repeats: list[int]) -> torch.Tensor:
        """Prefill each context once, then one row for each repeat. Returns logits float32 [sum(repeats), V]."""
        from transformers import DynamicCache

        width = max(map(len, contexts))
        ids = np.zeros((len(contexts), width), np.int64)
        mask = np.zeros_like(ids)
        for row, valid, context in zip(ids, mask, contexts, strict=True):
            row[width - len(context) :] = context
            valid[width - len(context) :] = 1
        self.cache, self.longest = DynamicCache(config=self.config), width
        self._mask = torch.from_numpy(mask).to(self.device)
        positions = (self._mask.cumsum(1) - 1).clamp_(min=0)
        logits = self._forward(torch.from_numpy(ids).to(self.device), positions)
        owner = np.repeat(np.arange(len(contexts)), repeats)
        if len(owner) == len(contexts):
            return logits
        self.keep(owner)
        return logits[torch.from_numpy(owner).to(self.device)]

    @torch.inference_mode()
    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """Append token [R] to every row; logits float32 [R, V] of the next ones."""
        self._mask = torch.cat([self._mask, self._mask.new_ones(len(tokens), 1)], 1)
        self.longest += 1
        return self._forward(tokens[:, None], self._mask.sum(1, keepdim=True) - 1)

    def _forward(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        options = {"position_ids": positions} if self._takes_positions else {}
        out = self.model(
            input_ids=ids,
            attention_mask=self._mask,
            past_key_values=self.cache,
            use_cache=True,
            **options,
            **self._options,
        )
        return out.logits[:, -1].float()
