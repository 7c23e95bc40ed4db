"""Configurations drawn from every backend, engine, layout, algorithm and model family, and mutated ones.

A drawn one is a small job that means something: kinds that go together or not, and a few settings of each away
from their defaults. Most are accepted. A mutated one has a value that no job can mean, or lacks one.
"""

from __future__ import annotations

import copy
import json
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any, Literal

import attrs
import tomlkit

from helpers.zoo import ZOO
from hybridflow.core.contracts.training import OptimizerConfig
from hybridflow.core.job.sections import RunSection, SyncConfig
from hybridflow.core.plugins import registry
from hybridflow.kit.testing.runs import TABLES
from hybridflow.settle.schema import SamplingSection

ALGORITHMS: dict[str, dict[str, Any]] = {
    **{
        name: {"prompts_per_step": 4, "group_size": 2}
        for name in (
            "cispo",
            "dapo",
            "dppo",
            "dr_grpo",
            "gmpo",
            "grpo",
            "gspo",
            "opo",
            "reinforce_pp_baseline",
            "rloo",
            "sapo",
        )
    },
    **{name: {"prompts_per_step": 4} for name in ("ppo", "reinforce_pp", "remax", "safe_rlhf")},
    "sft": {"batch_size": 4},
    "dpo": {"pairs_per_step": 4},
    "reward_model": {"pairs_per_step": 4},
    "cost_model": {"pairs_per_step": 4},
}
"""Algorithm -> its settings that make a step small."""
PAIRS = ("dpo", "reward_model", "cost_model")
JUDGES = {"reward_model": "reward", "cost_model": "cost"}
"""Algorithm -> the role that it trains, on rows that `write_pairs` writes."""
NOT_DRAWN = frozenset({
    # Places and times: what comes of them only the machine knows.
    "name", "folder", "device", "restarts", "start_timeout_s", "hang_timeout_s", "bucket_mb", "engine_args",
    # How large a run is.
    "steps", "prompts_per_step", "pairs_per_step", "batch_size", "pretrain_batch_size", "pretrain_steps",
    # Learning that leaves the numbers, and what a run of two steps is stopped by on purpose.
    "lr", "eps", "mismatch_stop", "mismatch_warn", "preflight", "trackers",
})  # fmt: skip
"""Settings that stay as they are."""
MOST = {"max_tokens": 8, "group_size": 4}


def drawn(
    random: Random,
    backends: Sequence[str] = ("fsdp",),
    engines: Sequence[str] = ("transformers",),
    ranks: Sequence[int] = (1,),
) -> dict[str, Any]:
    """The tables of a job of two steps on `ranks` devices, the first of which needs no Ray."""
    tables = copy.deepcopy(TABLES)
    tables["run"] |= {"steps": 2, "final_checkpoint": False}
    world = random.choice(ranks)
    if world > 1 or random.random() < 0.1 * (len(ranks) > 1):
        tables |= {"runtime": "ray", "pools": {"main": [world]}}
    algorithm = random.choice(list(ALGORITHMS))
    tables["algorithm"] = {"name": algorithm, **ALGORITHMS[algorithm]}
    if algorithm in PAIRS:
        tables["data"]["rejected"] = "1"
    model = _model(random)
    if algorithm in JUDGES:
        tables[JUDGES[algorithm]] = {"model": {"config": model}}
        tables["data"] |= {"source": "jsonl", "path": "pairs.jsonl", "answer": "", "bos": True}
        tables["data"] |= {"response": "{chosen}", "rejected": "{rejected}"}
    if algorithm == "cost_model":
        tables["data"]["unsafe"] = ["chosen_unsafe", "rejected_unsafe"]
    actor = tables["actor"]
    actor |= {
        "model": {"config": model},
        "backend": {"name": random.choice(backends)},
        "micro_batch_tokens": random.choice([16, 64, 256]),
        "layout": {axis: 2 for axis in ("tp", "pp") if world > 1 and random.random() < 0.3},
    }
    tables["rollout"] = {"name": random.choice(engines)}
    if tables["rollout"]["name"] != "transformers":
        tables["rollout"] |= dict(_small(tables["rollout"]["name"]))
    _generation(random, tables, world)
    for role, chance in (("critic", 0.3), ("ref", 0.2)):
        if random.random() < chance:
            tables[role] = {"backend": {"name": random.choice(backends)}}
    if algorithm == "safe_rlhf":
        tables["cost"] = {"function": "hybridflow.kit.testing.runs:even_tokens"}
    if random.random() < 0.3:
        tables["validation"] = {"name": "held-out", "every": 1, "data": {"limit": 4}}
    for path, cls in _settings(tables):
        for name, value in _some(random, cls):
            table = tables
            for key in path:
                table = table.setdefault(key, {})
            table.setdefault(name, value)
    return tables


def write_pairs(folder: Path) -> None:
    """Write pairs.jsonl: sums with a right and a wrong answer, some of them unsafe."""
    rows = [
        {
            "prompt": f"{i:02d}+01=", "chosen": f"{i + 1}", "rejected": f"{(i * 37) % 1000:03d}",
            "chosen_unsafe": i % 4 == 0, "rejected_unsafe": i % 3 > 0,
        }
        for i in range(32)
    ]  # fmt: skip
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def _small(engine: str) -> Mapping[str, Any]:
    """What makes an engine start quickly on a CPU."""
    from helpers.zoo import ENGINES

    return {key: value for key, value in ENGINES[engine].items() if "timeout" not in key}


def _model(random: Random) -> dict[str, Any]:
    """A model of the zoo, of other sizes in one of three."""
    fields = random.choice(list(ZOO.values())).config()
    if random.random() < 0.34:
        sizes = {
            "vocab_size": (16, 33, 97), "num_hidden_layers": (1, 2, 3, 4), "num_attention_heads": (2, 3, 4, 8),
            "num_key_value_heads": (1, 2, 4), "intermediate_size": (48, 100, 176), "head_dim": (16, 32, 64),
            "tie_word_embeddings": (True, False), "hidden_size": (64, 96, 128),
        }  # fmt: skip
        name = random.choice([name for name in sizes if name in fields])
        fields[name] = random.choice(sizes[name])
    # TOML has no null: a field that is None is left out, and has its type's default.
    return {name: value for name, value in fields.items() if value is not None}


def _generation(random: Random, tables: dict[str, Any], world: int) -> None:
    """Layout and pool of the engines, and how weights get to them."""
    generation: dict[str, Any] = {}
    if world > 1 and random.random() < 0.4:
        generation[random.choice(["tp", "tp", "pp"])] = 2
    if tables["runtime"] == "ray" and random.random() < 0.3:
        tables["pools"]["engines"] = [random.choice([1, 2])]
        generation["pool"] = "engines"
    if random.random() < 0.2:
        generation["grouping"] = random.choice(["zero-redundancy", "consecutive"])
    tables["actor"]["generation"] = generation
    if random.random() < 0.3:
        names = [name for name in registry().names("transport") if name != "disk"]
        tables["actor"]["sync"] = {"transport": random.choice([*names, "auto"])}


def _settings(tables: Mapping[str, Any]) -> list[tuple[tuple[str, ...], Any]]:
    """(path, class) of the tables whose further settings are drawn."""
    plugins = {
        ("algorithm",): ("algorithm", tables["algorithm"]["name"]),
        ("actor", "backend"): ("training_backend", tables["actor"]["backend"]["name"]),
        ("rollout",): ("rollout_engine", tables["rollout"]["name"]),
    }
    found = [(path, registry().config_class(*of)) for path, of in plugins.items()]
    sections = [
        (("run",), RunSection),
        (("sampling",), SamplingSection),
        (("actor", "optimizer"), OptimizerConfig),
        (("actor", "sync"), SyncConfig),
    ]
    return [(path, cls) for path, cls in [*found, *sections] if cls is not None]


def _some(random: Random, cls: Any) -> list[tuple[str, Any]]:
    """A setting or two of an attrs class, with values of their types."""
    fields = [field for field in attrs.fields(cls) if field.name not in NOT_DRAWN]
    hints = typing.get_type_hints(cls)
    chosen = random.sample(fields, min(len(fields), random.choice([0, 0, 1, 1, 2])))
    values = [(field.name, _value(random, field, hints[field.name])) for field in chosen]
    return [(name, value) for name, value in values if value is not None]


def _value(random: Random, field: Any, hint: Any) -> Any:
    """A value of a type; None: no value is drawn of it."""
    options = [part for part in typing.get_args(hint) if part is not types.NoneType]
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        hint = options[0]
    if typing.get_origin(hint) is Literal:
        return random.choice(typing.get_args(hint))
    if hint is bool:
        return random.choice([True, False])
    if hint is int:
        return min(random.choice([0, 1, 2, 3, 4, 8, 64]), MOST.get(field.name, 64))
    if hint is float:
        default = field.default if isinstance(field.default, float) else 1.0
        return random.choice([0.0, default / 2, default, 2 * default, 1.0])
    if attrs.has(hint):
        return dict(_some(random, hint))
    return None


# --- mutated ---

JUNK: list[Any] = [
    "", "a", "nan", "1e999", "../..", "a\u0000b", "\u202e", "x" * 5000, 0, -1, 1, 2, 3, 7, 10**9, 10**20, -(2**63),
    0.5, -0.5, 1e300, float("nan"), float("inf"), True, False, [], [1], [0], ["a", 1], [[]], {}, {"a": 1},
    {"name": "nobody"}, {"name": 3}, "package.module:Object", "os:system", ":", "hybridflow:", "stage:nobody",
]  # fmt: skip
"""Values that most settings cannot have."""


def mutated(random: Random, tables: Mapping[str, Any]) -> dict[str, Any]:
    """A copy with one to three places changed: another value, none, another name, or one more key."""
    found = copy.deepcopy(dict(tables))
    for _ in range(random.choice([1, 1, 1, 2, 3])):
        places = list(_places(found))
        table, key = random.choice(places)
        way = random.random()
        if way < 0.65:
            table[key] = copy.deepcopy(random.choice(JUNK))
        elif way < 0.75:
            del table[key]
        elif way < 0.85:
            # Letters that are swapped, as in a slip of the pen
            at = random.randrange(len(key)) if key else 0
            table[key[:at] + key[at + 1 : at + 2] + key[at : at + 1] + key[at + 2 :]] = table.pop(
                key
            )
        elif way < 0.95:
            table[random.choice(["more", "name", "path", "pool", "tp", "", "a.b"])] = random.choice(
                JUNK
            )
        else:
            other, name = random.choice(places)
            table[key] = copy.deepcopy(other.get(name, 0))
    return found


def _places(tables: dict[str, Any]) -> typing.Iterator[tuple[dict[str, Any], str]]:
    for key, value in list(tables.items()):
        yield tables, key
        if isinstance(value, dict):
            yield from _places(value)


def toml(tables: Mapping[str, Any]) -> str:
    """The text of a configuration file."""
    return tomlkit.dumps(dict(tables))
