"""Folders of runs that were never run: what they logged and recorded is made up."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hybridflow.core.values.sealed import write_sealed
from hybridflow.kit.recording import SAMPLES, TIMELINE, RecordedTable

SETTINGS = {
    "run.steps": 40,
    "run.seed": 0,
    "run.name": "a",
    "algorithm.group_size": 4,
    "algorithm.prompts_per_step": 8,
    "algorithm.mini_batch_size": 0,
    "actor.backend.precision": "fp32",
    "rollout.dtype": "float32",
}


def metrics_of(step: int, **changes: float) -> dict[str, Any]:
    """The metrics of a step of a run that goes well; names with __ in the place of /."""
    share = min(1.0, step / 40)
    values = {
        "step": step,
        "timestamp": 1.8e9 + step,
        "reward/scores": 0.1 + 0.8 * share,
        "reward/scores_min": 0.0,
        "reward/scores_max": 1.0,
        "reward/equal_groups": 0.3,
        "actor/entropy": 2.0 - 1.5 * share,
        "actor/mismatch_mean": 1e-7,
        "actor/approx_kl": 0.001,
        "actor/clip_fraction": 0.01,
        "actor/clipped": 0.02,
        "actor/grad_norm": 1.0,
        "actor/response_length": 12.0,
        "actor/generate_peak_gb": 1.5,
        "actor/update_peak_gb": 2.0,
        "seconds/step": 1.0,
        "seconds/actor/generate": 0.6,
        "seconds/actor/update": 0.35,
    }
    return values | {name.replace("__", "/"): value for name, value in changes.items()}


def row_of(step: int, at: int, length: int = 6, **changes: Any) -> dict[str, Any]:
    """Row `at` of a step, of groups of four; `changes`: its columns."""
    ids = np.array([(7 * step + 3 * at + k) % 23 for k in range(length)], np.int32)
    prompt = np.array([1, (step * 2 + at // 4) % 50], np.int32)
    row = {
        "step": step,
        "data": "train",
        "group": 100 * step + at // 4,
        "sample_id": 8 * step + at,
        "tokens": length,
        "prompt": f"p{prompt[1]}",
        "prompt_ids": prompt,
        "prompt_tokens": ["<bos>", f"p{prompt[1]}"],
        "response": "".join(f"t{token}" for token in ids),
        "response_ids": ids,
        "response_tokens": [f"t{token}" for token in ids],
        "rollout_logprobs": np.linspace(-0.5, -2.0, length, dtype=np.float32),
        "old_logprobs": np.linspace(-0.5, -2.0, length, dtype=np.float32),
        "loss_mask": np.ones(length, np.uint8),
        "weight_version": np.full(length, step - 1, np.int32),
        "advantages": np.full(length, 0.5 - (at % 2), np.float32),
        "scores": float(at % 2),
        "outcome": "complete",
        "finish_reason": "stop",
        "meta": json.dumps({"answer": f"a{at}"}),
    }
    return row | changes


def span_of(step: int, process: str, role: str, name: str, start: float, seconds: float, **more):
    return {
        "step": step,
        "process": process,
        "role": role,
        "name": name,
        "start": start,
        "seconds": seconds,
        "waited": 0.0,
        "waited_for": "",
    } | more


def spans_of(step: int) -> list[dict[str, Any]]:
    """A generation and an update on two ranks."""
    begin = 1.8e9 + step
    spans = []
    for rank in (0, 1):
        process = f"main/{rank}"
        spans.append(span_of(step, process, "actor", "generate", begin, 0.6))
        spans.append(span_of(step, process, "actor", "generate/tokens", begin + 0.1, 0.5))
        waits = {"waited": 0.02, "waited_for": "reward/score@main/0"}
        spans.append(span_of(step, process, "actor", "update", begin + 0.62, 0.35, **waits))
    wait = {"waited_for": "actor/update@main/0"}
    spans.append(span_of(step, "controller", "actor", "wait", begin + 0.62, 0.35, **wait))
    return spans


def made_run(
    folder: Path,
    settings: Mapping[str, Any] | None = None,
    metrics: Sequence[Mapping[str, Any]] | None = None,
    rows: Sequence[Mapping[str, Any]] | None = None,
    spans: Sequence[Mapping[str, Any]] | None = None,
    done: bool = True,
    steps: int = 40,
) -> Path:
    """A run of `steps` steps, as runs leave it; what is None is that of a run that went well."""
    folder.mkdir(parents=True)
    mark = {
        "config": {"algorithm": {"name": "grpo"}},
        "settings": {**SETTINGS, **(settings or {})},
        "versions": {"torch": "2.13.0"},
        "starts": [
            {
                "command": ["hybridflow", "run", "a.toml", "reward.options.api_key=hunter2"],
                "folder": "/here",
                "time": "2026-11-27T22:34:43+00:00",
                "host": {"name": "box"},
                "git": {"commit": "0123456789abcdef", "branch": "main", "changed": []},
            }
        ],
    }
    write_sealed(folder / "run.json", mark)
    (folder / ".lock").touch()
    (folder / "console.log").write_text("2026-11-27 22:34:43 a line\n")
    if metrics is None:
        metrics = [metrics_of(step) for step in range(1, steps + 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in metrics))
    if done:
        write_sealed(folder / "done.json", {"step": steps, "validations": {}, "exported": False})
    if rows is None:
        rows = [row_of(step, at) for step in range(1, steps + 1) for at in range(8)]
    if spans is None:
        spans = [span for step in range(1, steps + 1) for span in spans_of(step)]
    for name, table_rows in ((SAMPLES, rows), (TIMELINE, spans)):
        table = RecordedTable(folder, name, 10**9)
        table.begin(0)
        table.add(list(table_rows))
        table.flush()
    return folder
