"""A job that generates and trains nothing, from a model and the settings of its run.

the run's tables        what generation, data and rewards need of them
options of a command    --engine, --data, --reward
key=value               as of a config
        |
        v
tables of a config, whose actor has the backend `saved`  --resolve-->  Job
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import attrs

from hybridflow.core.contracts.algorithm import Algorithm
from hybridflow.core.contracts.role import Role
from hybridflow.core.contracts.step import StepContext
from hybridflow.core.job.job import Job
from hybridflow.inference.models import FoundModel
from hybridflow.settle.config.load import merge, read_config
from hybridflow.settle.placement import resolve_placed
from hybridflow.settle.schema import SamplingSection
from hybridflow.settle.stages import located_model

KEPT = ("runtime", "pools", "data", "tokenizer", "rollout", "environment", "validation")
"""Tables that are taken over from the run as they are."""
ROWS = 256
"""Number of concurrent responses for which the memory is estimated."""
PREFERENCES = ("rejected", "unsafe")
"""Keys of [data] by which one row becomes two: a preferred response and another."""
DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
"""A training backend's `precision` -> the dtype in which it keeps a frozen model."""
SOURCES = {".jsonl": "jsonl", ".json": "jsonl", ".parquet": "parquet"}
"""How a file's name ends -> the data source that reads it."""


@attrs.frozen
class InferenceConfig:
    """No settings."""


class Inference(Algorithm):
    """Stands for the algorithm in a job without training: one policy, which generates."""

    Config = InferenceConfig

    def roles(self) -> tuple[Role, ...]:
        """Return the policy; a reward joins it where responses are scored."""
        return (Role("actor", generates=True),)

    def step(self, ctx: StepContext) -> None:
        """Generate responses, for the planner's estimate of memory."""
        ctx.actor.generate(ctx.prompts(ROWS))


def inference_tables(
    found: FoundModel, folder: Path, engine: str | None = None, scored: bool = False
) -> dict[str, Any]:
    """Return the tables of a config that generates with the model.

    folder: where the job writes; engine: a rollout engine to use instead of the run's; scored: the
    tables also get the run's reward and held-out data.
    """
    tables = {key: deepcopy(found.tables[key]) for key in KEPT if key in found.tables}
    if not scored:
        tables.pop("validation", None)
        tables.pop("environment", None)
    tables["algorithm"] = {"name": f"{Inference.__module__}:{Inference.__qualname__}"}
    own = found.tables.get("run", {})
    tables["run"] = {key: own[key] for key in ("seed", "device", "preflight") if key in own}
    tables["run"] |= {"folder": str(folder.parent), "name": folder.name}
    if engine is not None:
        tables["rollout"] = {"name": engine}

    # Rejected responses are for training: here each row is one prompt.
    for section in (tables.get("data", {}), tables.get("validation", {}).get("data", {})):
        for key in PREFERENCES:
            section.pop(key, None)

    # A model folder without a run brings its own stop tokens and sampling.
    tables["sampling"] = deepcopy(found.tables.get("sampling", {}))
    if found.run is None:
        tables["sampling"] |= {**found.sampling, "stop_tokens": found.stop_tokens}
    if found.tokenizer is not None:
        tables["tokenizer"] = {"path": found.tokenizer}

    # The roles, and the pools that they use: only those may be named.
    actor = tables["actor"] = _actor(found)
    pools = {actor["pool"]}
    if scored and "reward" in found.tables:
        reward = tables["reward"] = _reward(found)
        if "model" in reward:
            pools.add(reward.get("pool", "main"))
    named = tables.get("pools", {"main": [1]})
    tables["pools"] = {name: size for name, size in named.items() if name in pools}
    if not tables["pools"]:
        tables["pools"] = {actor["pool"]: [1]}

    # One rank needs no other process.
    if list(tables["pools"].values()) == [[1]]:
        tables["runtime"] = {"name": "inline"}
    return tables


def _actor(found: FoundModel) -> dict[str, Any]:
    """Return the table of the role that generates, in the pool where the run generated."""
    role = found.role_table
    backend: dict[str, Any] = {"name": "saved"}
    if found.checkpoint is not None:
        backend["checkpoint"] = str(found.checkpoint)
        if lora := role.get("backend", {}).get("lora"):
            backend |= {"lora": lora, "dtype": DTYPES.get(str(found.precision), "auto")}
    generation = dict(role.get("generation", {}))
    pool = generation.pop("pool", None) or role.get("pool", "main")
    return {
        "model": dict(found.model),
        "pool": pool,
        "backend": backend,
        "generation": generation,
    }


def _reward(found: FoundModel) -> dict[str, Any]:
    """Return the run's reward as a table; the path of an earlier stage's model is resolved."""
    given = found.tables["reward"]
    if isinstance(given, str):
        return {"function": given}
    reward = deepcopy(dict(given))
    if "model" in reward and found.run is not None:
        reward["model"] = located_model(reward["model"], found.run, "reward")

        # Unless the table names a backend, it has the actor's, without adapters.
        trainer = dict(found.role_table.get("backend", {}))
        trainer.pop("lora", None)
        reward.setdefault("backend", trainer)
    return reward


def on_one_device(found: FoundModel, folder: Path, engine: str | None = None) -> dict[str, Any]:
    """Return the tables of `inference_tables` for one engine in this process.

    Prompts may be longer than those of the run's data.
    """
    tables = inference_tables(found, folder / "logs", engine)
    tables["actor"] |= {"pool": "main", "generation": {}}
    tables.get("data", {}).pop("max_prompt_tokens", None)
    return tables | {"pools": {"main": [1]}, "runtime": {"name": "inline"}}


def with_overrides(
    tables: Mapping[str, Any], overrides: Sequence[str], found: FoundModel, longest: int = 1024
) -> dict[str, Any]:
    """Return tables with overrides `key=value`. Raises ConfigError with all that are wrong.

    By default prompts have at most `longest` tokens, and with their responses no more than the
    model has positions; for a model folder without a run, texts begin with bos where its tokenizer
    begins them so.
    """
    merged, _ = read_config(tables, overrides)
    positions = found.positions
    sampling = merged["sampling"]
    response = SamplingSection().max_tokens
    if found.run is None and positions is not None:
        response = min(response, positions // 2)
    response = sampling.setdefault("max_tokens", response)
    room = longest if positions is None else min(longest, positions - response)
    data = merged.setdefault("data", {})
    data.setdefault("max_prompt_tokens", max(1, room))
    # A chat begins as its template says; a prompt of a single field may be a chat.
    lone = re.fullmatch(r"\{[^{}]+\}", data.get("prompt", "{prompt}"))
    chat = "messages" in data or (lone and found.has_chat_template)
    if found.run is None and not chat:
        data.setdefault("bos", found.begins_with_bos)
    return merged


def resolve(tables: Mapping[str, Any]) -> Job:
    """Resolve the tables into a job. Raises ConfigError with all problems."""
    [job] = resolve_placed(deepcopy(dict(tables)), "inference")
    return job


def with_data(tables: Mapping[str, Any], text: str) -> dict[str, Any]:
    """Return tables whose held-out rows are those of a file, or of a source by its name.

    A file's source follows from its suffix. The options of a previous source are dropped.
    """
    path = Path(text)
    own: dict[str, Any] = {"source": text}
    if path.suffix in SOURCES or path.exists():
        own = {"path": text}
        if path.suffix in SOURCES:
            own["source"] = SOURCES[path.suffix]
    changed = deepcopy(dict(tables))
    data = merge(changed.get("data", {}), changed.get("validation", {}).get("data", {}))
    changed["data"] = {**data, **own}
    if "source" in own:
        changed["data"].pop("options", None)
    if "validation" in changed:
        changed["validation"]["data"] = {}
    return changed
