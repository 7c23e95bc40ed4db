"""vLLM as a rollout engine, in the process that makes it: a worker's, or one of its own.

    rank of a replica
    VLLMEngine
      |- weights (MappedWeights) -boxes-----------> the tensors of vLLM's model
      |- requests --------------------------------> vLLM's LLMEngine
      `- sampler (SeededSampler) <-logits---------- vLLM's model runner

This module is imported to check a config, so vLLM itself is imported when the engine starts.
"""

from __future__ import annotations

import os
import secrets
import socket
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from hybridflow.backends.vllm.config import CPU_CACHE_GB, VLLMConfig, why_not_on_a_cpu
from hybridflow.backends.vllm.patches import (
    a_guest,
    check_the_runner,
    classes_of_its_own,
    end,
    groups_of,
    make_room_for_the_stage_before,
    own_shared_memory,
    pin_the_runner,
    running,
)
from hybridflow.core.contracts.rollout import Completion, Proof, Request, Wanted
from hybridflow.core.errors import HybridFlowError, ModelError
from hybridflow.core.processes.page import moved
from hybridflow.core.values.parallel import Replicas
from hybridflow.core.values.weights import Box, Param, WeightLayout
from hybridflow.kit.continuous import ContinuousEngine
from hybridflow.kit.hosting.hostable import Hostable
from hybridflow.kit.huggingface.models import (
    longest,
    policy_config,
    saved_parameters,
    write_config,
)
from hybridflow.kit.tracing.coverage import check_taken, say_opaque


class VLLMEngine(ContinuousEngine, Hostable):
    """The rollout engine "vllm".

    Under tensor parallelism the ranks of a replica make the same calls with the same requests, and
    each reads its stream to the end. A rank receives the boxes that vLLM's loader would read for
    it, and whole parameters only where no box describes what the loader does.
    """

    Config = VLLMConfig

    def __init__(self, model, config, context):
        super().__init__(model, config, context)
        self.device = torch.device(context.device)
        self._latent = False
        """Whether its attention keeps one latent vector for all heads (MLA)."""
        self._names: dict[int, str] = {}
        """The id of each running request -> vLLM's name of it."""

    def start(self) -> None:
        """Build vLLM's engine with undefined weights, and install SeededSampler in it.

        Collective over all ranks of the role. Raises ModelError for a model that is no policy, or
        whose parameters vLLM does not support.
        """
        hf_config = policy_config(self.model)
        # Before vLLM starts, which changes transformers' classes.
        shapes, self.ties = saved_parameters(hf_config)
        text_config = hf_config.get_text_config()
        self.vocab = text_config.vocab_size
        self.max_positions = longest(hf_config, self.config.max_length)
        self._latent = getattr(text_config, "kv_lora_rank", None) is not None
        why = why_not_on_a_cpu(hf_config) if self.device.type == "cpu" else None
        if why is not None:
            raise ModelError(why)

        pin_the_runner()
        with (
            a_guest(self._variables()),
            tempfile.TemporaryDirectory() as folder,
            self._shared_memory(),
        ):
            write_config(hf_config, folder)
            from vllm import LLM

            with groups_of(self._replicas()), classes_of_its_own():
                self.llm = LLM(**self._arguments(folder))
        self.engine = self.llm.llm_engine
        running(self.engine)
        dtype = getattr(torch, self.config.dtype)
        try:
            self._take_runner(self.engine.model_executor.driver_worker.worker.model_runner)
            self._map_weights({name: Param(shape, dtype) for name, shape in shapes.items()})
        except BaseException:
            self.close()
            raise

    def _take_runner(self, runner: Any) -> None:
        """Install SeededSampler in vLLM's model runner.

        Raises HybridFlowError where the runner does not support that.
        """
        check_the_runner(runner)
        make_room_for_the_stage_before(runner)
        from hybridflow.backends.vllm.sampler import SeededSampler

        self._runner = runner
        self.sampler = SeededSampler(runner)
        runner.sampler = self.sampler

    def _map_weights(self, params: Mapping[str, Param]) -> None:
        """Trace vLLM's loader, and verify the trace. Collective.

        Raises ModelError where the weights cannot be updated box by box.
        """
        from hybridflow.backends.vllm.weights import MappedWeights

        model = self._runner.model
        with self._configured():
            self.weights = MappedWeights(
                model, self._runner.model_config, params, self.ties, self.device
            )
            self._layout = self._gathered_layout(params)
            self.weights.prove()
        say_opaque(self.weights.map.opaque, len(params), "vLLM")

    def _configured(self) -> Any:
        """Return a context in which vLLM's layers find its config, as at their construction."""
        from vllm.config import set_current_vllm_config

        return set_current_vllm_config(self.engine.vllm_config)

    def _gathered_layout(self, params: Mapping[str, Param]) -> WeightLayout:
        """Return the layout of all ranks, of which each has traced its own part. Collective.

        Raises ModelError for a parameter that no rank's engine reads.
        """
        # A rank may hold no part of a parameter, but some rank must.
        own = {name: self.weights.boxes(name) for name in params}
        every: list[Any] = [own]
        if dist.is_initialized():
            every = [None] * self.context.world_size
            dist.all_gather_object(every, own)

        # Each replica separately: a part that is missing in one must not be taken from another.
        who = f"{type(self._runner.model).__name__} of vLLM"
        for replica in self._replicas():
            taken = [every[rank] for stage in replica for rank in stage]
            check_taken(params, taken, who, self.model.hf_config.get("model_type"))
        held = dict(enumerate(every))
        return WeightLayout(params, held, self.ties, frozenset(params))

    def _replicas(self) -> Replicas:
        """Return the ranks of all replicas; without a layout of generation each rank is one."""
        if self.context.generation is not None:
            return self.context.generation.replicas
        return tuple(((rank,),) for rank in range(self.context.world_size))

    def _variables(self) -> dict[str, str]:
        """Return the environment variables for vLLM's start, with its rank and address."""
        rank = str(self.context.rank)
        world = str(self.context.world_size)
        variables = {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine's core runs in this process
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # threads stay on the cores that they have
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
            "HF_HUB_OFFLINE": "1",
            "RANK": rank,
            "WORLD_SIZE": world,
            "LOCAL_RANK": rank,
            "LOCAL_WORLD_SIZE": world,
        }
        if self.device.type == "cuda":
            variables["LOCAL_RANK"] = str(self.device.index or 0)

        # vLLM requires an address and does not use it, as the process group exists already.
        if not {"MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
            with socket.socket() as probe:
                probe.bind(("", 0))
                port = probe.getsockname()[1]
            variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        return variables

    @contextmanager
    def _shared_memory(self) -> Iterator[None]:
        """Name the shared memory of CPU ranks after a token that rank 0 draws. Collective."""
        if self.device.type != "cpu" or self.context.world_size == 1:
            yield
            return
        token: list[Any] = [secrets.token_hex(8)]
        dist.broadcast_object_list(token, src=0)
        with own_shared_memory(token[0]):
            yield

    def _arguments(self, folder: str) -> dict[str, Any]:
        """Return the arguments of vllm.LLM; `folder` holds the model's config.json."""
        config = self.config
        generation = self.context.generation
        arguments: dict[str, Any] = {
            # The model: weights come by an update, and tokens need no tokenizer.
            "model": folder,
            "skip_tokenizer_init": True,
            "load_format": "dummy",
            "dtype": config.dtype,
            "seed": 0,
            "tensor_parallel_size": generation.tp if generation is not None else 1,
            "pipeline_parallel_size": generation.pp if generation is not None else 1,
            # Sizes
            "max_model_len": self.max_positions,
            "max_num_seqs": config.max_sequences,
            # Execution
            "enable_prefix_caching": config.prefix_cache,
            "logprobs_mode": "raw_logprobs",  # those that SeededSampler computes
            "async_scheduling": False,
            "enforce_eager": config.eager or self.device.type == "cpu",
            "disable_log_stats": True,
        }

        # The ranks exist already: vLLM joins them, and starts no processes.
        if dist.is_initialized():
            arguments["distributed_executor_backend"] = "external_launcher"
        if self.device.type == "cpu" or config.kv_memory_gb:
            cache_gb = config.kv_memory_gb or CPU_CACHE_GB
            arguments["kv_cache_memory_bytes"] = int(cache_gb * 1e9)
        # vLLM's default on a CPU with matrix tiles (AMX) does not support float32.
        if self.device.type == "cpu" and self._latent and config.dtype == "float32":
            arguments["attention_backend"] = "CPU_MLA"
        if self.device.type == "cuda":
            arguments["gpu_memory_utilization"] = config.gpu_memory
            arguments["enable_sleep_mode"] = True
            # vLLM's own all-reduce looks for the devices of all tp ranks in this process, and fails
            # where it sees its own alone, as under Ray.
            if torch.cuda.device_count() < arguments["tensor_parallel_size"]:
                arguments["disable_custom_all_reduce"] = True
        return arguments | config.engine_args

    def close(self) -> None:
        """End vLLM, if it was started, and leave the process groups alone."""
        if (engine := self.__dict__.pop("engine", None)) is not None:
            end(engine)

    # --- weights ---

    def layout(self) -> WeightLayout:
        """Return the boxes that each rank reads by vLLM's loader."""
        return self._layout

    def begin_update(self, version: int) -> None:
        """Begin an update; it repeats an earlier one that was not completed."""
        super().begin_update(version)
        with self._configured():
            self.weights.begin(version)

    def expect(self, wanted: Wanted) -> None:
        """Note the boxes of the next proof; layers that vLLM packs are summed before that."""
        self.weights.expect(wanted)

    def proof(self) -> Proof:
        """Return checksums of the values in vLLM's tensors, of packed ones before their packing.

        Outside of an update packed and opaque parameters cannot be read.
        """
        return self.weights.proof()

    def receive(self, name: str, box: Box, tensor: torch.Tensor) -> None:
        """Copy a box into vLLM's tensors.

        Raises HybridFlowError for a name that is not of this model, and for elements that have
        arrived before.
        """
        self.check_updating(name)
        self.weights.receive(name, box, tensor)

    @torch.no_grad()
    def end_update(self) -> None:
        """Let vLLM process the last layers, and drop the cached keys and values."""
        self.check_updating("end_update")
        with self._configured():
            self.weights.end()

        # On a CPU a tied lm_head has packed the embedding's old values: pack the new ones.
        model = self._runner.model
        if self.device.type == "cpu" and self.ties and hasattr(model, "lm_head"):
            from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

            dispatch_cpu_unquantized_gemm(model.lm_head, remove_weight=False)
        if not self.engine.reset_prefix_cache(reset_connector=True):
            raise HybridFlowError(
                "vLLM did not drop the keys and values of the old weights, since sequences still "
                "use some: end them before the weights change"
            )
        super().end_update()

    def release(self) -> None:
        """On a GPU, free the weights and the KV cache."""
        if self.device.type == "cuda":
            self.llm.sleep(level=2)  # level 1 would keep the weights in host memory

    def resume(self, weights: bool, cache: bool) -> None:
        """Allocate the freed memory again, whose two parts have names in vLLM."""
        if self.device.type == "cuda":
            self.llm.wake_up(tags=["weights"] * weights + ["kv_cache"] * cache)

    # --- generation ---

    def enter(self, request: Request) -> None:
        """Pass a request to vLLM, whose prompt is the prompt with the prefix of the response."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        sampling = request.sampling
        prefix_length = len(request.prefix()[0])
        parameters = SamplingParams(
            max_tokens=sampling.max_tokens - prefix_length,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            logprobs=0,  # of the drawn token alone
            seed=None if sampling.greedy else request.seed,
            stop_token_ids=[] if sampling.ignore_stop else list(sampling.stop_token_ids),
            min_p=sampling.min_p,
            logit_bias=dict(sampling.logit_bias) or None,
            ignore_eos=True,  # a request's stop tokens are in stop_token_ids
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        prompt = {"prompt_token_ids": request.context().tolist()}
        name = self.engine.add_request(str(request.id), prompt, parameters)
        self._names[request.id] = name
        self.sampler.origins[name] = (request.seed, prefix_length)

    def advance(self) -> Iterator[Completion]:
        """Make one step of vLLM; yield the completions of requests that ended in it."""
        outputs = self.engine.step()
        moved()
        for output in outputs:
            request = self.running.get(int(output.request_id))
            if request is not None:
                sequence = output.outputs[0]
                self.sampler.origins.pop(self._names.pop(request.id), None)
                ids, logprobs = _sampled(sequence.token_ids, sequence.logprobs)
                yield self.completion(request, ids, logprobs, sequence.finish_reason)

    def leave(self, ids: Sequence[int]) -> list[Completion]:
        """Abort these requests; return completions with the tokens sampled so far."""
        states = self.engine.output_processor.request_states
        completions = []
        for number in ids:
            name = self._names.pop(number)
            self.sampler.origins.pop(name, None)
            tokens, logprobs = _sampled(
                states[name].detokenizer.output_token_ids,
                states[name].logprobs_processor.logprobs,
            )
            request = self.running[number]
            completions.append(self.completion(request, tokens, logprobs, "abort"))

        # Only now: vLLM forgets the state of a request that it aborts.
        self.engine.abort_request([str(number) for number in ids])
        return completions


def _sampled(tokens: Sequence[int], logprobs: Any) -> tuple[list[int], list[float]]:
    """Return (tokens, their logprobs), from vLLM's mapping token -> logprob for each position."""
    tokens = list(tokens)
    entries = zip(logprobs or (), tokens, strict=True)
    return tokens, [entry[token].logprob for entry, token in entries]
