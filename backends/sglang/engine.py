"""SGLang as a rollout engine.

It must run in a process of its own (kit/hosting/hosted.py), because a scheduler of SGLang's that
fails kills the process which started it:

    worker's process     engine's process              SGLang's own processes
    HostedEngine  ---->  SGLangEngine
                         `- sglang.Engine  -requests-> schedulers, one for each tp rank
                                           -jobs-----> (places.py)
    Bucket of a rank  ---------------------weights---> the scheduler of that rank

This module is imported to check a config, so SGLang itself is only imported when the engine starts.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hybridflow.backends.sglang.config import CPU_CACHE_TOKENS, SGLangConfig
from hybridflow.backends.sglang.places import (
    LOADER,
    Ask,
    Begin,
    End,
    Job,
    Prove,
    Schedulers,
    Take,
)
from hybridflow.backends.sglang.sampler import BACKEND
from hybridflow.backends.sglang.shims import variables
from hybridflow.core.contracts.rollout import Completion, Proof, Request, Wanted
from hybridflow.core.errors import HybridFlowError
from hybridflow.core.values.weights import Box, Param, WeightLayout
from hybridflow.kit.arrivals import check_box
from hybridflow.kit.continuous import ContinuousEngine
from hybridflow.kit.hosting.bucket import Bucket, BucketReader, Load
from hybridflow.kit.hosting.hostable import Hostable
from hybridflow.kit.huggingface.models import (
    longest,
    policy_config,
    saved_parameters,
    windows_of,
    write_config,
)
from hybridflow.kit.tracing.coverage import check_taken, say_opaque

LOOK_S = 0.02
"""Seconds for which `advance` waits for answers. Requests and weight updates that arrive meanwhile
have to wait for it."""


class SGLangEngine(ContinuousEngine, Hostable):
    """The rollout engine "sglang". One object drives all devices of a replica.

    Weights may change while sequences run. SGLang pauses the sequences, drops their keys and
    values, and continues with the new weights after the tokens sampled so far. Each token has the
    version of the weights that sampled it.
    """

    Config = SGLangConfig
    inflight = True

    def __init__(self, model, config, context):
        super().__init__(model, config, context)
        self.device = torch.device(context.device)
        self._tasks: dict[int, asyncio.Task] = {}
        """Request id -> the asyncio task that awaits SGLang's answer."""
        self._leaving: set[int] = set()
        """Requests that were told to end early."""
        self._entered: dict[int, int] = {}
        """Request id -> the version of the weights when it began."""
        self._paused = False
        self._session = False
        """Whether SGLang is in an update session: its processing of loaded weights is undone."""
        self._wanted: dict[int, Wanted] = {}
        """The boxes that each rank's proof is about, by its number in the replica."""

    @classmethod
    def environment(cls, device: torch.device) -> dict[str, str]:
        """Return the variables that switch our sampler on, and on a CPU the shims."""
        return variables(device)

    def start(self) -> None:
        """Start SGLang with undefined weights, and trace its loader.

        Raises ModelError for a model that is no policy, or whose parameters SGLang does not take.
        """
        hf_config = policy_config(self.model)
        shapes, ties = saved_parameters(hf_config)
        text_config = hf_config.get_text_config()
        self.vocab = text_config.vocab_size
        self.max_positions = longest(hf_config, self.config.max_length)
        windows = windows_of(hf_config, self.max_positions)

        # Without this variable SGLang requires a NUMA node for each tp rank.
        if self.device.type == "cpu" and self._tp > 1:
            cores = sorted(os.sched_getaffinity(0))
            os.environ.setdefault("SGLANG_CPU_OMP_THREADS_BIND", _shares(cores, self._tp))
        # Its ranks meet at a file of ours instead of at a port that everybody reaches. By that port
        # SGLang would name the memory that its ranks share on a CPU.
        name = str(secrets.randbelow(10**9))
        os.environ["SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"] = (
            f"file://{tempfile.gettempdir()}/{name}"
        )
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": name}
        import sglang

        with tempfile.TemporaryDirectory() as folder:
            hf_config.eos_token_id = None  # requests have their own end tokens
            write_config(hf_config, folder)
            self.engine = sglang.Engine(**self._arguments(folder))
        self._unlink_shared()
        self._answers = tempfile.TemporaryDirectory(prefix="answers-")
        self.schedulers = Schedulers(self.engine, self._tp, self._answers.name)

        # A start that fails leaves no processes behind.
        dtype = getattr(torch, self.config.dtype)
        try:
            params = {name: Param(shape, dtype) for name, shape in shapes.items()}
            self._map_weights(Ask(params, ties, windows))
        except BaseException:
            self.close()
            raise

    def _map_weights(self, ask: Ask) -> None:
        """Trace SGLang's loader on every rank. Raises ModelError where that fails."""
        params = ask.params
        self._open_session()
        taken = self.schedulers.tell([ask] * self._tp)
        self._close_session()

        opaque: dict[str, str] = {}
        for one in taken:
            opaque |= one.opaque
        say_opaque(opaque, len(params), "SGLang")
        held = {place: one.boxes for place, one in enumerate(taken)}
        check_taken(params, held.values(), "SGLang", self.model.hf_config.get("model_type"))
        self._layout = WeightLayout(params, held, ask.ties, frozenset(params))

    def _unlink_shared(self) -> None:
        """Remove the name of the shared file in which SGLang's processes report their load.

        All of them have mapped it by now. Otherwise the name would remain if they are killed.
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
            # Execution
            "disable_radix_cache": not config.prefix_cache,
            "sampling_backend": BACKEND,
            "log_level": "warning",
            "disable_overlap_schedule": True,
            "disable_cuda_graph": config.eager or self.device.type == "cpu",
            "custom_weight_loader": [LOADER],
        }

        if self.device.type == "cpu":
            arguments |= {
                "attention_backend": "torch_native",
                "mem_fraction_static": 0.3,
                "sleep_on_idle": True,  # otherwise an idle scheduler keeps a core busy
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
        self._answers.cleanup()

    # --- weights ---

    def layout(self) -> WeightLayout:
        """Return the boxes that each of the replica's ranks reads by SGLang's loader."""
        return self._layout

    def begin_update(self, version: int) -> None:
        """Begin an update, and pause running sequences, whose keys and values SGLang drops."""
        super().begin_update(version)

        # An update that was not ended has left SGLang paused, and in a session. Sequences that have
        # ended already are answered at the next `advance`.
        if self.running and not self._paused:
            from sglang.srt.managers.io_struct import PauseGenerationReqInput

            pause = PauseGenerationReqInput(mode="retract")
            self._wait(self.engine.tokenizer_manager.pause_generation(pause))
            self._paused = True
        self._open_session()
        self.schedulers.tell([Begin(version)] * self._tp)

    def _open_session(self) -> None:
        """Begin an update session, in which SGLang's processing of loaded weights is undone."""
        if not self._session and hasattr(self.engine, "begin_weight_update"):  # from 0.5.22 on
            _checked("begin_weight_update", self.engine.begin_weight_update())
        self._session = True

    def _close_session(self) -> None:
        """End the update session, so that SGLang processes the new weights."""
        if hasattr(self.engine, "end_weight_update"):
            _checked("end_weight_update", self.engine.end_weight_update())
        self._session = False

    def receive(self, name: str, box: Box, tensor: torch.Tensor) -> None:
        """Send a box to the first rank's scheduler."""
        self.check_updating(name)
        check_box(self._layout.params, self._layout.ties, name, box, tensor)
        nbytes = tensor.numel() * self._layout.params[name].dtype.itemsize
        bucket = Bucket(self.device, nbytes)
        try:
            reader = BucketReader(bucket.handle(), self.device)
            for load in bucket.write(name, box, tensor, self._layout.params[name].dtype):
                self.take(0, reader, load)
            self.take(0, reader, bucket.taken())
        finally:
            bucket.close()

    def take(self, place: int, reader: BucketReader, load: Load) -> None:
        """Let a rank's scheduler copy the contents of that rank's bucket."""
        for piece in load.pieces:
            self.check_updating(piece.name)
        if load.pieces:
            self._tell_one(place, Take(reader.handle, load))

    def _tell_one(self, place: int, job: Job) -> Any:
        """Let one rank's scheduler do a job; return its answer."""
        jobs: list[Job | None] = [None] * self._tp
        jobs[place] = job
        return self.schedulers.tell(jobs)[place]

    def expect_of(self, place: int, wanted: Wanted) -> None:
        """Note the boxes that the proof of a rank is about."""
        self._wanted[place] = wanted

    def proof_of(self, place: int) -> Proof:
        """Return the proof of a rank's scheduler."""
        # SGLang accepts weight requests only within a session, which an update is.
        self._open_session()
        try:
            return self._tell_one(place, Prove(self._wanted[place]))
        finally:
            if not self.updating:
                self._close_session()

    def expect(self, wanted: Wanted) -> None:
        """Note the boxes that the proof of the first rank is about."""
        self.expect_of(0, wanted)

    def proof(self) -> Proof:
        """Return the proof of the first rank's scheduler."""
        return self.proof_of(0)

    def end_update(self) -> None:
        """End the update, and continue paused sequences with the new version."""
        from sglang.srt.managers.io_struct import (
            ContinueGenerationReqInput,
            UpdateWeightVersionReqInput,
        )

        self.check_updating("end_update")
        # The keys and values of the old weights are dropped too.
        self.schedulers.tell([End()] * self._tp, flush_cache=True)
        self._close_session()

        # SGLang records the version with each token.
        manager = self.engine.tokenizer_manager
        version = UpdateWeightVersionReqInput(
            new_version=str(self._next_version), abort_all_requests=False
        )
        self._wait(manager.update_weight_version(version))
        super().end_update()

        if self._paused:
            self._wait(manager.continue_generation(ContinueGenerationReqInput()))
            self._paused = False

    def release(self) -> None:
        """On a GPU, free the weights and the KV cache."""
        if self.device.type == "cuda":
            self.engine.release_memory_occupation()

    def resume(self, weights: bool, cache: bool) -> None:
        """Allocate the freed memory again, whose parts have names in SGLang."""
        if self.device.type == "cuda":
            parts = ["weights"] * weights + ["kv_cache", "cuda_graph"] * cache
            self.engine.resume_memory_occupation(tags=parts)

    # --- generation ---

    def enter(self, request: Request) -> None:
        """Send SGLang a request, whose prompt is the prompt with the prefix of the response."""
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
        assert self.version is not None
        self._entered[request.id] = self.version

    def advance(self) -> Iterator[Completion]:
        """Wait up to LOOK_S for answers; yield the completions of those that arrived.

        Raises HybridFlowError for a request that SGLang refuses; it counts as aborted.
        """
        tasks = self._tasks.values()
        self._wait(asyncio.wait(tasks, timeout=LOOK_S, return_when=asyncio.FIRST_COMPLETED))

        for number in [number for number, task in self._tasks.items() if task.done()]:
            task = self._tasks.pop(number)
            entered = self._entered.pop(number)
            try:
                completion = self._read(self.running[number], task.result(), entered)
            except ValueError as error:  # SGLang's error for a request that it refuses
                self._done.append(self.completion(self.running.pop(number), [], [], "abort"))
                raise HybridFlowError(f"request {number}: SGLang refused it: {error}") from error
            self._leaving.discard(number)
            yield completion

    def _read(self, request: Request, answer: dict[str, Any], entered: int) -> Completion:
        """Return SGLang's answer as a completion; `entered` is the version that it began with.

        Raises ValueError where SGLang ended a request early that was not aborted.
        """
        about = answer["meta_info"]
        reason = about["finish_reason"]["type"]
        if reason == "abort" and request.id not in self._leaving:
            raise ValueError(about["finish_reason"].get("message"))

        # Each entry is (logprob, token, text).
        entries = about.get("output_token_logprobs") or []
        ids = [entry[1] for entry in entries]
        logprobs = [entry[0] for entry in entries]

        # Tokens without a recorded version get the oldest that is possible.
        versions = np.full(len(ids), entered, np.int64)
        for span in about.get("weight_versions") or ():
            versions[span["start"] : span["end"]] = int(span["version"])
        return self.completion(request, ids, logprobs, reason, versions)

    def leave(self, ids: Sequence[int]) -> tuple[()]:
        """Abort these requests in SGLang; `advance` returns their completions."""
        # A task that was only created has sent nothing yet: let each run to its first await.
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
    """Return a request's name for SGLang.

    SGLang aborts every request whose name begins with the given one, so names end with a mark.
    """
    return f"request-{request}."


def _checked(what: str, answer: Any) -> None:
    """Raise HybridFlowError if SGLang's return value says that a call failed.

    SGLang returns None, a bool, or a tuple (bool, reason, ...).
    """
    succeeded = answer
    reason = ""
    if isinstance(answer, tuple):
        succeeded, reason = answer[:2]
    if succeeded is False:
        raise HybridFlowError(f"SGLang's {what} failed: {reason}")
