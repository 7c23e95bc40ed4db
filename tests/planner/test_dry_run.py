from __future__ import annotations

from pathlib import Path

import pytest
from helpers.configs import CONFIG, printed
from helpers.paths import matrix

from hybridflow.core.errors import ConfigError
from hybridflow.kit.fakes.process import NotRehearsed

SMALL = {
    "vocab_size = 32000": "vocab_size = 320",
    "hidden_size = 2048": "hidden_size = 64",
    "intermediate_size = 5504": "intermediate_size = 96",
    "num_hidden_layers = 8": "num_hidden_layers = 2",
    "max_prompt_tokens = 512": "max_prompt_tokens = 64",
    "max_tokens = 512": "max_tokens = 64",
}


def small(folder: Path) -> Path:
    """The file of a PPO config whose models have few parameters."""
    text = CONFIG
    for large, little in SMALL.items():
        assert large in text
        text = text.replace(large, little)
    path = folder / "ppo.toml"
    path.write_text(text)
    return path


@matrix
def test_the_backend_of_each_role_runs_and_a_table_compares(tmp_path):
    text = printed(small(tmp_path), cluster="a100-80gb:1x2", dry_run=True)
    assert "dry run: the backends' code" in text and "optimizer made" in text
    table = text[text.index("bytes per device") :]
    for role in ("actor", "ref", "reward", "critic"):
        assert f"\n{role} " in table
    assert table.count("gradients, while it trains") == 2 and table.count("at rest") == 4
    assert "note" not in table


def test_a_backend_that_cannot_run_there_leaves_the_plan(tmp_path, monkeypatch):
    def fails(asked):
        raise NotRehearsed(f"the backend {asked.backend} does not run")
        yield

    monkeypatch.setattr("hybridflow.planner.dry_run.rehearse", fails)
    text = printed(small(tmp_path), cluster="a100-80gb:1x2", dry_run=True)
    assert "a step takes" in text and "bytes per device" not in text
    assert "actor: the backend fsdp does not run; the plan has formulas alone" in text


def test_tables_of_many_plans_have_no_dry_run(tmp_path):
    with pytest.raises(ConfigError, match="leave out --write, --timeline and --dry-run"):
        printed(small(tmp_path), cluster="a100-80gb:1x2", dry_run=True, what_if=[2])
