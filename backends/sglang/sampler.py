"""SGLang's sampler with our meaning of logprobs and of seeds, registered as its sampling backend "pytorch" (the only one
that it allows on a CPU).

SGLang calls `register` in each of its processes: it is an entry point of the group "sglang.srt.plugins". In an SGLang that
is not ours it does nothing.
"""

from __future__ import annotations

import os
from typing import Any

BACKEND = "pytorch"
OURS = "HYBRIDFLOW_SGLANG"
"""Variable that says that this SGLang is a rollout engine."""


def register() -> None:
    if OURS not in os.environ:
        return
    from sglang.srt.layers.sampler import register_sampler_backend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    register_sampler_backend(BACKEND, _sampler)
    batch = "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo"
    HookRegistry.register(f"{batch}.from_schedule_batch", _with_seeds, HookType.AROUND)
    HookRegistry.register(f"{batch}.apply_logits_bias", _without_biases, HookType.AROUND)


def _without_biases(original: Any, info: Any, logits: Any) -> None:
    """Our sampler adds them, since logprobs are of the logits before."""
    biases, info.logit_bias = info.logit_bias, None
    try:
        original(info, logits)
    finally:
        info.logit_bias = biases


def _with_seeds(original: Any, *args: Any, **kwargs: Any) -> Any:
    """SGLang reads the requests' seeds in its deterministic mode alone, which takes slower kernels."""
    import torch

    info = original(*args, **kwargs)
    batch = kwargs.get("batch", args[-2] if len(args) > 1 else None)
    seeds = [r.sampling_params.sampling_seed or 0 for r in batch.reqs]  # type: ignore[union-attr]
    info.sampling_seed = torch.tensor(seeds, dtype=torch.int64, device=info.temperatures.device)
    return info


def _sampler() -> Any:
    import torch
    from sglang.srt.layers.sampler import Sampler
    from sglang.srt.sampling.sampling_params import TOP_K_ALL

    from hybridflow.kit.sampling import draw, uniforms

    class SeededSampler(Sampler):
        """Logprobs are log softmax(logits / temperature) before biases and filters, and random numbers follow from a
        request's seed and the position of the token."""

        def forward(
            self,
            logits_output,
            sampling_info,
            return_logprob,
            top_logprobs_nums,
            token_ids_logprobs,
            positions,
            **_,
        ):
            logits = self._preprocess_logits(logits_output.next_token_logits, sampling_info).float()
            logprobs = drawn = torch.log_softmax(logits / sampling_info.temperatures, dim=-1)
            if sampling_info.logit_bias is not None:
                drawn = torch.log_softmax(
                    (logits + sampling_info.logit_bias) / sampling_info.temperatures, dim=-1
                )
            top_k = torch.where(sampling_info.top_ks >= TOP_K_ALL, 0, sampling_info.top_ks).long()
            uniform = uniforms(
                sampling_info.sampling_seed, positions.to(sampling_info.sampling_seed.dtype)
            )
            tokens = draw(drawn, uniform, top_k, sampling_info.top_ps, sampling_info.min_ps).to(
                torch.int32
            )
            if return_logprob:
                found = self.output_logprob_processor.compute_logprobs(
                    logprobs, top_logprobs_nums, token_ids_logprobs, tokens
                )
                found.write_output_to(logits_output)
            self._sync_token_ids_across_tp(tokens, sampling_info)
            return tokens

    return SeededSampler()
