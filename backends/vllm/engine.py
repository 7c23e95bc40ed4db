"""vLLM as a rollout engine, in the process that makes it: a worker's, or one of its own.

This module is imported to check a config, so vLLM itself is imported when the engine starts.
"""

from __future__ import annotations

import os
import secrets
import socket
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from hybridflow.backends.vllm.config import VLLMConfig
from hybridflow.backends.vllm.patches import a_guest, end, own_shared_memory
from hybridflow.core.contracts.rollout import Completion, Request
from hybridflow.core.values.weights import Box, WeightLayout
from hybridflow.kit.continuous import ContinuousEngine
from hybridflow.kit.hosting.hostable import Hostable
from hybridflow.kit.huggingface.models import policy_config, write_config
from hybridflow.kit.whole import WholeParameters

CPU_CACHE_GB = 1.0


class VLLMEngine(ContinuousEngine, Hostable):
    """A plugin of kind "rollout_engine", name "vllm".

    Under tensor parallelism the ranks of a replica make the same calls with the same requests, and each reads its stream to
    the end. vLLM takes whole parameters and cuts them itself, so every rank receives them whole, one after the other.
    """

    Config = VLLMConfig

    def __init__(self, model, config, context):
        super().__init__(model, config, context)
        self.device = torch.device(context.device)
        self._names: dict[int, str] = {}
        """Request -> what vLLM calls it."""

    def start(self) -> None:
        """Raises ModelError for a model that is no policy. A collective call over all ranks of the role."""
        hf_config = policy_config(self.model)
        text = hf_config.get_text_config()
        self.vocab, self.max_positions = (
            text.vocab_size,
            self.config.max_length or text.max_position_embeddings,
        )
        with (
            a_guest(self._variables()),
            tempfile.TemporaryDirectory() as folder,
            self._shared_memory(),
        ):
            write_config(hf_config, folder)
            from vllm import LLM

            self.llm = LLM(**self._arguments(folder))
        self.engine = self.llm.llm_engine
        self._runner = self.engine.model_executor.driver_worker.worker.model_runner
        from hybridflow.backends.vllm.sampler import SeededSampler

        self.sampler = self._runner.sampler = SeededSampler(self._runner)
        self.store = WholeParameters.of(hf_config, self.config.dtype, self.device, self._load)

    def _variables(self) -> dict[str, str]:
        """For the time of the start. vLLM asks them for its place among the ranks."""
        world, rank = self.context.world_size, self.context.rank
        found = {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1",
            "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"), "HF_HUB_OFFLINE": "1",
            "RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world),
        }  # fmt: skip
        if self.device.type == "cuda":
            found |= {"LOCAL_RANK": str(self.device.index or 0)}
        if not {"MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
            with (
                socket.socket() as free
            ):  # asked for, and used by nobody: the process group is there already
                free.bind(("", 0))
                found |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
        return found

    @contextmanager
    def _shared_memory(self) -> Iterator[None]:
        if self.device.type != "cpu" or self.context.world_size == 1:
            yield
            return
        token: list[Any] = [secrets.token_hex(8)]
        dist.broadcast_object_list(token, src=0)
        with own_shared_memory(token[0]):
            yield

    def _arguments(self, folder: str) -> dict[str, Any]:
        config, generation = self.config, self.context.generation
        tp = generation.tp if generation is not None else 1
        found: dict[str, Any] = {
            "model": folder, "skip_tokenizer_init": True, "load_format": "dummy", "dtype": config.dtype, "seed": 0,
            "tensor_parallel_size": tp, "max_model_len": self.max_positions, "max_num_seqs": config.max_sequences,
            "enable_prefix_caching": config.prefix_cache, "logprobs_mode": "raw_logprobs", "async_scheduling": False,
            "enforce_eager": config.eager or self.device.type == "cpu", "disable_log_stats": True,
        }  # fmt: skip
        if dist.is_initialized():
            found["distributed_executor_backend"] = "external_launcher"
        if self.device.type == "cpu" or config.kv_memory_gb:
            found["kv_cache_memory_bytes"] = int((config.kv_memory_gb or CPU_CACHE_GB) * 1e9)
        if self.device.type == "cuda":
            found |= {"gpu_memory_utilization": config.gpu_memory, "enable_sleep_mode": True}
        return found | config.engine_args

    def close(self) -> None:
        if (engine := self.__dict__.pop("engine", None)) is not None:
            end(engine)

    # Weights
    def layout(self) -> WeightLayout:
        return self.store.layout(self.context.world_size)

    def begin_update(self, version: int) -> None:
        from vllm.model_executor.model_loader.reload.layerwise import (
            finalize_layerwise_reload,
            initialize_layerwise_reload,
        )

        broke_off = self.updating
        super().begin_update(version)
        if broke_off:  # the last one broke off: some layers are done, and some wait still
            finalize_layerwise_reload(self._runner.model, self._runner.model_config)
        initialize_layerwise_reload(self._runner.model)
        self.store.begin()

    def receive(self, name: str, box: Box, tensor: torch.Tensor) -> None:
        self.check_updating(name)
        self.store.receive(name, box, tensor)

    @torch.no_grad()
    def _load(self, name: str, whole: torch.Tensor) -> None:
        self._runner.model.load_weights([(name, whole)])

    @torch.no_grad()
    def end_update(self) -> None:
        self.check_updating("end_update")
        self.store.end()
        from vllm.model_executor.model_loader.reload.layerwise import finalize_layerwise_reload

        model = self._runner.model
        finalize_layerwise_reload(model, self._runner.model_config)
        if self.device.type == "cpu" and self.store.ties and hasattr(model, "lm_head"):
            from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

            dispatch_cpu_unquantized_gemm(
                model.lm_head, remove_weight=False
            )  # it packs the embedding's old values
        self.engine.reset_prefix_cache()
        super().end_update()

    def sleep(self) -> None:
        self.check_idle()
        if self.device.type == "cuda" and not self.asleep:
            self.llm.sleep(level=2)
            self.version, self.store.complete = None, False
        self.asleep = True

    def wake(self) -> None:
        if self.asleep and self.device.type == "cuda":
            self.llm.wake_up()
        self.asleep = False

    # Generation
    def enter(self, request: Request) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        s, before = request.sampling, len(request.prefix()[0])
        parameters = SamplingParams(
            max_tokens=s.max_tokens - before, temperature=s.temperature, top_p=s.top_p, top_k=s.top_k, logprobs=0,
            seed=None if s.greedy else request.seed, stop_token_ids=[] if s.ignore_stop else list(s.stop_token_ids),
            min_p=s.min_p, logit_bias=dict(s.logit_bias) or None,
            ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY,
        )  # fmt: skip
        prompt = {"prompt_token_ids": request.context().tolist()}
        name = self.engine.add_request(str(request.id), prompt, parameters)
        self._names[request.id] = name
        self.sampler.origins[name] = (request.seed, before)

    def advance(self) -> Iterator[Completion]:
        for output in self.engine.step():
            request = self.running.get(int(output.request_id))
            if request is not None:
                done = output.outputs[0]
                self.sampler.origins.pop(self._names.pop(request.id), None)
                yield self.completion(
                    request, *_sampled(done.token_ids, done.logprobs), done.finish_reason
                )

    def leave(self, ids: Sequence[int]) -> list[Completion]:
        states = self.engine.output_processor.request_states
        done = []
        for at in ids:
            name = self._names.pop(at)
            self.sampler.origins.pop(name, None)
            sampled = (
                list(states[name].detokenizer.output_token_ids),
                states[name].logprobs_processor.logprobs,
            )
            done.append(self.completion(self.running[at], *_sampled(*sampled), "abort"))
        self.engine.abort_request([str(at) for at in ids])
        return done


def _sampled(tokens: Sequence[int], logprobs: Any) -> tuple[list[int], list[float]]:
    """The tokens and the logprob of each, out of vLLM's mapping per position."""
    tokens = list(tokens)
    return tokens, [
        entry[token].logprob for entry, token in zip(logprobs or (), tokens, strict=True)
    ]
