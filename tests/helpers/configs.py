"""Configs and clusters that several tests plan with, and consoles that keep what is printed."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from rich.console import Console

from helpers.tiny import MODEL
from hybridflow.cli.plan import plan

LLAMA = (
    '{ model_type = "llama", vocab_size = 32000, hidden_size = 2048, intermediate_size = 5504, num_hidden_layers = 8, '
    "num_attention_heads = 16, max_position_embeddings = 4096 }"
)
CONFIG = f"""
# of a reader
algorithm = {{ name = "ppo", prompts_per_step = 256, mini_batch_size = 64 }}
[run]
steps = 4
[pools]
main = [2]
[tokenizer]
characters = "0123456789+="
[data]
source = "arithmetic"
max_prompt_tokens = 512
[sampling]
max_tokens = 512  # long
[rollout]
name = "transformers"
dtype = "bfloat16"
[actor]
micro_batch_tokens = 4096
backend = {{ name = "fsdp", precision = "bf16" }}
model.config = {LLAMA}
[reward]
model.config = {LLAMA}
backend = {{ name = "fsdp", precision = "bf16" }}
"""

OWN_CLUSTER = """
[[nodes]]
device = "laptop"
per_node = 1
[devices.laptop]
memory_gb = 4
tflops = 0.05
bandwidth_gbs = 10
link_gbs = 5
"""


def tiny_run(folder: Path, cluster: Path) -> str:
    """A small run in this process that knows its cluster."""
    return f"""
algorithm = {{ name = "grpo", prompts_per_step = 4, group_size = 2 }}
runtime = "inline"
placement = {{ name = "given", cluster = "{cluster}" }}
reward = "exact_match"
run = {{ folder = "{folder / "runs"}", steps = 3, trackers = ["jsonl"], device = "cpu" }}
tokenizer.characters = "0123456789+="
data = {{ source = "arithmetic", max_prompt_tokens = 8, answer = "{{answer}}" }}
sampling.max_tokens = 3
actor.model.config = {MODEL}
"""


def ppo_config(folder: Path) -> Path:
    """The file of a config that plans well."""
    path = folder / "ppo.toml"
    path.write_text(CONFIG)
    return path


def printed(*arguments: Any, **options: Any) -> str:
    """Of `plan` with these arguments."""
    out = io.StringIO()
    plan(*arguments, **options, console=Console(file=out, width=200, highlight=False, markup=False))
    return out.getvalue()


def console(width: int = 100, terminal: bool | None = None) -> tuple[Console, io.StringIO]:
    """A console, and what it has printed so far; plain text unless it is a terminal."""
    out = io.StringIO()
    return Console(
        file=out, markup=False, highlight=False, width=width, force_terminal=terminal
    ), out
