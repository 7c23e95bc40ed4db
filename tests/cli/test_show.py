"""`hybridflow show`: each value as it counts, with where it came from."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers.configs import console
from helpers.shown import resolved

from hybridflow.cli.show import render, show
from hybridflow.core.errors import ConfigError

pytestmark = pytest.mark.usefixtures("shown")


def printed(path: str = "one.toml", *overrides: str, docs: bool = False) -> str:
    to, out = console()
    show(path, overrides, docs, to)
    return out.getvalue()


def value(key: str, *overrides: str, path: str = "one.toml", stage: int = 0) -> tuple[object, str]:
    found = resolved(path, *overrides)[stage][1][key]
    return found.value, found.source


# --- values and their sources ---


def test_a_value_says_whether_it_is_of_the_file_the_command_line_or_a_default():
    assert value("run.steps") == (50, "file one.toml")
    assert value("run.steps", "run.steps=3") == (3, "command line")
    assert value("run.seed") == (0, "default")
    assert value("pools.main") == ([4], "file one.toml")


def test_defaults_that_follow_the_device_say_so_and_what_the_other_one_has(monkeypatch):
    assert value("rollout.dtype") == ("float32", 'default on cpu; on cuda: "bfloat16"')
    assert value("rollout.prefill_tokens") == (8192, "default")
    assert value("rollout.dtype", "rollout.dtype=float32") == ("float32", "command line")
    # Of a role's backend; what is the same on both is a default like others.
    bare = Path("one.toml").read_text().replace('backend.precision = "bf16"', "")
    Path("bare.toml").write_text(bare)
    key = "actor.backend.precision"
    assert value(key, path="bare.toml") == ("fp32", 'default on cpu; on cuda: "bf16"')
    recomputes = "actor.backend.activation_checkpointing"
    assert value(recomputes, path="bare.toml") == (False, "default")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert value("rollout.dtype") == ("bfloat16", 'default on cuda; on cpu: "float32"')
    assert value("rollout.dtype", "run.device=cuda") == ("bfloat16", "default on cuda")
    assert value(key, "run.device=cpu", path="bare.toml") == ("fp32", "default on cpu")


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
    assert value("critic.backend.precision", "critic.backend.precision=fp32") == (
        "fp32",
        "command line",
    )


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
    assert value("run.steps", "stages.second.run.steps=5", path="two.toml", stage=1) == (
        5,
        "command line",
    )
    assert value("run.steps", "run.steps=5", path="two.toml", stage=0) == (5, "command line")
    assert value("actor.model.path", path="two.toml", stage=1) == ("stage:first", "file two.toml")


def test_every_field_of_every_section_is_printed():
    [(_, values)] = resolved()
    for key in ("run.trackers", "runtime.threads", "data.pattern", "tokenizer.train", "sampling.top_k", "rollout.fast",
                "algorithm.dual_clip", "actor.optimizer.betas", "actor.backend.replicas", "reward.function",
                "validation.samples"):  # fmt: skip
        assert key in values
    assert not any(
        key.startswith(("ref.optimizer", "actor.function", "reward.layout")) for key in values
    )


# --- the printed text ---


def test_plain_text_has_one_line_per_value():
    lines = [line.split() for line in printed().splitlines()]
    assert ["run.steps", "50", "file", "one.toml"] in lines
    assert ["sampling.stop_tokens", "[]", "default"] in lines
    assert "\x1b" not in printed()


def test_unused_roles_and_sub_tables_are_said_to_be_unused():
    text = printed()
    assert "teacher: unused: algorithm ppo has the roles actor, critic, ref, reward" in text
    assert "unused: [algorithm.grpo]" in text


def test_docs_prints_what_each_setting_means():
    text = printed(docs=True)
    assert "# Number of iterations, each one call of the algorithm's step." in text
    assert "# Discount per token." in text and "# Devices per node." in text
    assert "# Number of iterations" not in printed()


def test_stages_are_shown_one_after_the_other_with_the_tokenizer_of_the_earlier_one():
    text = printed("two.toml")
    assert text.index("stage first") < text.index("stage second")
    assert "tokenizer: the earlier stage's, runs/two/first/tokenizer" in text


def test_a_terminal_gets_a_table_that_wraps():
    to, out = console(width=70, terminal=True)
    show("one.toml", (), True, to)
    assert "\x1b[1m" in out.getvalue() and "actor.optimizer.lr" in out.getvalue()


def test_all_problems_are_reported_as_by_run():
    with pytest.raises(ConfigError) as error:
        printed("one.toml", "run.stepz=1", "actor.layout.tp=3", "algorithm.ppo.gama=1")
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
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("started: False False\n")
    assert {p.name for p in tmp_path.iterdir()} == {"one.toml", "two.toml"}
