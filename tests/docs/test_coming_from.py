"""docs/coming-from.md: every line of ours is a setting, and the converted configurations run."""

from __future__ import annotations

import json
import re
import sys
import tomllib

import pytest
from helpers.paths import DOCS

from hybridflow.core.errors import ConfigError
from hybridflow.kit.testing.runs import MODEL
from hybridflow.settle.config.load import expand, merge
from hybridflow.settle.launch import run
from hybridflow.settle.resolve import resolve_jobs

PAGE = (DOCS / "coming-from.md").read_text()
ROWS = [line for line in PAGE.splitlines() if line.startswith("| ") and " here |" not in line]
LINES = re.findall(r"`([a-z_.]+ = [^`]+)`", "\n".join(row.split(" | ", 1)[1] for row in ROWS))
CONVERTED = re.findall(r"^<!-- converted -->\n```toml\n(.*?)^```$", PAGE, re.M | re.S)
BASES = ("grpo", "ppo", "dr_grpo")
"""Algorithms, of which one at least has the setting."""
REWARDS = """
def f(completions, **columns):
    return [0.0 for _ in completions]


def accuracy(completions, solution, **kwargs):
    return [float(answer in text) for text, answer in zip(completions, solution)]


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(solution_str == ground_truth)
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with what the page names: models, rewards, rows."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from hybridflow.core.contracts.tokenizer import TokenizerConfig
    from hybridflow.core.plugins.resolve import build_tokenizer

    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_rewards", raising=False)
    (tmp_path / "my_rewards.py").write_text(REWARDS)
    fields = {**MODEL, "max_position_embeddings": 2048}
    for name in ("folder", "model"):
        AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields)).save_pretrained(
            tmp_path / name
        )
        build_tokenizer(TokenizerConfig(characters="0123456789+=")).save(tmp_path / name)
    yield tmp_path
    sys.modules.pop("my_rewards", None)  # other pages have a module of this name


def test_the_page_has_a_line_of_ours_for_every_row():
    assert len(ROWS) > 60 and len(LINES) > 60 and len(CONVERTED) == 2
    without = [row for row in ROWS if not re.search(r"`[a-z_.]+ = ", row)]
    assert [row for row in without if "--resume" not in row] == []


def test_every_line_is_a_setting(here):
    wrong = {}
    for line in dict.fromkeys(LINES):
        problems = []
        for name in BASES:
            base = {
                "algorithm": {"name": name, "prompts_per_step": 64, "group_size": 8},
                "data": {"path": "train.jsonl"},
                "actor": {"model": {"path": "folder"}},
                "reward": {"function": "exact_match"},
                "run": {"device": "cpu"},
            }
            if name == "dr_grpo":
                base["algorithm"]["length"] = 512
            own = tomllib.loads(line)
            if "parts" in own.get("reward", {}) or "function" in own.get("reward", {}):
                del base["reward"]
            try:
                resolve_jobs(
                    merge(expand(base), expand(own)),
                    "page",
                    elsewhere=True,
                )
                break
            except ConfigError as error:
                problems.append(str(error))
        else:
            wrong[line] = problems
    assert wrong == {}


@pytest.mark.parametrize("text", CONVERTED, ids=["verl", "trl"])
def test_a_converted_run_takes_two_steps(here, text):
    tables = tomllib.loads(text)
    assert len(text.strip().splitlines()) <= 15
    rows = [
        {
            "prompt": f"{n}+1=",
            "solution": str(n + 1),
            "data_source": "sums",
            "reward_model": {"ground_truth": str(n + 1), "style": "rule"},
            "extra_info": {"index": n},
        }
        for n in range(8)
    ]
    (here / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if tables["data"]["source"] == "parquet":
        parquet = pytest.importorskip("pyarrow.parquet")
        import pyarrow

        for name in ("train", "test"):
            parquet.write_table(pyarrow.Table.from_pylist(rows), here / f"{name}.parquet")

    # As the page has it, but for the size of the test
    small = {
        "run": {"steps": 2, "device": "cpu", "trackers": []},
        "runtime": {"name": "inline"},
        "sampling": {"max_tokens": 4},
        "data": {"max_prompt_tokens": 16},
        "algorithm": {"prompts_per_step": 4, "mini_batch_size": 0, "group_size": 2},
    }
    outcome = run(merge(expand(tables), expand(small)))
    assert (outcome.state, outcome.step) == ("finished", 2)
