"""What a resumed run must not take without a word: damaged, foreign and changed files.

The numbers are those of a campaign of attacks; tests/faults/patches/ puts each fault back, and `make faults` sees that
these tests notice.
"""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
from helpers.damage import Touches
from helpers.tiny import exported

from hybridflow.cli.main import main


def files(checkpoint: Path) -> list[Path]:
    """The files of a checkpoint's model, whatever they are called."""
    return sorted(path for path in (checkpoint / "actor").rglob("*") if path.is_file())


def flip_bit(file: Path, place: float = 0.5) -> None:
    """Flip a bit, by default of the byte in the middle."""
    content = bytearray(file.read_bytes())
    content[int(len(content) * place)] ^= 4
    file.write_bytes(content)


# --- F3: a flipped bit in a checkpoint's tensors was trained on ---


def test_f3_of_a_damaged_checkpoint_the_older_one_is_taken(trained, four_steps, resume):
    flip_bit(
        max(files(trained / "checkpoints/step-00000002"), key=lambda file: file.stat().st_size)
    )
    status, printed = resume()
    assert status == 0
    assert (
        "the checkpoint of step 2 is damaged, and is now runs/tiny/checkpoints/damaged-" in printed
    )
    assert "\ngoing on from step 1\n" in printed
    assert exported(trained) == four_steps


def test_f3_where_all_are_damaged_each_is_named(trained, resume):
    for step in (1, 2):
        largest = max(
            files(trained / f"checkpoints/step-0000000{step}"), key=lambda file: file.stat().st_size
        )
        flip_bit(largest)
    before = exported(trained)
    status, printed = resume()
    assert status == 1
    assert "no checkpoint in runs/tiny/checkpoints can be read; put back a copy of one" in printed
    assert "\n  step 2: " in printed and "\n  step 1: " in printed
    # Nothing is lost: both are where they were.
    assert exported(trained) == before
    assert len(list((trained / "checkpoints").glob("step-*"))) == 2


# --- F4: a foreign checkpoint ran code ---


@pytest.mark.parametrize(
    "name", [".metadata", "index-00000-of-00001.json", "state.json", "largest"]
)
def test_f4_no_file_of_a_checkpoint_is_unpickled(trained, tiny, resume, name):
    code = pickle.dumps(Touches(tiny / "canary"))
    for checkpoint in (trained / "checkpoints").glob("step-*"):
        largest = max(files(checkpoint), key=lambda file: file.stat().st_size)
        places = {"state.json": checkpoint / name, "largest": largest}
        places.get(name, checkpoint / "actor" / name).write_bytes(code)
    status, printed = resume()
    assert not (tiny / "canary").exists()
    assert "Traceback" not in printed
    assert status == (0 if name == ".metadata" else 1)


# --- F5: a run's name led out of its folder, and --overwrite deleted what was there ---


@pytest.mark.parametrize(
    "name", ["..", ".", "a/../..", "/tmp", "", "a\0b", "a" * 300, ".lock", "a\\b"]
)
def test_f5_a_name_that_is_no_folder_s_is_refused(trained, tiny, capsys, name):
    (tiny / "run.json").write_text("{}")  # so that the folder above looks like a run's
    (tiny / "mine.txt").write_text("mine")
    for more in ([], ["--overwrite"]):
        assert main(["run", "tiny.toml", "run.steps=1", f"run.name={name}", *more]) == 1
        printed = capsys.readouterr().err
        assert "run.name: must be a folder's name" in printed and "Traceback" not in printed
    assert (tiny / "mine.txt").read_text() == "mine"
    assert (trained / "done.json").is_file()


@pytest.mark.parametrize("name", ["..", "a/b", "checkpoints", "export", "a" * 300])
def test_f5_a_stage_has_the_name_of_a_folder_of_its_own(tiny, capsys, name):
    with open("tiny.toml", "a") as file:
        file.write(f"[stages.{json.dumps(name)}]\n")
    assert main(["show", "tiny.toml"]) == 1
    assert "stages" in (printed := capsys.readouterr().err) and "Traceback" not in printed
    assert "name" in printed


def test_f5_overwrite_deletes_what_a_run_wrote_and_nothing_else(trained, tiny, capsys):
    (trained / "notes.txt").write_text("mine")
    (trained / "other" / "checkpoints").mkdir(parents=True)  # a stage of another config, say
    (tiny / "elsewhere").mkdir()
    (tiny / "elsewhere" / "kept").touch()
    (trained / "evaluations").symlink_to(tiny / "elsewhere")
    assert main(["run", "tiny.toml", "run.steps=1", "--overwrite", "run.export=false"]) == 0
    assert (trained / "notes.txt").read_text() == "mine"
    assert (trained / "other" / "checkpoints").is_dir()
    assert (tiny / "elsewhere" / "kept").is_file()
    assert not (trained / "export").exists() and not (trained / "evaluations").exists()
    assert [path.name for path in (trained / "checkpoints").iterdir()] == ["step-00000001"]


# --- F7: a resumed run took other settings without a word ---


@pytest.mark.parametrize(
    "change",
    [
        "actor.model.config.num_hidden_layers=1",
        'tokenizer.characters="9876543210+="',
        "run.seed=1",
        "algorithm.group_size=2",
        "algorithm.name=rloo",
        "sampling.temperature=0.5",
        "data.max_prompt_tokens=9",
    ],
)
def test_f7_a_setting_that_decides_the_result_is_refused(trained, resume, change):
    status, printed = resume(change)
    assert status == 1 and "--resume: " in printed and "Traceback" not in printed
    assert change.partition("=")[0].removesuffix(".name") in printed


def test_f7_another_change_is_told(trained, resume):
    status, printed = resume("actor.optimizer.lr=2e-3")
    assert status == 0
    assert "going on from step 2; changed: actor.optimizer.lr 0.001 -> 0.002; run.steps" in printed


def test_f7_without_the_settings_that_is_told(trained, four_steps, resume):
    (trained / "run.json").unlink()
    status, printed = resume()
    assert status == 0 and exported(trained) == four_steps
    assert "changed: not known: its run.json is missing" in printed


def test_f7_other_weights_are_refused_where_settings_are_not_known(trained, resume):
    (trained / "run.json").unlink()
    status, printed = resume("actor.model.config.num_hidden_layers=1")
    assert status == 1 and "Traceback" not in printed
    assert "it has model.model.layers.1." in printed and "which the model here has not" in printed
    status, printed = resume("actor.model.config.num_hidden_layers=3")
    assert status == 1 and "it has no model.model.layers.2." in printed


# --- F8: JSON files were read unchecked, and not written at once ---

BAD = [
    "",
    "[]",
    "null",
    "{}",
    '{"step": -1}',
    '{"step": 1000000000}',
    '{"step": "2"}',
    "[" * 50_000,
]


@pytest.mark.parametrize("text", BAD, ids=range(len(BAD)))
def test_f8_the_state_of_a_checkpoint_is_checked(trained, four_steps, resume, text):
    (trained / "checkpoints/step-00000002/state.json").write_text(text)
    status, printed = resume()
    assert status == 0 and exported(trained) == four_steps
    assert "the checkpoint of step 2 is damaged" in printed


@pytest.mark.parametrize("name", ["run.json", "done.json"])
@pytest.mark.parametrize("text", BAD, ids=range(len(BAD)))
def test_f8_the_files_of_a_run_are_checked(trained, resume, capsys, name, text):
    (trained / name).write_text(text)
    status, printed = resume()
    assert status == 1 and "Traceback" not in printed
    assert f"runs/tiny/{name} " in printed and "or remove it" in printed
    assert main(["runs"]) == 0
    assert "damaged" in capsys.readouterr().out


def test_f8_a_state_with_another_number_is_not_believed(trained, four_steps, resume):
    file = trained / "checkpoints/step-00000002/state.json"
    fields = json.loads(file.read_text())
    fields["counters"]["samples"] += 1
    file.write_text(json.dumps(fields))
    status, _ = resume()
    assert status == 0 and exported(trained) == four_steps


def test_f8_a_file_that_cannot_be_written_leaves_the_earlier_one(
    trained, tiny, resume, monkeypatch
):
    """A full disk, when the marks of the run are written: what was there is as it was."""
    before = (trained / "run.json").read_bytes()
    real = json.dump

    def full(fields, file, **options):
        real(fields, file, **options)
        file.truncate(5)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(json, "dump", full)
    status, printed = resume()
    assert status == 1 and "No space left on device; free disk space" in printed
    assert (trained / "run.json").read_bytes() == before
