"""A run that is trained again from the journal of another one: run.journal, run.replay."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs
import pytest
from helpers.driven import Driven, write_checkpoint

from hybridflow.core.contracts.environment import Answer, Environment
from hybridflow.core.errors import ConfigError, HybridFlowError, WorkerError
from hybridflow.core.running.journal import Journal
from hybridflow.core.values.sealed import write_sealed
from hybridflow.kit.testing.runs import TABLES, TinyRun
from hybridflow.settle.launch import run
from hybridflow.settle.stages import overlay

STEPS = 4


class Counts(Environment):
    """Answers with the number of tokens, and pays for even ones; it is over after two turns."""

    turns = 0

    def step(self, turn):
        self.turns += 1
        even = float((turn.ids % 2 == 0).mean()) if len(turn.ids) else 0.0
        return Answer(text=str(len(turn.ids)), reward=even, done=self.turns == 2)


class Begins(Counts):
    """The same, after a prompt of its own."""

    own_prompt = True

    def reset(self, start):
        return Answer(ids=tuple(start.tokenizer.encode(f"{len(start.prompt)}+1=").tolist()))


GRPO = {
    "name": "grpo",
    "prompts_per_step": 4,
    "group_size": 4,
    "mini_batch_size": 8,
    "correction": "truncate",
}
APART = {
    "pools": {"main": [1], "engines": [1]},
    "actor": {"generation": {"pool": "engines"}},
}
RUNS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "synchronous": (GRPO, {}),
    "one page ahead": (GRPO, {**APART, "run": {"max_staleness": 1}}),
    "carried": (GRPO, {"run": {"max_staleness": 2}}),
    "in flight": (GRPO, {**APART, "run": {"max_staleness": 2}}),
    "interpolated": (
        {**GRPO, "old_logprobs": "interpolated"},
        {**APART, "run": {"max_staleness": 2}},
    ),
    "dapo": ({**GRPO, "name": "dapo"}, {**APART, "run": {"max_staleness": 2}}),
    "episodes": (
        GRPO,
        {
            "environment": {"name": "tests.run.test_replay:Counts", "max_turns": 3},
            "reward": {"function": "hybridflow.kit.testing.runs:even_tokens"},
        },
    ),
    "prompts of the environment": (
        GRPO,
        {
            **APART,
            "run": {"max_staleness": 1},
            "environment": {"name": "tests.run.test_replay:Begins", "max_turns": 3},
            "reward": {"function": "hybridflow.kit.testing.runs:even_tokens"},
        },
    ),
    "two calls a step": (
        {**GRPO, "name": "remax", "group_size": 1, "mini_batch_size": 0},
        {"run": {"max_staleness": 1}},
    ),
}
OTHERS = ("seconds", "_mb", "_gb", "turn_wait", "mismatch")
"""Parts of the names of metrics that are times, or have the probes of engines' weights in them."""


def driven(folder: Path, algorithm: dict[str, Any], tables: dict[str, Any], **how: Any):
    """(checksums of the weights, metrics of each step that are no times, the run)"""
    own = {"run": {"folder": str(folder)}, "sampling": {"max_tokens": 12}}
    with TinyRun(algorithm, overlay(tables, own)) as run:
        took = Driven(run, **{"steps": STEPS, **how})
        metrics = [
            {name: value for name, value in one.items() if not any(part in name for part in OTHERS)}
            for one in took.metrics
        ]
        return run.checksums(), metrics, run


@pytest.mark.parametrize("name", RUNS)
def test_a_replayed_run_trains_bit_for_bit_without_engines(name, tmp_path):
    algorithm, tables = RUNS[name]
    recorded = overlay(tables, {"run": {"journal": True}})
    sums, metrics, first = driven(tmp_path / "first", algorithm, recorded)
    replays = overlay(tables, {"run": {"replay": str(first.job.folder)}})
    again, of_replay, run = driven(tmp_path / "again", algorithm, replays)
    assert again == sums
    # There are no figures of engines, and no probes of their weights.
    for then, now in zip(metrics, of_replay, strict=True):
        assert now.items() <= then.items() and "actor/policy_loss" in now
    assert run.session.rollouts == {} and list(run.job.pools) == ["main"]
    assert all(model.spec.engine is None for model in run.job.models.values())


def test_a_file_in_the_place_of_another_is_refused(tmp_path):
    _, _, first = driven(tmp_path / "first", GRPO, {"run": {"journal": True}}, steps=2)
    folder = Journal(first.job.folder).folder
    rows, other = (folder / f"step-0000000{step}-0.npz" for step in (1, 2))
    rows.write_bytes(other.read_bytes())
    with pytest.raises(WorkerError, match="another checksum"):
        driven(tmp_path / "again", GRPO, {"run": {"replay": str(first.job.folder)}}, steps=2)


def test_a_token_costs_at_most_twenty_bytes(tmp_path):
    long = {"sampling": {"max_tokens": 24}, "run": {"journal": True}}
    algorithm = {**GRPO, "prompts_per_step": 16, "group_size": 8, "mini_batch_size": 0}
    own = {"run": {"folder": str(tmp_path), "max_staleness": 2}}
    with TinyRun(algorithm, overlay(overlay(APART, long), own)) as run:
        run.ctx.sampling = attrs.evolve(run.ctx.sampling, ignore_stop=True)
        Driven(run, steps=3)
    written = sum(file.stat().st_size for file in Journal(run.job.folder).folder.iterdir())
    assert written <= 20 * 3 * 16 * 8 * 24


def test_a_run_that_goes_on_has_a_journal_without_what_it_makes_anew(tmp_path):
    tables = overlay(RUNS["in flight"][1], {"run": {"journal": True}})
    noted = []

    def at_two(run) -> bool:
        if run.step == 2:
            write_checkpoint(run, noted[0].pages)
        return True

    class Noted(Driven):
        def __init__(self, *args: Any, **how: Any):
            noted.append(self)
            super().__init__(*args, **how)

    own = {"run": {"folder": str(tmp_path / "run")}, "sampling": {"max_tokens": 12}}
    with TinyRun(GRPO, overlay(tables, own)) as run:
        Noted(run, steps=STEPS, at_end=at_two)
    journal = Journal(run.job.folder)
    assert journal.whole() == STEPS
    # Beside what was made after the checkpoint, what a run leaves that was killed as it wrote.
    (journal.folder / "step-00000009-0.npz").write_bytes(b"half")
    with TinyRun(GRPO, overlay(tables, own)) as run:
        Driven(run, steps=3, resume=True)
        sums = run.checksums()
    assert journal.steps() == [1, 2, 3]
    replays = overlay(RUNS["in flight"][1], {"run": {"replay": str(run.job.folder)}})
    assert driven(tmp_path / "again", GRPO, replays, steps=3)[0] == sums


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"data": {"seed": 7}}, "the prompts are not those that the responses"),
        ({"algorithm": {**GRPO, "prompts_per_step": 8, "group_size": 2}}, "the prompts are not"),
    ],
)
def test_other_prompts_are_refused(change, said, tmp_path):
    _, _, first = driven(tmp_path / "first", GRPO, {"run": {"journal": True}}, steps=1)
    replays = overlay({"run": {"replay": str(first.job.folder)}}, change)
    algorithm = replays.pop("algorithm", GRPO)
    with pytest.raises(WorkerError, match=said):
        driven(tmp_path / "again", algorithm, replays, steps=1)


def test_a_call_that_was_not_made_is_refused(tmp_path):
    remax = {**GRPO, "name": "remax", "group_size": 1, "mini_batch_size": 0}
    _, _, first = driven(tmp_path / "first", remax, {"run": {"journal": True}}, steps=1)
    journal = Journal(first.job.folder)
    file = journal.folder / "step-00000001.json"
    fields = json.loads(file.read_text())
    assert [call["role"] for call in fields["calls"]] == ["actor", "actor"]
    del fields["calls"][1], fields["sha256"]
    write_sealed(file, fields)
    with pytest.raises(
        HybridFlowError, match=r"step 1 makes call 2 of generate, by actor.*these: actor"
    ):
        driven(tmp_path / "again", remax, {"run": {"replay": str(first.job.folder)}}, steps=1)


def test_journals_that_cannot_be_replayed_are_refused_before_the_start(tmp_path):
    def problems(algorithm: dict[str, Any] = GRPO, **run: Any) -> str:
        with pytest.raises(ConfigError) as error:
            TinyRun(algorithm, {"run": {"folder": str(tmp_path), **run}})
        return str(error.value)

    assert "has no journal that begins at step 1" in problems(replay=str(tmp_path / "none"))
    _, _, first = driven(tmp_path / "first", GRPO, {"run": {"journal": True}}, steps=2)
    folder = str(first.job.folder)
    assert "has the steps 1 to 2, and run.steps is 3; set 2" in problems(replay=folder, steps=3)
    own = {"folder": str(tmp_path / "first"), "replay": folder}
    assert "is the run's own folder" in problems(**own)
    assert "algorithm 'sft' generates nothing" in problems({"name": "sft"}, replay=folder)


def test_a_run_says_what_it_leaves_out_and_where_it_differs(tmp_path, capsys):
    first = overlay(TABLES, {"algorithm": GRPO, "run": {"folder": str(tmp_path), "steps": 2}})
    first = overlay(first, {"validation": {"every": 1, "data": {"limit": 8}}})
    run(overlay(first, {"run": {"journal": True, "name": "first"}}))
    assert "validation" in capsys.readouterr().out
    replays = overlay(first, {"run": {"replay": str(tmp_path / "first"), "name": "again"}})
    run(replays)
    said = capsys.readouterr().out
    folder = tmp_path / "first"
    assert f"run.replay: responses come from {folder}; there are no engines and valid" in said
    assert "will not have the same bits" not in said and "validation/score" not in said
    weights = [tmp_path / name / "export/actor/model.safetensors" for name in ("first", "again")]
    assert weights[0].read_bytes() == weights[1].read_bytes()

    run(overlay(replays, {"run": {"name": "other"}, "algorithm": {"clip_low": 0.1}}))
    said = capsys.readouterr().out
    assert "run.replay: algorithm.clip_low 0.2 -> 0.1: the training will not have the" in said
