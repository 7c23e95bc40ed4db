"""A config file with settings put into it: comments stay, and what cannot be written is said."""

from __future__ import annotations

import tomllib

import pytest

from hybridflow.cli import written
from hybridflow.cli.written import write_config
from hybridflow.core.errors import ConfigError
from hybridflow.settle.places import replace_places

FOR_READERS = """# head
[pools]  # how many
main = [1]

# about the tokenizer
[tokenizer]
characters = "0"  # digits

# the cut
[actor.layout]
tp = 1  # whole

# of ref
[ref]
pool = "main"
"""
PLANNED = {
    "pools": {"actor": [8], "critic": [4]},
    "actor": {
        "pool": "actor",
        "layout": {"pp": 1, "tp": 2, "dp": 4},
        "generation": {"pp": 1, "tp": 2},
    },
    "ref": {"pool": "critic", "layout": {"pp": 1, "tp": 1, "dp": 4}},
}


def test_comments_stay_where_they_were(tmp_path):
    source, target = tmp_path / "source.toml", tmp_path / "target.toml"
    source.write_text(FOR_READERS, newline="\r\n")
    assert write_config(source, target, {None: PLANNED}, "a100-80gb:1x8")
    text = target.read_bytes().decode()
    assert text.count("\n") == text.count("\r\n")
    text = text.replace("\r", "")
    assert (
        "# head\n[pools]  # how many\nactor = [8]\ncritic = [4]\n\n# about the tokenizer\n[tokenizer]"
        in text
    )
    assert 'characters = "0"  # digits\n\n# the cut\n' in text and "tp = 2  # whole" in text
    assert "\n\n# of ref\n[ref]\n" in text
    assert tomllib.loads(text) == PLANNED | {"tokenizer": {"characters": "0"}}


@pytest.mark.parametrize(
    "stage",
    [
        "actor.layout.tp = 1\nactor.generation.tp = 1",
        'actor.layout.tp = 1\nactor.generation.tp = 1\nactor.model.path = "x"',
        "actor.layout = { tp = 1 }\nactor.generation = { tp = 1 }",
        'pools.main = [1]\nactor.pool = "main"\nactor.generation.tp = 1',
        "[stages.c.actor.layout]\ntp = 1\n[stages.c.actor.generation]\ntp = 1\nkeep = true",
    ],
)
def test_stages_in_every_writing_are_written(tmp_path, stage):
    source, target = tmp_path / "source.toml", tmp_path / "target.toml"
    source.write_text(
        f"# common\n[pools]\nmain = [2]\n# of c\n[stages.c]\nalgorithm = 'grpo'  # here\n{stage}\n"
    )
    assert write_config(source, target, {"c": PLANNED}, "a100-80gb:1x8")
    text = target.read_text()
    assert "# common\n# of c\n" in text and "# here" in text and "main" not in text
    [(name, found)] = tomllib.loads(text)["stages"].items()
    expected = tomllib.loads(source.read_text())["stages"]["c"]
    replace_places(expected, PLANNED)
    assert (
        name == "c" and found == expected and found["actor"]["layout"] == PLANNED["actor"]["layout"]
    )


def test_where_comments_cannot_stay_the_values_do(tmp_path, monkeypatch):
    source, target = tmp_path / "source.toml", tmp_path / "target.toml"
    source.write_text(FOR_READERS)
    monkeypatch.setattr(written, "_become", lambda document, wanted: document.clear())
    assert not write_config(source, target, {None: PLANNED}, "a100-80gb:1x8")
    assert tomllib.loads(target.read_text()) == PLANNED | {"tokenizer": {"characters": "0"}}


def test_a_placement_becomes_given_for_the_cluster_or_its_own(tmp_path):
    source = tmp_path / "source.toml"
    target = tmp_path / "target.toml"
    source.write_text('placement = { name = "auto", cluster = "a100-80gb:1x4" }\n')
    for cluster, expected in (("h100-80gb:1x8", "h100-80gb:1x8"), (None, "a100-80gb:1x4")):
        assert write_config(source, target, {None: PLANNED}, cluster)
        assert tomllib.loads(target.read_text())["placement"] == {
            "name": "given",
            "cluster": expected,
        }
    source.write_text('placement = "auto"\n')
    assert write_config(source, target, {None: PLANNED}, None)
    assert tomllib.loads(target.read_text())["placement"] == {"name": "given"}


def test_a_file_that_cannot_be_written_is_said(tmp_path):
    source = tmp_path / "source.toml"
    source.write_text(FOR_READERS)
    with pytest.raises(ConfigError, match=r"--write .*No such file or directory"):
        write_config(source, tmp_path / "nowhere" / "plan.toml", {None: PLANNED}, None)
