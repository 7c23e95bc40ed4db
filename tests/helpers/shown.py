"""Configs whose values are shown: one with most sections, and one with two stages."""

from __future__ import annotations

from pathlib import Path

from helpers.tiny import MODEL
from hybridflow.cli.show import Value, blocks
from hybridflow.core.job.job import Job
from hybridflow.settle.config.load import read_config
from hybridflow.settle.resolve import resolve_jobs

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
actor.model.config = {MODEL}
data.response = "{{answer}}"
algorithm = {{ name = "sft", batch_size = 4 }}
[stages.second]
run.steps = 7
algorithm = {{ name = "grpo", prompts_per_step = 4, group_size = 4 }}
actor.model.path = "stage:first"
"""


def write_shown(folder: Path) -> None:
    """Both, as one.toml and two.toml."""
    (folder / "one.toml").write_text(FILE)
    (folder / "two.toml").write_text(STAGES)


def resolved(path: str = "one.toml", *overrides: str) -> list[tuple[Job, dict[str, Value]]]:
    """Each stage's job, and its values by key."""
    tables, provenance = read_config(path, overrides)
    jobs = resolve_jobs(tables, Path(path).stem)
    return [
        (job, {v.key: v for block in blocks(job, provenance) for v in block.values}) for job in jobs
    ]
