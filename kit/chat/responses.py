"""OpenAI's responses, as POST /v1/responses."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from hybridflow.kit.chat.api import Api, Asked, Object, count, listed, new_id, refuse
from hybridflow.kit.chat.chat_completions import ERRORS
from hybridflow.kit.chat.conversation import AgentError, Reply
from hybridflow.kit.chat.rendering import content


class Responses(Api):
    """A conversation is a list of items; a call may name the answer that it goes on from."""

    path = "/v1/responses"
    fields = frozenset(
        {
            "input", "instructions", "previous_response_id", "tools", "max_output_tokens",
            "background", "conversation",
        }
    )  # fmt: skip
    usual = {
        "tool_choice": ("auto",),
        "parallel_tool_calls": (True,),
        "text": ({"format": {"type": "text"}},),
        "include": ([], ["reasoning.encrypted_content"]),
        "truncation": ("disabled",),
    }

    def read(self, body: Mapping[str, Any], earlier: Mapping[str, Sequence[Object]]) -> Asked:
        """Return what is asked."""
        refuse(body, background=(False,), conversation=())
        messages: list[Object] = []
        if (previous := body.get("previous_response_id")) is not None:
            if previous not in earlier:
                raise AgentError(
                    f"previous_response_id is {previous!r}, which is no answer of this episode"
                )
            messages += earlier[previous]
        given = body.get("input")
        if isinstance(given, str):
            messages.append({"role": "user", "content": given})
        else:
            messages = _with_items(messages, listed(body, "input"))
        # Instructions are those of one call, and not part of what a later one goes on from.
        system = []
        if instructions := body.get("instructions"):
            system.append({"role": "system", "content": instructions})
        return Asked(
            body,
            [*system, *messages],
            [_tool(tool) for tool in listed(body, "tools")],
            count(body, "max_output_tokens"),
            goes_on_from=messages,
        )

    def write(
        self, asked: Asked, replies: Sequence[Reply], decode: Callable[[Sequence[int]], str]
    ) -> Object:
        """Return a response, whose items are thinking, text, and calls."""
        (reply,) = replies
        output: list[Object] = []
        if thinking := reply.message.get("reasoning_content"):
            part = {"type": "reasoning_text", "text": thinking}
            output.append(
                {"type": "reasoning", "id": new_id("rs_"), "summary": [], "content": [part]}
            )
        cut = reply.finish_reason == "length"
        status = "incomplete" if cut else "completed"
        if reply.content or not reply.tool_calls:
            output.append(
                {
                    "type": "message",
                    "id": new_id("msg_"),
                    "role": "assistant",
                    "status": status,
                    "content": [_text(reply.content)],
                }
            )
        for call in reply.tool_calls:
            output.append(
                {
                    "type": "function_call",
                    "id": new_id("fc_"),
                    "call_id": call["id"],
                    "status": status,
                    **call["function"],
                }
            )
        made = len(reply.ids)
        body = asked.body
        return {
            "id": new_id("resp_"),
            "object": "response",
            "created_at": int(time.time()),
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "instructions": body.get("instructions"),
            "previous_response_id": body.get("previous_response_id"),
            "max_output_tokens": body.get("max_output_tokens"),
            "metadata": body.get("metadata") or {},
            "model": asked.model,
            "output": output,
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": list(body.get("tools") or ()),
            "usage": {
                "input_tokens": reply.before,
                "input_tokens_details": {"cached_tokens": 0},
                "output_tokens": made,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": reply.before + made,
            },
        }

    def events(self, answer: Object, asked: Asked) -> Iterator[tuple[str, Any]]:
        """Yield each item in one delta."""
        for number, (name, data) in enumerate(_events(answer)):
            yield name, {"type": name, "sequence_number": number, **data}

    def error(self, status: int, text: str) -> Object:
        """Return an error as OpenAI's clients read it."""
        kind = ERRORS.get(status, "invalid_request_error")
        return {"error": {"message": text, "type": kind, "param": None, "code": None}}


def _with_items(messages: Sequence[Object], items: Sequence[Mapping[str, Any]]) -> list[Object]:
    """Return messages and those that items stand for; items of one turn become one message."""
    made = list(messages)
    for item in items:
        kind = item.get("type", "message")
        if kind == "message":
            made.append({"role": item.get("role"), "content": item.get("content")})
        elif kind == "function_call":
            function = {"name": item["name"], "arguments": item["arguments"]}
            call = {"id": item["call_id"], "type": "function", "function": function}
            if not made or made[-1]["role"] != "assistant":
                made.append({"role": "assistant", "content": ""})
            made[-1] = {**made[-1], "tool_calls": [*made[-1].get("tool_calls", ()), call]}
        elif kind == "function_call_output":
            text = content({"content": item.get("output")})
            made.append({"role": "tool", "tool_call_id": item["call_id"], "content": text})
        elif kind != "reasoning":
            raise AgentError(f"input has an item of type {kind!r}, which cannot be rendered")
    return made


def _tool(tool: Mapping[str, Any]) -> Object:
    if tool.get("type") != "function":
        raise AgentError(
            f"a tool is of type {tool.get('type')!r}; only functions of the agent can be offered"
        )
    names = ("name", "description", "parameters")
    function = {name: tool[name] for name in names if tool.get(name) is not None}
    return {"type": "function", "function": function}


def _text(text: str) -> Object:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _events(answer: Object) -> Iterator[tuple[str, Object]]:
    begun = {**answer, "status": "in_progress", "output": [], "usage": None}
    yield "response.created", {"response": begun}
    for index, item in enumerate(answer["output"]):
        where = {"item_id": item["id"], "output_index": index}
        empty = {**item, "status": "in_progress"}
        if item["type"] == "function_call":
            empty["arguments"] = ""
        else:
            empty["content"] = []
        yield "response.output_item.added", {"output_index": index, "item": empty}
        if item["type"] == "function_call":
            given = item["arguments"]
            yield "response.function_call_arguments.delta", {**where, "delta": given}
            done = {**where, "name": item["name"], "arguments": given}
            yield "response.function_call_arguments.done", done
        if item["type"] == "message":
            (part,) = item["content"]
            where["content_index"] = 0
            yield "response.content_part.added", {**where, "part": _text("")}
            delta = {**where, "delta": part["text"], "logprobs": []}
            yield "response.output_text.delta", delta
            done = {**where, "text": part["text"], "logprobs": []}
            yield "response.output_text.done", done
            yield "response.content_part.done", {**where, "part": part}
        yield "response.output_item.done", {"output_index": index, "item": item}
    yield f"response.{answer['status']}", {"response": answer}
