"""A job brought to life: what is checked before, what is built, what is written and read again."""

from __future__ import annotations

import json
import re
from typing import Any

import attrs
import pytest
import torch
from helpers.jobs import HELD_OUT, job_of
from safetensors.torch import load_file

from hybridflow.backends.fsdp.backend import FSDPBackend
from hybridflow.core.contracts.capabilities import EngineCapabilities, TrainingCapabilities
from hybridflow.core.errors import ConfigError, DataError, HybridFlowError, ModelError
from hybridflow.core.plugins import Descriptor
from hybridflow.core.plugins.lookup import Registry
from hybridflow.core.running import session as session_module
from hybridflow.core.running.session import Session, extras, prepare, prepare_all
from hybridflow.kit.testing.runs import MODEL


def lines(path, rows) -> dict:
    """A data table of these rows."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = {"source": "jsonl", "path": str(path), "response": None}
    return {**source, "max_prompt_tokens": 6, "limit": 0, "bos": False}


def test_rows_of_every_set_are_counted(tmp_path):
    prepared = prepare(job_of(tmp_path))
    assert prepared.rows == {"train": 256, "validation": 6}
    assert prepared.dropped == {"train": 0, "validation": 0}
    assert set(prepared.sets) == {"train", "validation"}
    ids = prepared.tokenizer.encode("1+1=").tolist()
    assert ids == [4, 13, 4, 14]  # behind <pad>, <bos> and <eos>


def test_rows_that_are_too_long_are_counted_or_refused(tmp_path):
    rows = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "123+321=", "answer": "444"}]
    data = lines(tmp_path / "sums.jsonl", rows)
    with pytest.raises(DataError, match="row 1: the prompt has 8 tokens"):
        prepare(job_of(tmp_path, data=data, validation={}))
    prepared = prepare(job_of(tmp_path, data={**data, "overlong": "drop"}, validation={}))
    assert prepared.rows["train"] == 1 and prepared.dropped["train"] == 1


def test_a_tokenizer_that_a_model_has_no_room_for_is_refused_with_the_role(tmp_path):
    small = {"model": {"config": {**MODEL, "vocab_size": 12}}}
    with pytest.raises(ModelError, match=r"^actor: .*largest id is 14, .* only 12 embeddings"):
        prepare(job_of(tmp_path, actor=small))


def test_a_tokenizer_of_few_of_the_model_s_tokens_is_noted(tmp_path):
    assert prepare(job_of(tmp_path)).notes == ()
    large = {"model": {"config": {**MODEL, "vocab_size": 64}}}
    [note] = prepare(job_of(tmp_path, actor=large)).notes
    assert note.startswith("actor: the tokenizer has 15 tokens, and the model embeddings for 64")


@pytest.mark.parametrize(
    "where",
    ["train", "validation"],
)
def test_a_reward_is_tried_on_a_row_of_each_set_before_any_model_is_built(tmp_path, where):
    # The train rows have an answer in the second case alone, the held-out ones in neither.
    bare = [{"prompt": "1+1=", "answer": None}, {"prompt": "1+2=", "answer": None}]
    rows = [{**row, "answer": "2"} for row in bare] if where == "validation" else bare
    data = {**lines(tmp_path / "train.jsonl", rows), "answer": None}
    held_out = {**lines(tmp_path / "held_out.jsonl", bare), "answer": None}
    validation = {**HELD_OUT, "data": held_out}
    reward = {"function": "exact_match"}
    job = job_of(tmp_path, data=data, validation=validation, reward=reward)
    said: list[str] = []
    wanted = f"tried on row 0 of {where}, before any model.* no answer to compare with"
    session = Session(job, prepare(job), said.append)
    with pytest.raises(HybridFlowError, match=f"(?s){wanted}"), session:
        raise AssertionError("the models were built")
    assert not any(line.startswith("building") for line in said)


def test_a_later_stage_reads_with_the_tokenizer_that_an_earlier_one_writes(tmp_path):
    first = job_of(tmp_path)
    written = str(first.folder / "tokenizer")
    second = attrs.evolve(first, tokenizer_path=written, folder=tmp_path / "second")
    unrelated = attrs.evolve(first, folder=tmp_path / "third")
    prepared = prepare_all([first, second, unrelated])
    assert prepared[0].tokenizer is prepared[1].tokenizer
    assert prepared[2].tokenizer is not prepared[0].tokenizer


def test_every_role_has_a_group_and_the_trained_ones_are_known(tiny):
    session = tiny.session
    assert set(session.groups) == set(tiny.job.models) | {"reward"}
    assert set(session.trained) == {"actor"}
    wanted = sum(values.numel() for values in tiny.weights("actor").values())
    assert session.parameters["actor"] == wanted > 10_000


def test_responses_end_with_the_tokenizer_s_last_token(tiny):
    eos = tiny.session.prepared.tokenizer.eos_id
    assert tiny.session.context().sampling.stop_token_ids == (eos,)
    assert tiny.job.sampling.stop_token_ids == ()


def test_rows_are_those_of_the_set_by_their_place(tiny):
    rows, tokenizer = tiny.session.rows("validation", 2, 5), tiny.session.prepared.tokenizer
    assert rows.rows == 3 and rows["group"].values.tolist() == [2, 3, 4]
    for prompt, meta in zip(rows["prompt_ids"], rows["meta"], strict=True):
        assert tokenizer.decode(prompt) == meta["prompt"]
        assert meta["answer"] == f"{meta['a'] + meta['b']:03d}"


def test_what_was_saved_is_loaded_and_what_is_exported_has_its_tokenizer(tiny, tmp_path):
    session, before = tiny.session, tiny.weights("actor")
    session.save(tmp_path / "saved")
    tiny.step()  # what is written is as it was before
    assert session.saved(wait=True)()
    after = tiny.weights("actor")
    assert any(not torch.equal(before[name], after[name]) for name in before)
    session.load(tmp_path / "saved")
    assert all(torch.equal(values, before[name]) for name, values in tiny.weights("actor").items())

    session.export(tmp_path)
    written = load_file(tmp_path / "export" / "actor" / "model.safetensors")
    assert written.keys() == before.keys()
    assert all(torch.equal(values, before[name]) for name, values in written.items())
    for folder in ("tokenizer", "export/actor"):
        assert (tmp_path / folder / "tokenizer.json").is_file()
    assert [path.name for path in (tmp_path / "export").iterdir()] == ["actor"]


def test_what_cannot_be_built_ends_the_runtime_and_says_what_was_begun(tmp_path, monkeypatch):
    def build(backend):
        raise ModelError("no such weights")

    monkeypatch.setattr(FSDPBackend, "build", build)
    job = job_of(tmp_path, validation=HELD_OUT)
    said: list[str] = []
    session = Session(job, prepare(job), said.append)
    with pytest.raises(HybridFlowError, match="no such weights"), session:
        raise AssertionError("the model was built")
    assert said[:2] == ["starting inline", "starting pool main: 1 process on cpu"]
    assert re.fullmatch(r"memory: pool main holds at most .* per device, .* of .* usable", said[2])
    assert said[3] == "building actor"
    runtime: Any = session.runtime
    assert runtime.processes == []


def test_memory_that_is_too_little_is_looked_at_again(tmp_path, monkeypatch):
    """Processes of before may still hold it: the third look finds enough."""
    looks = []

    def too_little_twice(job, devices, say):
        looks.append(devices["main"].free)
        if len(looks) < 3:
            raise ConfigError("too little")
        return job, ()

    monkeypatch.setattr(session_module, "PATIENCE_S", (0.0, 0.0))
    monkeypatch.setattr(session_module, "preflight", too_little_twice)
    job = job_of(tmp_path)
    with Session(job, prepare(job)):
        assert len(looks) == 3

    looks.clear()
    monkeypatch.setattr(session_module, "PATIENCE_S", (0.0,))
    with pytest.raises(ConfigError, match="too little"), Session(job, prepare(job)):
        pass
    assert len(looks) == 2

    # Nothing is looked at where it is off.
    looks.clear()
    off = attrs.evolve(job, run=attrs.evolve(job.run, preflight="off"))
    with Session(off, prepare(off)):
        assert not looks


def test_a_role_is_sent_the_columns_that_its_backend_and_its_engine_declare(tiny, monkeypatch):
    spec = tiny.job.models["actor"].spec
    assert extras(spec) == ()

    mine = Registry().load()
    declared = {
        "training_backend": TrainingCapabilities(extras={"tint", "image"}),
        "rollout_engine": EngineCapabilities(extras={"tint", "audio"}),
    }
    for kind, capabilities in declared.items():
        mine.add(Descriptor(kind, "painted", "somewhere:Painted", capabilities=capabilities))
    monkeypatch.setattr(session_module, "registry", lambda: mine)
    painted = attrs.evolve(spec, backend="painted")
    assert extras(painted) == ("image", "tint")
    assert extras(attrs.evolve(painted, engine="painted")) == ("audio", "image", "tint")
    assert extras(attrs.evolve(painted, engine=None)) == ("image", "tint")
