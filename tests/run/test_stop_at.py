"""validation.stop_at ends a run, or a stage, at the score that was asked for."""

from helpers.tiny import metrics, ran_here, write

SETTINGS = (
    'validation.data.options.split="held-out"',
    "validation.data.limit=16",
    "validation.every=2",
)


def scores(folder) -> dict[int, float]:
    return {
        row["step"]: row["validation/score"] for row in metrics(folder) if "validation/score" in row
    }


def steps(folder) -> list[int]:
    return [row["step"] for row in metrics(folder) if "seconds/step" in row]


def test_a_run_ends_at_its_score_is_exported_and_has_nothing_left_to_resume(tmp_path):
    write(tmp_path)
    settings = (*SETTINGS, "run.checkpoint_every=2", "run.export=true")
    said = ran_here(tmp_path, *settings, "validation.stop_at=0.0")
    assert "validation.stop_at" in said and "after step 2 of 6" in said
    run = tmp_path / "runs/tiny"
    assert steps(run) == [1, 2] and list(scores(run)) == [2]
    assert (run / "export/actor/model.safetensors").is_file()

    said = ran_here(tmp_path, *settings, "validation.stop_at=0.0", "--resume")
    assert "finished already, at step 2: " in said
    assert "--resume with a higher validation.stop_at goes on from step 2" in said
    assert steps(run) == [1, 2] and list(scores(run)) == [2]

    ran_here(tmp_path, *settings, "validation.stop_at=9.0", "--resume")
    assert steps(run) == [1, 2, 3, 4, 5, 6] and list(scores(run)) == [2, 4, 6]


def test_a_goal_reached_at_the_start_takes_no_step(tmp_path):
    write(tmp_path)
    ran_here(tmp_path, *SETTINGS, "validation.at_start=true", "validation.stop_at=0.0")
    assert steps(tmp_path / "runs/tiny") == [] and list(scores(tmp_path / "runs/tiny")) == [0]
