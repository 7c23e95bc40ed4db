"""A sampler for SGLang with hybridflow's definition of logprobs and seeds.

It is registered as the sampling backend "pytorch", the only one that SGLang allows on a CPU. SGLang
calls `register` in each of its processes, as an entry point of the group "sglang.srt.plugins". In
an SGLang that is not a rollout engine of hybridflow it does nothing.
"""

from __future__ import annotations

import os
from typing import Any

BACKEND = "pytorch"
"""Name of the sampling backend that ours replaces."""
OURS = "HYBRIDFLOW_SGLANG"
"""Environment variable that marks this SGLang as a rollout engine of hybridflow."""


def register() -> None:
    """Install our sampler and two hooks in this process of SGLang's."""
    if OURS not in os.environ:
        return
    from sglang.srt.layers.sampler import register_sampler_backend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    register_sampler_backend(BACKEND, _sampler)
    batch = "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo"
    HookRegistry.register(f"{batch}.from_schedule_batch", _with_seeds, HookType.AROUND)
    HookRegistry.register(f"{batch}.apply_logits_bias", _without_biases, HookType.AROUND)


def _without_biases(original: Any, info: Any, logits: Any) -> None:
    """Call SGLang's `apply_logits_bias` without the biases, which our sampler adds itself.

    Logprobs are those of the logits before the biases.
    """
    biases = info.logit_bias
    info.logit_bias = None
    try:
        original(info, logits)
    finally:
        info.logit_bias = biases


def _with_seeds(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Put the seeds of the requests into SGLang's `sampling_seed`, int64 [R].

    SGLang itself does so only in its deterministic mode, which takes slower kernels.
    """
    import torch

    info = original(*args, **kwargs)
    batch = kwargs.get("batch", args[-2] if len(args) > 1 else None)
    requests = batch.reqs  # type: ignore[union-attr]
    seeds = [request.sampling_params.sampling_seed or 0 for request in requests]
    info.sampling_seed = torch.tensor(seeds, dtype=torch.int64, device=info.temperatures.device)
    return info


def _sampler() -> Any:
    """Return a sampler; its class is made here, since this module does not import SGLang."""
    import torch
    from sglang.srt.layers.sampler import Sampler
    from sglang.srt.sampling.sampling_params import TOP_K_ALL

    from hybridflow.kit.sampling import draw, uniforms

    class SeededSampler(Sampler):
        """Logprobs are log softmax(logits / temperature), before biases and filters.

        Random numbers follow from a request's seed and the position of the token alone.
        """

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
            """Return the tokens drawn, int32 [R]; write their logprobs to `logits_output`."""
            logits = self._preprocess_logits(logits_output.next_token_logits, sampling_info).float()
            temperatures = sampling_info.temperatures  # [R, 1]

            # The reported logprobs, and those to sample from: they differ by the biases.
            logprobs = torch.log_softmax(logits / temperatures, dim=-1)  # [R, V]
            biased = logprobs
            if sampling_info.logit_bias is not None:
                biased_logits = logits + sampling_info.logit_bias
                biased = torch.log_softmax(biased_logits / temperatures, dim=-1)

            # `draw` takes 0 for no limit, where SGLang has a large number.
            top_k = torch.where(sampling_info.top_ks >= TOP_K_ALL, 0, sampling_info.top_ks).long()
            seeds = sampling_info.sampling_seed
            uniform = uniforms(seeds, positions.to(seeds.dtype))
            drawn = draw(biased, uniform, top_k, sampling_info.top_ps, sampling_info.min_ps)
            tokens = drawn.to(torch.int32)

            if return_logprob:
                columns = self.output_logprob_processor.compute_logprobs(
                    logprobs, top_logprobs_nums, token_ids_logprobs, tokens
                )
                columns.write_output_to(logits_output)
            self._sync_token_ids_across_tp(tokens, sampling_info)
            return tokens

    return SeededSampler()
