"""SGLang as a rollout engine.

It must run in a process of its own (kit/hosting/hosted.py), because a scheduler of SGLang's that
fails kills the process which started it:

    worker's process     engine's process              SGLang's own processes
    HostedEngine  ---->  SGLangEngine
                         `- sglang.Engine  -requests-> schedulers, one for each tp rank
                                           -weights--> (buckets of shared memory, or a broadcast)

This module is imported to check a config, so SGLang itself is imported when the engine starts.
"""

from __future__ import annotations

import asyncio
import os
import socket
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hybridflow.backends.sglang.config import SGLangConfig
from hybridflow.backends.sglang.sampler import BACKEND
from hybridflow.backends.sglang.shims import variables
from hybridflow.core.contracts.rollout import Completion, Request
from hybridflow.core.errors import HybridFlowError
from hybridflow.core.values.weights import Box, WeightLayout
from hybridflow.kit.continuous import ContinuousEngine
from hybridflow.kit.hosting.hostable import Hostable
from hybridflow.kit.huggingface.models import policy_config, write_config
from hybridflow.kit.whole import WholeParameters

CPU_CACHE_TOKENS = 65536
"""Number of tokens that the KV cache on a CPU has room for, where the config does not say."""
LOOK_S = 0.02
"""Seconds for which `advance` waits for answers. Requests and weight updates that come in the
meantime wait as long."""
GROUP = "hybridflow"
"""Name of the process group through which weights are broadcast."""


class SGLangEngine(ContinuousEngine, Hostable):
    """The rollout engine "sglang". One object drives all devices of a replica.

    Weights may change while sequences run. SGLang pauses the sequences, drops their keys and
    values, and continues with the new weights from the tokens drawn so far. Each token carries the
    version that drew it.
    """

    Config = SGLangConfig
    inflight = True

    def __init__(self, model, config, context):
        super().__init__(model, config, context)
        self.device = torch.device(context.device)
        self._tasks: dict[int, asyncio.Task] = {}
        """SGLang's answer to each running request, by the request's id."""
        self._leaving: set[int] = set()
        """Requests that were told to end early."""
        self._bucket: list[tuple[str, torch.Tensor]] = []
        """Parameters of this update that SGLang does not have yet: (name, values)."""
        self._paused = False
        self._group: Any = None
        """The process group for weights, once it is there; see `_joined_group`."""

    @classmethod
    def environment(cls, device: torch.device) -> dict[str, str]:
        """Return the variables that switch our sampler on, and on a CPU the shims."""
        return variables(device)

    def start(self) -> None:
        """Start SGLang with weights that are not set; raises ModelError for a non-policy."""
        hf_config = policy_config(self.model)
        text_config = hf_config.get_text_config()
        self.vocab = text_config.vocab_size
        self.max_positions = self.config.max_length or text_config.max_position_embeddings

        # Without this variable SGLang wants a NUMA node for each tp rank.
        if self.device.type == "cpu" and self._tp > 1:
            cores = sorted(os.sched_getaffinity(0))
            os.environ.setdefault("SGLANG_CPU_OMP_THREADS_BIND", _shares(cores, self._tp))
        import sglang

        with tempfile.TemporaryDirectory() as folder:
            hf_config.eos_token_id = None  # requests say where they end
            write_config(hf_config, folder)
            self.engine = sglang.Engine(**self._arguments(folder))
        self._unlink_shared()
        self.store = WholeParameters.of(hf_config, self.config.dtype, self.device, self._load)

    def _unlink_shared(self) -> None:
        """Remove the name of the shared file in which SGLang's processes report their load.

        All of them have mapped it by now. The name would outlive a kill.
        """
        from sglang.srt.managers.load_snapshot import shm_path_for

        Path(shm_path_for(self.engine.port_args.instance_id)).unlink(missing_ok=True)

    @property
    def _tp(self) -> int:
        """Number of tensor-parallel ranks of a replica."""
        return self.context.generation.tp if self.context.generation is not None else 1

    def _arguments(self, folder: str) -> dict[str, Any]:
        """Return the arguments of sglang.Engine; `folder` holds the model's config.json."""
        config = self.config
        arguments: dict[str, Any] = {
            # The model: weights come by an update, and tokens need no tokenizer.
            "model_path": folder,
            "skip_tokenizer_init": True,
            "load_format": "dummy",
            "dtype": config.dtype,
            "device": self.device.type,
            "tp_size": self._tp,
            "random_seed": 0,  # requests bring seeds of their own
            # Sizes
            "context_length": self.max_positions,
            "max_running_requests": config.max_sequences,
            # How it works
            "disable_radix_cache": not config.prefix_cache,
            "sampling_backend": BACKEND,
            "log_level": "warning",
            "disable_overlap_schedule": True,
            "disable_cuda_graph": config.eager or self.device.type == "cpu",
        }

        if self.device.type == "cpu":
            arguments |= {
                "attention_backend": "torch_native",
                "mem_fraction_static": 0.3,
                "sleep_on_idle": True,  # else an idle scheduler keeps a core busy
                "max_total_tokens": config.kv_tokens or CPU_CACHE_TOKENS,
            }
        else:
            # The memory saver is what frees memory in `sleep`.
            arguments |= {"mem_fraction_static": config.gpu_memory, "enable_memory_saver": True}
            if config.kv_tokens:
                arguments["max_total_tokens"] = config.kv_tokens
        return arguments | config.engine_args

    def close(self) -> None:
        """End SGLang's processes."""
        self.engine.shutdown()

    # --- weights ---

    def layout(self) -> WeightLayout:
        """Return a layout in which the replica's one engine object takes whole parameters."""
        return self.store.layout(1)

    def begin_update(self, version: int) -> None:
        """Begin an update, and pause what runs: SGLang drops the keys and values of it."""
        from sglang.srt.managers.io_struct import PauseGenerationReqInput

        interrupted = self.updating
        super().begin_update(version)
        self._bucket.clear()
        self.store.begin()
        # SGLang is paused and knows of an update already if the last one was not ended.
        if interrupted:
            return

        # Sequences that have ended already are answered at the next `advance`.
        if self.running:
            pause = PauseGenerationReqInput(mode="retract")
            self._wait(self.engine.tokenizer_manager.pause_generation(pause))
            self._paused = True
        if hasattr(self.engine, "begin_weight_update"):  # from 0.5.22 on
            _checked("begin_weight_update", self.engine.begin_weight_update())

    def receive(self, name: str, box: Box, tensor: torch.Tensor) -> None:
        """Add a box; SGLang gets the parameter in a bucket, once it is whole."""
        self.check_updating(name)
        self.store.receive(name, box, tensor)

    def _load(self, name: str, whole: torch.Tensor) -> None:
        """Put a whole parameter into the bucket; hand the bucket over when it is full."""
        self._bucket.append((name, whole))
        if sum(values.nbytes for _, values in self._bucket) >= self.config.bucket_mb * 1e6:
            self._flush()

    def _flush(self) -> None:
        """Hand the parameters in the bucket to the schedulers, and empty it."""
        if not self._bucket:
            return
        if self.config.weights == "group":
            self._broadcast()
        else:
            self._hand_over()
        self._bucket.clear()

    def _hand_over(self) -> None:
        """Give every scheduler a handle of the bucket in shared memory."""
        from sglang.srt.utils import MultiprocessingSerializer
        from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

        bucket = FlattenedTensorBucket(named_tensors=self._bucket)
        content = {
            "flattened_tensor": bucket.get_flattened_tensor(),
            "metadata": bucket.get_metadata(),
        }
        handles = [
            MultiprocessingSerializer.serialize(content, output_str=True) for _ in range(self._tp)
        ]
        answer = self.engine.update_weights_from_tensor(
            handles, load_format="flattened_bucket", flush_cache=False
        )
        _checked("update_weights_from_tensor", answer)

    def _broadcast(self) -> None:
        """Send the bucket to the schedulers through the process group.

        A thread sends while SGLang's call, which makes the schedulers receive, runs in this one.
        """
        import torch.distributed as dist

        group = self._joined_group()
        names = [name for name, _ in self._bucket]
        dtypes = [str(values.dtype).removeprefix("torch.") for _, values in self._bucket]
        shapes = [list(values.shape) for _, values in self._bucket]

        def send():
            for _, values in self._bucket:
                dist.broadcast(values.contiguous(), src=0, group=group)

        sending = threading.Thread(target=send)
        sending.start()
        answer = self.engine.update_weights_from_distributed(
            names, dtypes, shapes, GROUP, flush_cache=False
        )
        sending.join()
        _checked("update_weights_from_distributed", answer)

    def _joined_group(self) -> Any:
        """Return the process group for weights; the first call makes it.

        This process is rank 0, and SGLang's schedulers are the others. Making a group waits for all
        of its ranks, so a thread joins while SGLang's call makes the schedulers join.
        """
        if self._group is not None:
            return self._group
        from sglang.srt.utils import init_custom_process_group

        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        backend = "gloo" if self.device.type == "cpu" else "nccl"
        world = self._tp + 1
        groups: list[Any] = []

        def join():
            group = init_custom_process_group(
                backend=backend,
                init_method=f"tcp://127.0.0.1:{port}",
                world_size=world,
                rank=0,
                group_name=GROUP,
            )
            groups.append(group)

        joining = threading.Thread(target=join)
        joining.start()
        answer = self.engine.init_weights_update_group("127.0.0.1", port, 1, world, GROUP, backend)
        _checked("init_weights_update_group", answer)
        joining.join()
        self._group = groups[0]
        return self._group

    def end_update(self) -> None:
        """Hand over the rest, and let paused sequences continue with the new version."""
        from sglang.srt.managers.io_struct import (
            ContinueGenerationReqInput,
            UpdateWeightVersionReqInput,
        )

        self.check_updating("end_update")
        self.store.end()
        self._flush()
        if hasattr(self.engine, "end_weight_update"):
            _checked("end_weight_update", self.engine.end_weight_update())

        # SGLang notes the version with each token, and forgets the keys and values of the old one.
        manager = self.engine.tokenizer_manager
        version = UpdateWeightVersionReqInput(
            new_version=str(self._next_version), abort_all_requests=False
        )
        self._wait(manager.update_weight_version(version))
        self.engine.flush_cache()
        super().end_update()

        if self._paused:
            self._wait(manager.continue_generation(ContinueGenerationReqInput()))
            self._paused = False

    def sleep(self) -> None:
        """On a GPU, free the weights and the KV cache; then `wake` needs an update."""
        self.check_idle()
        if self.device.type == "cuda" and not self.asleep:
            self.engine.release_memory_occupation()
            self.version = None
            self.store.complete = False
        self.asleep = True

    def wake(self) -> None:
        """Allocate again what `sleep` freed."""
        if self.asleep and self.device.type == "cuda":
            self.engine.resume_memory_occupation()
        self.asleep = False

    # --- generation ---

    def enter(self, request: Request) -> None:
        """Ask SGLang for the rest of a response; a prefix that it has goes behind its prompt."""
        sampling = request.sampling
        prefix_length = len(request.prefix()[0])
        biases = {str(token): bias for token, bias in sampling.logit_bias}
        parameters = {
            "max_new_tokens": sampling.max_tokens - prefix_length,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p,
            "top_k": sampling.top_k or -1,  # -1: no limit
            "sampling_seed": request.seed,
            "ignore_eos": sampling.ignore_stop,
            "stop_token_ids": list(sampling.stop_token_ids),
            "logit_bias": biases or None,
        }
        answer = self.engine.async_generate(
            input_ids=request.context().tolist(),
            sampling_params=parameters,
            return_logprob=True,
            rid=_name(request.id),
        )
        self._tasks[request.id] = self.engine.loop.create_task(answer)

    def advance(self) -> Iterator[Completion]:
        """Wait up to LOOK_S for answers; yield the completions of those that came.

        Raises HybridFlowError for a request that SGLang refuses; it counts as aborted.
        """
        tasks = self._tasks.values()
        self._wait(asyncio.wait(tasks, timeout=LOOK_S, return_when=asyncio.FIRST_COMPLETED))

        for number in [number for number, task in self._tasks.items() if task.done()]:
            task = self._tasks.pop(number)
            try:
                completion = self._read(self.running[number], task.result())
            except ValueError as error:  # what SGLang raises for a request that it does not take
                self._done.append(self.completion(self.running.pop(number), [], [], "abort"))
                raise HybridFlowError(f"request {number}: SGLang refused it: {error}") from error
            self._leaving.discard(number)
            yield completion

    def _read(self, request: Request, answer: dict[str, Any]) -> Completion:
        """Turn SGLang's answer into a completion.

        Raises ValueError where SGLang ended a request early that was not told to end.
        """
        about = answer["meta_info"]
        reason = about["finish_reason"]["type"]
        if reason == "abort" and request.id not in self._leaving:
            raise ValueError(about["finish_reason"].get("message"))

        # Each entry is (logprob, token, text).
        entries = about.get("output_token_logprobs") or []
        ids = [entry[1] for entry in entries]
        logprobs = [entry[0] for entry in entries]

        # Without spans, all tokens were drawn with the weights of today.
        versions = np.full(len(ids), self.version, np.int64)
        for span in about.get("weight_versions") or ():
            versions[span["start"] : span["end"]] = int(span["version"])
        return self.completion(request, ids, logprobs, reason, versions)

    def leave(self, ids: Sequence[int]) -> tuple[()]:
        """Tell SGLang to end these requests; `advance` gives their completions."""
        # A task that was only created has asked nothing yet: let each run to its first wait.
        self._wait(asyncio.sleep(0))
        self._leaving.update(ids)
        for number in ids:
            self.engine.tokenizer_manager.abort_request(rid=_name(number))
        return ()

    def _wait(self, what: Any) -> Any:
        """Run SGLang's event loop until this awaitable is done; return its result."""
        return self.engine.loop.run_until_complete(what)


def _shares(cores: Sequence[int], ranks: int) -> str:
    """Split cores among ranks, in SGLang's notation: "0,1|2,3".

    Ranks share cores in turn where there are fewer cores than ranks.
    """
    cores_per_rank = max(len(cores) // ranks, 1)
    parts = []
    for rank in range(ranks):
        first = rank * cores_per_rank
        own = [cores[(first + i) % len(cores)] for i in range(cores_per_rank)]
        parts.append(",".join(map(str, own)))
    return "|".join(parts)


def _name(request: int) -> str:
    """Name a request for SGLang.

    It aborts every request whose name begins with the one to abort, so the name ends with a mark.
    """
    return f"request-{request}."


def _checked(what: str, answer: Any) -> None:
    """Raise HybridFlowError for a call that SGLang reports as failed by what it returns.

    SGLang returns None, a bool, or a tuple (bool, reason, ...).
    """
    succeeded = answer
    reason = ""
    if isinstance(answer, tuple):
        succeeded, reason = answer[:2]
    if succeeded is False:
        raise HybridFlowError(f"SGLang's {what} failed: {reason}")
