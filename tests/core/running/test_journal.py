"""What a journal has, and what it forgets where a run goes on from an earlier step."""

from __future__ import annotations

import pytest

from hybridflow.core.context import Generated
from hybridflow.core.errors import HybridFlowError
from hybridflow.core.groups.group import Future
from hybridflow.core.running.journal import Journal, Replay
from hybridflow.core.values.batch import Batch


class Data:
    """Writes names in the place of rows."""

    def journal(self, rows: Batch, file: str) -> Future:
        with open(file, "w") as written:
            written.write(",".join(rows.names))
        return Future(lambda: ("rows", "prompts"))


def calls(*roles: str) -> list[Generated]:
    prompts = Batch({"prompt_ids": [[1]], "group": [0]})
    added = [Batch({"response_ids": [[2]]}), Batch({"lag": [0]})]
    return [Generated(role, prompts, added) for role in roles]


def test_a_step_is_in_it_with_what_each_call_has_added(tmp_path):
    journal = Journal(tmp_path)
    journal.begin(0)
    assert journal.steps() == [] and journal.whole() == 0
    journal.write(1, calls("actor", "draft"), Data())
    journal.write(2, [], Data())
    assert journal.steps() == [1, 2] and journal.whole() == 2
    files = sorted(path.name for path in (tmp_path / "journal").iterdir())
    assert files == [
        "step-00000001-0.npz",
        "step-00000001-1.npz",
        "step-00000001.json",
        "step-00000002.json",
    ]
    rows = (tmp_path / "journal" / files[0]).read_text()
    assert rows == "drawn_prompt_ids,response_ids,lag"


def test_a_step_that_is_missing_ends_what_can_be_replayed(tmp_path):
    journal = Journal(tmp_path)
    journal.begin(0)
    for step in (1, 2, 4):
        journal.write(step, [], Data())
    assert journal.whole() == 2
    (tmp_path / "journal" / "step-00000001.json").unlink()
    assert journal.whole() == 0


def test_a_run_that_goes_on_forgets_later_steps(tmp_path):
    journal = Journal(tmp_path)
    journal.begin(0)
    for step in (1, 2, 3):
        journal.write(step, calls("actor"), Data())
    journal.begin(1)
    assert sorted(path.name for path in (tmp_path / "journal").iterdir()) == [
        "step-00000001-0.npz",
        "step-00000001.json",
    ]


def test_a_call_of_another_role_or_step_is_refused(tmp_path):
    journal = Journal(tmp_path)
    journal.begin(0)
    journal.write(1, calls("actor"), Data())
    replay = Replay(journal, Data())
    with pytest.raises(HybridFlowError, match=r"call 1 of generate, by critic.*: actor.generate;"):
        replay(1, 0, "critic", Batch())
    with pytest.raises(HybridFlowError, match=r"step-00000002\.json cannot be read"):
        replay(2, 0, "actor", Batch())
