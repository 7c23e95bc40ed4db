"""`hybridflow fork`: the original's next step, bit for bit; other settings; what cannot be forked."""

from __future__ import annotations

import pytest
import torch
from helpers.tiny import learning
from safetensors.torch import load_file

from hybridflow.cli.main import main
from hybridflow.core.values.sealed import read_sealed, write_sealed


@pytest.fixture
def here(tiny):
    """The current folder, with a run of four steps, every second one kept."""
    settings = ["run.steps=4", "run.checkpoint_every=2", "actor.optimizer.lr=0.003"]
    assert main(["run", "tiny.toml", *settings]) == 0
    return tiny


def test_its_steps_are_the_original_s_bit_for_bit(here, capsys):
    assert main(["fork", "runs/tiny", "--step", "2"]) == 0
    fork = here / "runs/tiny-from-2"
    assert learning(fork) == learning(here / "runs/tiny")[2:]
    weights = [
        load_file(run / "export/actor/model.safetensors") for run in (fork, here / "runs/tiny")
    ]
    assert all(torch.equal(values, weights[1][name]) for name, values in weights[0].items())
    assert read_sealed(fork / "fork.json") == {
        "run": str(here / "runs/tiny"),
        "step": 2,
    }

    # Once more: it is finished.
    capsys.readouterr()
    assert main(["fork", "runs/tiny", "--step", "2"]) == 0
    assert "finished already, at step 4" in capsys.readouterr().out


def test_a_copy_in_part_is_made_again(here):
    """The fork was killed while it copied."""
    partial = here / "runs/tiny-from-2/checkpoints/partial-step-00000002/actor"
    partial.mkdir(parents=True)
    (partial / "half").write_text("")
    origin = {"run": str(here / "runs/tiny"), "step": 2}
    write_sealed(here / "runs/tiny-from-2/fork.json", origin)
    assert main(["fork", "runs/tiny", "--step", "2"]) == 0
    assert learning(here / "runs/tiny-from-2") == learning(here / "runs/tiny")[2:]


def test_settings_may_differ_that_a_resumed_run_s_may_not(here):
    arguments = [
        "algorithm.group_size=2",
        "algorithm.prompts_per_step=8",
        "run.name=wide",
        "run.steps=3",
    ]
    assert main(["fork", "runs/tiny", "--step", "2", *arguments]) == 0
    assert [row["step"] for row in learning(here / "runs/wide")] == [3]
    assert learning(here / "runs/wide")[0] != learning(here / "runs/tiny")[2]


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["runs/tiny", "--step", "3"], "has no checkpoint of it (kept steps: 2, 4)"),
        (["runs", "--step", "2"], "is not the folder of a run"),
        (["runs/tiny", "--step", "4"], "run.steps: is 4, and the fork begins after step 4"),
        (["runs/tiny", "--step", "2", "run.name=tiny"], "is there already, and no fork"),
        (["runs/tiny", "--step", "2", "actor.optimizer.rate=1"], "actor.optimizer.rate"),
    ],
)
def test_what_cannot_be_forked_is_said_and_nothing_is_written(here, capsys, arguments, said):
    before = sorted(path.name for path in (here / "runs").iterdir())
    assert main(["fork", *arguments]) == 1
    assert said in capsys.readouterr().err
    assert sorted(path.name for path in (here / "runs").iterdir()) == before
