"""SGLang as a rollout engine. It must run in a process of its own (kit/hosting/hosted.py): a scheduler of SGLang's that
fails kills the process that made it.

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
LOOK_S = 0.02
"""Seconds that it waits for answers at a time: what its process is told meanwhile (requests, updates) waits as long."""
GROUP = "hybridflow"


class SGLangEngine(ContinuousEngine, Hostable):
    """A plugin of kind "rollout_engine", name "sglang". One object drives all devices of a replica.

    Weights may change while sequences run: SGLang pauses them, forgets their keys and values, and goes on with the new
    weights from the tokens that are there; each token carries the version that made it.
    """

    Config = SGLangConfig
    inflight = True

    def __init__(self, model, config, context):
        super().__init__(model, config, context)
        self.device = torch.device(context.device)
        self._tasks: dict[int, asyncio.Task] = {}
        self._leaving: set[int] = set()
        """Requests that were told to end early."""
        self._bucket: list[tuple[str, torch.Tensor]] = []
        self._paused = False
        self._group: Any = None

    @classmethod
    def environment(cls, device: torch.device) -> dict[str, str]:
        return variables(device)

    def start(self) -> None:
        """Raises ModelError for a model that is no policy."""
        hf_config = policy_config(self.model)
        text = hf_config.get_text_config()
        self.vocab, self.max_positions = (
            text.vocab_size,
            self.config.max_length or text.max_position_embeddings,
        )
        if (
            self.device.type == "cpu" and self._tp > 1
        ):  # without, it wants a NUMA node for each rank
            os.environ.setdefault(
                "SGLANG_CPU_OMP_THREADS_BIND", _shares(sorted(os.sched_getaffinity(0)), self._tp)
            )
        import sglang

        with tempfile.TemporaryDirectory() as folder:
            hf_config.eos_token_id = None  # requests say where they end
            write_config(hf_config, folder)
            self.engine = sglang.Engine(**self._arguments(folder))
        self._unlink_shared()
        self.store = WholeParameters.of(hf_config, self.config.dtype, self.device, self._load)

    def _unlink_shared(self) -> None:
        """SGLang's processes have mapped the file in which they tell of their load; its name would outlive a kill."""
        from sglang.srt.managers.load_snapshot import shm_path_for

        Path(shm_path_for(self.engine.port_args.instance_id)).unlink(missing_ok=True)

    @property
    def _tp(self) -> int:
        return self.context.generation.tp if self.context.generation is not None else 1

    def _arguments(self, folder: str) -> dict[str, Any]:
        config = self.config
        found: dict[str, Any] = {
            "model_path": folder, "skip_tokenizer_init": True, "load_format": "dummy", "dtype": config.dtype,
            "device": self.device.type, "tp_size": self._tp, "random_seed": 0, "context_length": self.max_positions,
            "max_running_requests": config.max_sequences, "disable_radix_cache": not config.prefix_cache,
            "sampling_backend": BACKEND, "log_level": "warning", "disable_overlap_schedule": True,
            "disable_cuda_graph": config.eager or self.device.type == "cpu",
        }  # fmt: skip
        if self.device.type == "cpu":
            found |= {
                "attention_backend": "torch_native",
                "mem_fraction_static": 0.3,
                "sleep_on_idle": True,
            }
            found |= {"max_total_tokens": config.kv_tokens or CPU_CACHE_TOKENS}
        else:
            found |= {"mem_fraction_static": config.gpu_memory, "enable_memory_saver": True}
            found |= {"max_total_tokens": config.kv_tokens} if config.kv_tokens else {}
        return found | config.engine_args

    def close(self) -> None:
        self.engine.shutdown()

    # Weights
    def layout(self) -> WeightLayout:
        return self.store.layout(1)

    def begin_update(self, version: int) -> None:
        from sglang.srt.managers.io_struct import PauseGenerationReqInput

        broke_off = self.updating
        super().begin_update(version)
        self._bucket.clear()
        self.store.begin()
        if broke_off:
            return
        if self.running:  # those that have ended already are answered when somebody looks
            self._wait(
                self.engine.tokenizer_manager.pause_generation(
                    PauseGenerationReqInput(mode="retract")
                )
            )
            self._paused = True
        if hasattr(self.engine, "begin_weight_update"):  # from 0.5.22 on
            _checked("begin_weight_update", self.engine.begin_weight_update())

    def receive(self, name: str, box: Box, tensor: torch.Tensor) -> None:
        self.check_updating(name)
        self.store.receive(name, box, tensor)

    def _load(self, name: str, whole: torch.Tensor) -> None:
        self._bucket.append((name, whole))
        if sum(values.nbytes for _, values in self._bucket) >= self.config.bucket_mb * 1e6:
            self._flush()

    def _flush(self) -> None:
        if not self._bucket:
            return
        if self.config.weights == "group":
            self._broadcast()
        else:
            self._hand_over()
        self._bucket.clear()

    def _hand_over(self) -> None:
        from sglang.srt.utils import MultiprocessingSerializer
        from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

        bucket = FlattenedTensorBucket(named_tensors=self._bucket)
        content = {
            "flattened_tensor": bucket.get_flattened_tensor(),
            "metadata": bucket.get_metadata(),
        }
        each = [
            MultiprocessingSerializer.serialize(content, output_str=True) for _ in range(self._tp)
        ]
        answer = self.engine.update_weights_from_tensor(
            each, load_format="flattened_bucket", flush_cache=False
        )
        _checked("update_weights_from_tensor", answer)

    def _broadcast(self) -> None:
        import torch.distributed as dist

        group = self._joined_group()
        sending = threading.Thread(
            target=lambda: [
                dist.broadcast(values.contiguous(), src=0, group=group)
                for _, values in self._bucket
            ]
        )
        sending.start()
        answer = self.engine.update_weights_from_distributed(
            [name for name, _ in self._bucket], [str(v.dtype).removeprefix("torch.") for _, v in self._bucket],
            [list(v.shape) for _, v in self._bucket], GROUP, flush_cache=False,
        )  # fmt: skip
        sending.join()
        _checked("update_weights_from_distributed", answer)

    def _joined_group(self) -> Any:
        """This process is rank 0 of the group, SGLang's schedulers are the others."""
        if self._group is not None:
            return self._group
        from sglang.srt.utils import init_custom_process_group

        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        backend, world = ("gloo" if self.device.type == "cpu" else "nccl"), self._tp + 1
        made: list[Any] = []
        joining = threading.Thread(
            target=lambda: made.append(
                init_custom_process_group(
                    backend=backend,
                    init_method=f"tcp://127.0.0.1:{port}",
                    world_size=world,
                    rank=0,
                    group_name=GROUP,
                )
            )
        )
        joining.start()
        answer = self.engine.init_weights_update_group("127.0.0.1", port, 1, world, GROUP, backend)
        _checked("init_weights_update_group", answer)
        joining.join()
        self._group = made[0]
        return self._group

    def end_update(self) -> None:
        from sglang.srt.managers.io_struct import (
            ContinueGenerationReqInput,
            UpdateWeightVersionReqInput,
        )

        self.check_updating("end_update")
        self.store.end()
        self._flush()
        if hasattr(self.engine, "end_weight_update"):
            _checked("end_weight_update", self.engine.end_weight_update())
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
        self.check_idle()
        if self.device.type == "cuda" and not self.asleep:
            self.engine.release_memory_occupation()
            self.version, self.store.complete = None, False
        self.asleep = True

    def wake(self) -> None:
        if self.asleep and self.device.type == "cuda":
            self.engine.resume_memory_occupation()
        self.asleep = False

    # Generation
    def enter(self, request: Request) -> None:
        s, before = request.sampling, len(request.prefix()[0])
        sampling = {
            "max_new_tokens": s.max_tokens - before, "temperature": s.temperature, "top_p": s.top_p, "min_p": s.min_p,
            "top_k": s.top_k or -1, "sampling_seed": request.seed,
            "ignore_eos": s.ignore_stop, "stop_token_ids": list(s.stop_token_ids),
            "logit_bias": {str(token): bias for token, bias in s.logit_bias} or None,
        }  # fmt: skip
        asked = self.engine.async_generate(
            input_ids=request.context().tolist(),
            sampling_params=sampling,
            return_logprob=True,
            rid=_name(request.id),
        )
        self._tasks[request.id] = self.engine.loop.create_task(asked)

    def advance(self) -> Iterator[Completion]:
        tasks = self._tasks.values()
        self._wait(asyncio.wait(tasks, timeout=LOOK_S, return_when=asyncio.FIRST_COMPLETED))
        for at in [at for at, task in self._tasks.items() if task.done()]:
            task = self._tasks.pop(at)
            try:
                completion = self._read(self.running[at], task.result())
            except ValueError as error:  # what SGLang raises for a request that it does not take
                self._done.append(self.completion(self.running.pop(at), [], [], "abort"))
                raise HybridFlowError(f"request {at}: SGLang refused it: {error}") from error
            self._leaving.discard(at)
            yield completion

    def _read(self, request: Request, answer: dict[str, Any]) -> Completion:
        about = answer["meta_info"]
        reason = about["finish_reason"]["type"]
        if reason == "abort" and request.id not in self._leaving:
            raise ValueError(about["finish_reason"].get("message"))
        entries = about.get("output_token_logprobs") or []
        ids, logprobs = [e[1] for e in entries], [e[0] for e in entries]
        versions = np.full(len(ids), self.version, np.int64)
        for span in about.get("weight_versions") or ():
            versions[span["start"] : span["end"]] = int(span["version"])
        return self.completion(request, ids, logprobs, reason, versions)

    def leave(self, ids: Sequence[int]) -> tuple[()]:
        self._wait(asyncio.sleep(0))  # a task that was only made has asked nothing yet
        self._leaving.update(ids)
        for at in ids:
            self.engine.tokenizer_manager.abort_request(rid=_name(at))
        return ()

    def _wait(self, what: Any) -> Any:
        return self.engine.loop.run_until_complete(what)


def _shares(cores: Sequence[int], ranks: int) -> str:
    """Each rank's cores, as SGLang reads them: "0,1|2,3"; ranks take turns where cores are fewer."""
    each = max(len(cores) // ranks, 1)
    parts = [[cores[(rank * each + i) % len(cores)] for i in range(each)] for rank in range(ranks)]
    return "|".join(",".join(map(str, part)) for part in parts)


def _name(request: int) -> str:
    """SGLang aborts every request whose name begins so."""
    return f"request-{request}."


def _checked(what: str, answer: Any) -> None:
    """SGLang tells of failures by what it returns."""
    good, why = answer[:2] if isinstance(answer, tuple) else (answer, "")
    if good is False:
        raise HybridFlowError(f"SGLang's {what} failed: {why}")
