"""Anthropic's messages, as POST /v1/messages."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from hybridflow.kit.chat.api import Api, Asked, Object, count, listed, new_id, table, texts
from hybridflow.kit.chat.conversation import AgentError, Reply
from hybridflow.kit.chat.rendering import content

ERRORS = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}
"""Status -> the type of an error; others are "invalid_request_error"."""
REASONS = {"stop": "end_turn", "tool_calls": "tool_use", "length": "max_tokens"}


class AnthropicMessages(Api):
    """A message has blocks: text, thinking, uses of tools and their results."""

    path = "/v1/messages"
    fields = frozenset({"messages", "system", "tools", "max_tokens", "stop_sequences", "thinking"})
    usual = {"tool_choice": ({"type": "auto"},)}

    def read(self, body: Mapping[str, Any], earlier: Mapping[str, Sequence[Object]]) -> Asked:
        """Return what is asked."""
        table(body, "thinking")
        messages: list[Object] = []
        if system := body.get("system"):
            messages.append({"role": "system", "content": content({"content": system})})
        for message in listed(body, "messages"):
            messages += self._messages(message)
        tools = [self._tool(tool) for tool in listed(body, "tools")]
        limit = count(body, "max_tokens")
        return Asked(body, messages, tools, limit, texts(body, "stop_sequences"))

    def _messages(self, message: Mapping[str, Any]) -> Iterator[Object]:
        """Yield the messages that a message with blocks stands for."""
        role, blocks = message.get("role"), message.get("content")
        if not isinstance(blocks, list):
            yield {"role": role, "content": blocks}
            return
        said, calls, results = [], [], []
        for block in listed(message, "content"):
            kind = block.get("type")
            if kind == "tool_use":
                function = {"name": block["name"], "arguments": block["input"]}
                calls.append({"id": block["id"], "type": "function", "function": function})
            elif kind == "tool_result":
                text = content({"content": block.get("content")})
                results.append(
                    {"role": "tool", "tool_call_id": block["tool_use_id"], "content": text}
                )
            elif kind not in ("thinking", "redacted_thinking"):
                said.append(block)
        yield from results
        made: Object = {"role": role, "content": said}
        if calls:
            made["tool_calls"] = calls
        if said or calls or not results:
            yield made

    def _tool(self, tool: Mapping[str, Any]) -> Object:
        if "input_schema" not in tool:
            raise AgentError(
                f"a tool is of type {tool.get('type')!r}; only an agent's own tools, with an "
                "input_schema, can be offered"
            )
        # In the order of OpenAI's clients: templates write tools as they come.
        function = {name: tool[name] for name in ("name", "description") if name in tool}
        function["parameters"] = tool["input_schema"]
        return {"type": "function", "function": function}

    def write(
        self, asked: Asked, replies: Sequence[Reply], decode: Callable[[Sequence[int]], str]
    ) -> Object:
        """Return a message; its thinking is told where that was asked for."""
        (reply,) = replies
        blocks: list[Object] = []
        thinking = reply.message.get("reasoning_content")
        wanted = table(asked.body, "thinking").get("type", "disabled") != "disabled"
        if thinking and wanted:
            blocks.append({"type": "thinking", "thinking": thinking, "signature": ""})
        if reply.content or not reply.tool_calls:
            blocks.append({"type": "text", "text": reply.content})
        for call in reply.tool_calls:
            function = call["function"]
            given = json.loads(function["arguments"])
            blocks.append(
                {"type": "tool_use", "id": call["id"], "name": function["name"], "input": given}
            )
        reason = REASONS[reply.finish_reason]
        if reply.stop is not None and reply.finish_reason == "stop":
            reason = "stop_sequence"
        return {
            "id": new_id("msg_"),
            "type": "message",
            "role": "assistant",
            "model": asked.model,
            "content": blocks,
            "stop_reason": reason,
            "stop_sequence": reply.stop,
            "usage": {"input_tokens": reply.before, "output_tokens": len(reply.ids)},
        }

    def events(self, answer: Object, asked: Asked) -> Iterator[tuple[str, Any]]:
        """Yield each block in one delta."""
        begun = {**answer, "content": [], "stop_reason": None, "stop_sequence": None}
        yield _event("message_start", message=begun)
        for index, block in enumerate(answer["content"]):
            empty, deltas = _deltas(block)
            yield _event("content_block_start", index=index, content_block=empty)
            for delta in deltas:
                yield _event("content_block_delta", index=index, delta=delta)
            yield _event("content_block_stop", index=index)
        end = {name: answer[name] for name in ("stop_reason", "stop_sequence")}
        yield _event("message_delta", delta=end, usage=answer["usage"])
        yield _event("message_stop")

    def error(self, status: int, text: str) -> Object:
        """Return an error as Anthropic's clients read it."""
        kind = ERRORS.get(status, "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": text}}


def _event(name: str, **data: Any) -> tuple[str, Object]:
    return name, {"type": name, **data}


def _deltas(block: Object) -> tuple[Object, list[Object]]:
    """Return a block as it begins, and what is added to it."""
    if block["type"] == "text":
        return {**block, "text": ""}, [{"type": "text_delta", "text": block["text"]}]
    if block["type"] == "thinking":
        deltas = [
            {"type": "thinking_delta", "thinking": block["thinking"]},
            {"type": "signature_delta", "signature": block["signature"]},
        ]
        return {**block, "thinking": ""}, deltas
    text = json.dumps(block["input"])
    return {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": text}]
