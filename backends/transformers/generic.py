"""The decoder for every other architecture: Hugging Face's own model and cache.

It runs under the same scheduler and sampler as the fast decoder. Rows share their columns, padded
at the left, so they are admitted together: a new batch starts when the last one is done. Finished
rows are removed from the cache meanwhile.

    row 0   . . . a b c | x y z      prompt a b c, response x y z
    row 1   d e f g h i | u v w      prompt d e f g h i, response u v w
"""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import torch

from hybridflow.backends.transformers.decoder import fill_holes
from hybridflow.backends.transformers.weights import StoredBox
from hybridflow.core.errors import ModelError
from hybridflow.core.values.weights import Box
from hybridflow.kit.huggingface.models import attention_of
from hybridflow.kit.huggingface.saved import SavedForm


class GenericDecoder:
    """Calls the model with a DynamicCache. Padding is masked, and not counted in positions."""

    joins = False
    """Whether new rows can be admitted beside live ones: they cannot."""
    model: Any
    """The Hugging Face model."""
    _takes_positions: bool
    """Whether its forward takes position_ids."""
    ties: dict[str, str]
    """Tied parameter -> the one that it is tied to."""
    places: dict[str, StoredBox]
    """Canonical name -> the storage of the parameter."""

    cache: Any
    """The DynamicCache of the live rows; None without any."""
    _mask: Any
    """1 for the tokens of each row and 0 for padding, int64 [R, columns]."""
    rows: int
    """Number of reserved rows."""
    capacity: int
    """Longest sequence that a row may reach, in tokens."""
    reserved_bytes = 0
    """0: the cache is not reserved, but grows as it is used."""
    longest: int
    """Number of columns in use."""

    def __init__(self, config, dtype: torch.dtype, device: torch.device):
        """Build the model without values; raises ModelError where transformers has none for it."""
        from transformers import AutoModelForCausalLM
        from transformers.initialization import no_init_weights

        try:
            with no_init_weights(), device:
                self.model = AutoModelForCausalLM.from_config(
                    config, dtype=dtype, attn_implementation=attention_of(config)
                )
        except ValueError as error:
            raise ModelError(
                f"transformers has no causal model for {config.model_type!r}: {error}"
            ) from error
        # no_init_weights leaves out ties too.
        self.model.tie_weights()
        self.model.eval().requires_grad_(False)

        self.config = config
        self.dtype = dtype
        self.device = device
        # Some models take no positions, or compute the logits of all tokens in any case.
        accepted = inspect.signature(self.model.forward).parameters
        self._takes_positions = "position_ids" in accepted
        self._options = {"logits_to_keep": 1} if "logits_to_keep" in accepted else {}

        # A tied parameter is received once, under its source's name.
        form = SavedForm.of(self.model)
        self.ties = dict(form.ties)
        self.places = {}
        for stored, held in self.model.state_dict().items():
            whole = (stored, Box.full(held.shape), held)
            for name, box, values in form.shards([whole]):
                assert isinstance(values, torch.Tensor)
                if name not in self.ties:
                    self._place(name, values, form.shapes[name], box)
        self.free()

    def _place(self, name: str, values: torch.Tensor, shape: tuple[int, ...], box: Box) -> None:
        """Note a parameter's storage; raises ModelError if it is in several stored parameters."""
        if box != Box.full(shape):
            raise ModelError(
                f"{self.config.model_type}: {name} is saved as one parameter and stored in many, "
                "which the embedded engine cannot take; use rollout = vllm or sglang"
            )
        self.places[name] = StoredBox(values, None, shape, box)

    def row_bytes(self, capacity: Any) -> Any:
        """Return the bytes of the KV cache for one sequence of `capacity` tokens, or for several's.

        `capacity` is an int, or an array of them.
        """
        config = self.config.get_text_config()
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        size = getattr(config, "head_dim", None)
        if not size:
            size = config.hidden_size // config.num_attention_heads

        # Keys and values of all layers
        numbers = 2 * config.num_hidden_layers * heads * size * capacity
        return numbers * self.dtype.itemsize

    def reserve(self, rows: int, capacity: int) -> None:
        """Drop all rows; the cache itself grows as it is used."""
        self.free()
        self.rows = rows
        self.capacity = capacity

    def free(self) -> None:
        """Free the cache; all rows are dropped."""
        self.cache = None
        self._mask = None
        self.rows = 0
        self.capacity = 0
        self.longest = 0

    def order(self, alive: np.ndarray) -> np.ndarray:
        """Return the live rows, bool [R] -> int64 [live], in the order that they should have.

        Few of them move.
        """
        return fill_holes(alive)

    @torch.inference_mode()
    def keep(self, index: np.ndarray) -> None:
        """Make row index[i] row i; rows not in `index` are dropped."""
        # The cache cannot select no rows.
        if len(index) == 0:
            self.cache = None
            self.longest = 0
            return
        rows = torch.from_numpy(index).to(self.device)
        self.cache.batch_select_indices(rows)
        self._mask = self._mask[rows]

    @torch.inference_mode()
    def admit(
        self,
        contexts: list[np.ndarray],
        repeats: list[int],
    ) -> torch.Tensor:
        """Prefill each context once, then make one row for each repeat.

        Returns logits float32 [sum(repeats), V].
        """
        from transformers import DynamicCache

        # Pad the contexts at the left to one array.
        width = max(map(len, contexts))
        ids = np.zeros((len(contexts), width), np.int64)
        mask = np.zeros_like(ids)
        for row, valid, context in zip(ids, mask, contexts, strict=True):
            padding = width - len(context)
            row[padding:] = context
            valid[padding:] = 1

        self.cache = DynamicCache(config=self.config)
        self.longest = width
        self._mask = torch.from_numpy(mask).to(self.device)
        # Positions count from each row's first token; padding has 0.
        positions = (self._mask.cumsum(1) - 1).clamp_(min=0)
        tokens = torch.from_numpy(ids).to(self.device)
        logits = self._forward(tokens, positions)

        # The cache and the logits of a context are repeated for its rows.
        owners = np.repeat(np.arange(len(contexts)), repeats)
        if len(owners) == len(contexts):
            return logits
        self.keep(owners)
        return logits[torch.from_numpy(owners).to(self.device)]

    @torch.inference_mode()
    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """Append token [R] to every row; return logits float32 [R, V] of the next ones."""
        # One more column, which every row uses.
        column = self._mask.new_ones(len(tokens), 1)
        self._mask = torch.cat([self._mask, column], 1)
        self.longest += 1

        # A row's position is the number of its tokens before, without padding.
        positions = self._mask.sum(1, keepdim=True) - 1
        return self._forward(tokens[:, None], positions)

    def _forward(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Run tokens [R, n] through the model; return the logits of each row's last one."""
        options = {"position_ids": positions} if self._takes_positions else {}
        output = self.model(
            input_ids=ids,
            attention_mask=self._mask,
            past_key_values=self.cache,
            use_cache=True,
            **options,
            **self._options,
        )
        return output.logits[:, -1].float()
