"""The tables of a run's TOML file: their names, and [sampling], which becomes SamplingParams.

The classes of the other sections are in core/job/sections.py, since a job holds them.
"""

from __future__ import annotations

from typing import Any

import attrs

from hybridflow.core.contracts.rollout import SamplingParams, check_biases
from hybridflow.core.validators import at_least, fraction, non_negative, setting, share

SECTIONS = (
    "run",
    "runtime",
    "placement",
    "pools",
    "algorithm",
    "data",
    "tokenizer",
    "sampling",
    "rollout",
    "environment",
    "validation",
    "stages",
)
"""The tables of a file that are not roles."""

USUAL_ROLES = ("actor", "critic", "cost_critic", "ref", "reward", "cost", "teacher")
"""Roles whose tables a file may have although its algorithm has no such role."""


def _token_biases(instance: Any, attribute: attrs.Attribute, value: dict[str, float]) -> None:
    """Raise ValueError unless the keys are token ids and the biases are in range."""
    for token in value:
        # "07" would be token 7 a second time.
        if not token.isdecimal() or str(int(token)) != token:
            raise ValueError(
                f"{attribute.name}: keys are token ids, got {token!r}; "
                "write a whole number, 0 or more"
            )
    check_biases(instance, attribute, [(int(token), bias) for token, bias in value.items()])


@attrs.frozen
class SamplingSection:
    """[sampling]: how responses are sampled in training; validation is greedy."""

    # Length and randomness
    max_tokens: int = setting(256, at_least(1))
    """Length limit of a response, in tokens."""
    temperature: float = setting(1.0, non_negative)
    """Softmax temperature; 0 is greedy. The trainer computes logprobs at the same temperature."""

    # Tokens that may be sampled
    top_p: float = setting(1.0, fraction)
    """Nucleus sampling: only the most likely tokens that together have this probability; 1 is
    off."""
    top_k: int = setting(0, non_negative)
    """Sample only from this many of the most likely tokens; 0 is off."""
    min_p: float = setting(0.0, share)
    """Sample only tokens whose probability is at least this share of the most likely one's; 0 is
    off."""
    logit_bias: dict[str, float] = attrs.field(factory=dict, validator=_token_biases)
    """Token id -> number that is added to its logit before the temperature, in validation too:
    `{ "17" = -100.0 }` excludes token 17. The trainer's logprobs do not include the bias."""
    stop_tokens: tuple[int, ...] = ()
    """Token ids that end a response, in addition to the tokenizer's eos."""

    def params(self) -> SamplingParams:
        """Convert the settings into the parameters of generation requests."""
        # TOML has strings for keys, requests have token ids.
        fields = attrs.asdict(self)
        biases = {int(token): bias for token, bias in fields.pop("logit_bias").items()}
        return SamplingParams(stop_token_ids=fields.pop("stop_tokens"), logit_bias=biases, **fields)
