"""`hybridflow show`: each value as it counts, with where it came from, and what follows."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from hybridflow.cli.figures import figures, remarks
from hybridflow.cli.show import Value, blocks, render, show
from hybridflow.core.config import read_config
from hybridflow.core.errors import ConfigError
from hybridflow.core.job.job import Job
from hybridflow.core.job.resolve import resolve_jobs
from hybridflow.core.job.schema import SHORTHAND

MODEL = """{ model_type = "qwen2", vocab_size = 16, hidden_size = 64, num_hidden_layers = 2, num_attention_heads = 4,
num_key_value_heads = 2, intermediate_size = 128, max_position_embeddings = 32 }""".replace("\n", " ")
FILE = f"""
runtime = "ray"
tokenizer.characters = "0123456789+="
data = {{ source = "arithmetic", bos = true, max_prompt_tokens = 8 }}
sampling.max_tokens = 4
reward.function = "exact_match"
pools = {{ main = [4] }}
run = {{ steps = 50, checkpoint_every = 20 }}
[actor]
model.config = {MODEL}
optimizer.lr = 1e-3
backend.precision = "bf16"
layout.tp = 2
[critic]
optimizer.lr = 2e-3
[teacher]
pool = "main"
[algorithm]
name = "ppo"
kl_coef = 0.1
[algorithm.ppo]
prompts_per_step = 32
mini_batch_size = 10
epochs = 2
[algorithm.grpo]
group_size = 4
[validation]
every = 20
at_start = true
data.limit = 7
"""
STAGES = f"""
runtime = "inline"
tokenizer.characters = "0123456789+="
data = {{ source = "arithmetic", max_prompt_tokens = 8 }}
run.steps = 9
sampling.max_tokens = 4
reward.function = "exact_match"
[stages.first]
algorithm = {{ name = "sft", batch_size = 4 }}
data.response = "{{answer}}"
actor.model.config = {MODEL}
[stages.second]
run.steps = 7
algorithm = {{ name = "grpo", prompts_per_step = 4, group_size = 4 }}
actor.model.path = "stage:first"
"""


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("one.toml").write_text(FILE)
    Path("two.toml").write_text(STAGES)


def shown(path: str = "one.toml", *overrides: str, docs: bool = False) -> str:
    out = io.StringIO()
    show(path, overrides, docs, Console(file=out, markup=False, highlight=False))
    return out.getvalue()


def resolved(path: str = "one.toml", *overrides: str) -> list[tuple[Job, dict[str, Value]]]:
    tables, provenance = read_config(path, overrides, SHORTHAND)
    jobs = resolve_jobs(tables, Path(path).stem, SHORTHAND)
    return [(job, {v.key: v for block in blocks(job, provenance) for v in block.values}) for job in jobs]


def value(key: str, *overrides: str, path: str = "one.toml", stage: int = 0) -> tuple[object, str]:
    found = resolved(path, *overrides)[stage][1][key]
    return found.value, found.source


# --- values and their sources ---


def test_a_value_says_whether_it_is_of_the_file_the_command_line_or_a_default():
    assert value("run.steps") == (50, "file one.toml")
    assert value("run.steps", "run.steps=3") == (3, "command line")
    assert value("run.seed") == (0, "default")
    assert value("pools.main") == ([4], "file one.toml")


def test_what_is_filled_in_is_derived():
    assert value("run.name") == ("one", "derived")
    assert value("actor.layout.dp") == (2, "derived")
    assert value("actor.layout.dp", "actor.layout.dp=2") == (2, "command line")
    assert value("validation.data.shuffle") == (False, "derived")


def test_what_a_role_inherits_is_the_actors():
    assert value("critic.model.config.hidden_size") == (64, "actor")
    assert value("critic.optimizer.lr") == (0.002, "file one.toml")
    assert value("critic.layout.tp") == (2, "actor")
    assert value("ref.backend.precision") == ("bf16", "actor")
    assert value("ref.backend.compile") == (False, "default")
    assert value("critic.backend.precision", "critic.backend.precision=fp32") == ("fp32", "command line")


def test_another_model_inherits_nothing_of_the_actors(tmp_path):
    folder = tmp_path / "other"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "qwen2", "vocab_size": 16}')
    (folder / "model.safetensors").write_bytes(b"")
    assert value("ref.model.path", "ref.model.path=other") == ("other", "command line")
    assert value("ref.model.config", "ref.model.path=other") == (None, "default")


def test_a_plugins_own_sub_table_is_looked_at_first():
    assert value("algorithm.prompts_per_step") == (32, "file one.toml")
    assert value("algorithm.epochs", "algorithm.ppo.epochs=3") == (3, "command line")
    assert value("algorithm.kl_coef") == (0.1, "file one.toml")
    assert value("algorithm.gamma") == (1.0, "default")


def test_a_shorthand_has_a_source():
    assert value("runtime.name", "runtime={name='ray', threads=2}") == ("ray", "command line")
    assert value("rollout.name", "rollout=transformers") == ("transformers", "command line")
    assert value("reward.function", "reward=math") == ("math", "command line")


def test_validation_shows_what_it_takes_from_the_data():
    assert value("validation.data.limit") == (7, "file one.toml")
    assert value("validation.data.max_prompt_tokens") == (8, "data")
    assert value("validation.data.path") == (None, "default")


def test_a_stage_shows_its_own_tables_and_the_common_ones():
    assert value("run.steps", path="two.toml") == (9, "file two.toml")
    assert value("run.steps", path="two.toml", stage=1) == (7, "file two.toml")
    assert value("run.steps", "stages.second.run.steps=5", path="two.toml", stage=1) == (5, "command line")
    assert value("run.steps", "run.steps=5", path="two.toml", stage=0) == (5, "command line")
    assert value("actor.model.path", path="two.toml", stage=1) == ("stage:first", "file two.toml")


def test_every_field_of_every_section_is_shown():
    [(_, values)] = resolved()
    for key in ("run.trackers", "runtime.threads", "data.pattern", "tokenizer.train", "sampling.top_k", "rollout.fast",
                "algorithm.dual_clip", "actor.optimizer.betas", "actor.backend.replicas", "reward.function",
                "validation.samples"):  # fmt: skip
        assert key in values
    assert not any(key.startswith(("ref.optimizer", "actor.function", "reward.layout")) for key in values)


# --- the printed text ---


def test_plain_text_has_one_line_per_value():
    lines = [line.split() for line in shown().splitlines()]
    assert ["run.steps", "50", "file", "one.toml"] in lines
    assert ["sampling.stop_tokens", "[]", "default"] in lines
    assert "\x1b" not in shown()


def test_unused_roles_and_sub_tables_are_said_to_be_unused():
    text = shown()
    assert "teacher: unused: algorithm ppo has the roles actor, critic, ref, reward" in text
    assert "unused: [algorithm.grpo]" in text


def test_docs_prints_what_each_setting_means():
    text = shown(docs=True)
    assert "# Iterations: calls of the algorithm's step." in text
    assert "# Discount per token." in text and "# Devices per node." in text
    assert "# Iterations" not in shown()


def test_stages_are_shown_one_after_the_other_with_the_tokenizer_of_the_earlier_one():
    text = shown("two.toml")
    assert text.index("stage first") < text.index("stage second")
    assert "tokenizer: the earlier stage's, runs/two/first/tokenizer" in text


def test_a_terminal_gets_a_table_that_wraps():
    out = io.StringIO()
    show("one.toml", (), True, Console(file=out, force_terminal=True, width=70, markup=False, highlight=False))
    assert "\x1b[1m" in out.getvalue() and "actor.optimizer.lr" in out.getvalue()


def test_all_problems_are_reported_as_by_run():
    with pytest.raises(ConfigError) as error:
        shown("one.toml", "run.stepz=1", "actor.layout.tp=3", "algorithm.ppo.gama=1")
    assert len(error.value.problems) == 3


@pytest.mark.parametrize(
    "given, text",
    [
        (None, "-"),
        (True, "true"),
        ("a b", '"a b"'),
        ((1, "x"), '[1, "x"]'),
        ({}, "{}"),
        ({"a": 1}, "{ a = 1 }"),
        (0.5, "0.5"),
    ],
)
def test_values_are_spelled_as_in_toml(given, text):
    assert render(given) == text


def test_nothing_is_started_and_nothing_is_written(tmp_path):
    code = """if True:
        import sys
        from hybridflow.cli.show import show
        show("one.toml", ["runtime=inline", "pools.main=[1]", "actor.layout.tp=1"])
        import torch.distributed as dist
        print("started:", dist.is_initialized(), "ray" in sys.modules)
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("started: False False\n")
    assert {p.name for p in tmp_path.iterdir()} == {"one.toml", "two.toml"}


# --- what follows ---


def test_derived_figures_are_those_of_the_config():
    [(job, _)] = resolved()
    found = dict(figures(job))
    assert found["devices"] == f"4 x {job.device} (pools: main 4), runtime ray"
    assert found["sequences per step"] == "32" and found["sequences per optimizer step"] == "10"
    assert found["optimizer steps per step"] == "8" and found["optimizer steps in all"] == "400"
    assert found["sequences in all"] == "1,600" and found["tokens per step, at most"] == "384 (32 x 12)"
    assert "4 ranks of pool main, layout dp2-tp2" in found["actor"]
    assert "16 sequences per step and dp rank; 5 per optimizer step and dp rank" in found["actor"]
    assert "micro-batches of 16,384 tokens; generates with transformers" in found["actor"]
    assert "frozen" in found["ref"] and "per optimizer step" not in found["ref"]
    assert found["checkpoints"] == "every 20 steps, 2 in all; the newest 2 are kept"
    assert found["validation"] == "validation: before the first step, every 20 steps (2 times), at the end"
    assert found["folder"] == "runs/one" and found["tokenizer"] == "of 12 characters and 3 special tokens"


def test_rows_per_step_of_our_algorithms():
    [(grpo, _)] = resolved("one.toml", "algorithm={name='grpo', grpo={prompts_per_step=6}}", "algorithm.kl_coef=0.0")
    assert grpo.algorithm.rows_per_step == 24 and grpo.algorithm.rows_per_update == 24
    assert resolved("two.toml")[0][0].algorithm.rows_per_step == 4


def test_an_uneven_share_is_shown_as_a_range():
    [(job, _)] = resolved("one.toml", "algorithm.ppo.prompts_per_step=31")
    assert "15 to 16 sequences per step and dp rank" in dict(figures(job))["actor"]


def test_what_is_legal_and_hardly_meant_is_remarked():
    overrides = (
        "run.restarts=1",
        "run.checkpoint_every=60",
        "sampling.temperature=0.0",
        "actor.optimizer={schedule='cosine', total_steps=10}",
        "critic.optimizer={schedule='constant', warmup_steps=900}",
    )
    [(job, _)] = resolved("one.toml", *overrides)
    text = "\n".join(remarks(job))
    assert "run.restarts: without checkpoints" in text and "run.checkpoint_every: is 60" in text
    assert "0 is greedy" in text and "actor.optimizer.total_steps: is 10, and the run has 400" in text
    assert "critic.optimizer.warmup_steps: is 900" in text
    assert not list(remarks(resolved()[0][0]))
