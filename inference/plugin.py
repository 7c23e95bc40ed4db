"""The commands around a run, as plugins."""

from __future__ import annotations

from hybridflow.core.contracts.capabilities import CommandCapabilities
from hybridflow.core.plugins import Descriptor, hookimpl

COMMANDS = {
    "evaluate": (
        "evaluate:EvaluateCommand",
        "Score a model on held-out data: mean reward, pass@k, maj@k, with intervals.",
    ),
    "export": (
        "export:ExportCommand",
        "Write a run's model as a Hugging Face folder, with a model card.",
    ),
    "chat": ("chat:ChatCommand", "Talk to a model in the terminal."),
    "serve": (
        "serve:ServeCommand",
        "Serve a model to programs, as agents reach it in a run: clients of OpenAI and Anthropic.",
    ),
    "generate": ("generate:GenerateCommand", "Generate responses to prompts, as JSON lines."),
}
"""Name -> where the command is, and its summary."""


@hookimpl
def hybridflow_plugins() -> list[Descriptor]:
    """Register each command with its summary; imports none."""
    return [
        Descriptor(
            "command",
            name,
            f"hybridflow.inference.commands.{path}",
            capabilities=CommandCapabilities(summary=text),
        )
        for name, (path, text) in COMMANDS.items()
    ]
