"""Configuration that the backends of Hugging Face models share."""

from __future__ import annotations

import attrs


@attrs.frozen
class LoRAConfig:
    """Low-rank adapters (arXiv:2106.09685), by peft.

    A frozen role has no adapters: a reference is the model without them.
    """

    rank: int = attrs.field(default=16, validator=attrs.validators.ge(1))
    """Rank of each adapter: W [out, in] learns B [out, rank] times A [rank, in]."""
    alpha: float = attrs.field(default=32.0, validator=attrs.validators.gt(0))
    """The product of B and A is scaled by alpha / rank."""
    target_modules: tuple[str, ...] = ()
    """Names of linear layers, or their ends ("q_proj"); none: every linear layer but the head."""
