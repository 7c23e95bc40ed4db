"""An agent with tools: the model calls them, reads what they return, and answers in the end.

[environment]
name = "agent"
options = { function = "hybridflow.backends.agents.react:solve" }
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, MutableSequence, Sequence
from typing import Any

import attrs

from hybridflow.backends.agents.environment import BlockingModel
from hybridflow.core.errors import HybridFlowError
from hybridflow.kit.chat.conversation import Reply
from hybridflow.kit.chat.rendering import Message
from hybridflow.kit.sandbox.process import ProgramOutcome
from hybridflow.kit.sandbox.session import Sandbox

RETURNED = 2_000
"""Characters of what a tool returns that the model reads; its middle is left out beyond that."""


class ToolError(HybridFlowError):
    """A call that a tool cannot answer; the model reads why."""


@attrs.frozen
class Tool:
    """What the model may call."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    """JSON schema of its arguments, an object."""
    function: Callable[..., str]
    """Takes the arguments by name, and returns what the model reads. It may raise ToolError; what
    else it raises ends the episode."""

    @property
    def schema(self) -> dict[str, Any]:
        """As in OpenAI's chat completions."""
        described = {"name": self.name, "description": self.description}
        return {"type": "function", "function": {**described, "parameters": self.parameters}}


def react(model: BlockingModel, messages: MutableSequence[Message], tools: Sequence[Tool]) -> Reply:
    """Have the model call tools until it answers without a call; return that answer.

    messages: the conversation, which grows. Raises EpisodeOver at a limit of the episode.
    """
    schemas = [tool.schema for tool in tools]
    by_name = {tool.name: tool for tool in tools}
    while True:
        reply = model.chat(messages, schemas)
        messages.append(reply.message)
        if not reply.tool_calls:
            return reply
        for call in reply.tool_calls:
            returned = _returned(by_name, call["function"])
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": returned})


def _returned(tools: Mapping[str, Tool], call: Mapping[str, str]) -> str:
    try:
        tool = tools.get(call["name"])
        if tool is None:
            raise ToolError(f"there is no tool {call['name']!r:.80}; there are {', '.join(tools)}")
        arguments = json.loads(call["arguments"])
        properties = tool.parameters.get("properties", {})
        unknown = [name for name in arguments if name not in properties]
        missing = [name for name in tool.parameters.get("required", ()) if name not in arguments]
        if unknown or missing:
            wanted = ", ".join(properties)
            raise ToolError(f"{tool.name} takes {wanted}; got {', '.join(arguments) or 'nothing'}")
        returned = tool.function(**arguments)
    except ToolError as error:
        returned = f"error: {error}"
    if len(returned) > RETURNED:
        half = RETURNED // 2
        returned = f"{returned[:half]}\n...\n{returned[-half:]}"
    return returned


def python(box: Sandbox) -> Tool:
    """Return a tool that runs Python text in a sandbox; files stay from call to call."""

    def run(code: object) -> str:
        if not isinstance(code, str):
            raise ToolError(f"code is a text of Python; got {code!r:.80}")
        return said(box.python(code))

    parameters = {
        "type": "object",
        "properties": {"code": {"type": "string", "description": "A whole program."}},
        "required": ["code"],
    }
    about = "Runs a Python program and returns what it prints. Files stay for the next call."
    return Tool("python", about, parameters, run)


def said(outcome: ProgramOutcome) -> str:
    """What the model reads of a program: its output, and where it failed why."""
    if outcome.reason == "time":
        return f"{outcome.output}\nerror: it took too long"
    if outcome.reason == "output":
        return f"{outcome.output}\nerror: it printed too much"
    if outcome.status:
        return f"{outcome.output}{outcome.errors}\nerror: exit status {outcome.status}"
    return outcome.output


def solve(model: BlockingModel, row: Mapping[str, Any]) -> None:
    """Answer the row's prompt with a Python tool, which runs in a sandbox.

    The reward is another one's, such as `math`, which reads the text.
    """
    with Sandbox() as box:
        react(model, [{"role": "user", "content": row["prompt"]}], [python(box)])
