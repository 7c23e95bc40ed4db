"""OpenAI's chat completions, as POST /v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from hybridflow.kit.chat.api import (
    Api,
    Asked,
    Object,
    count,
    listed,
    new_id,
    refuse,
    table,
    texts,
)
from hybridflow.kit.chat.conversation import AgentError, Reply

ERRORS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
"""Status -> the type of an error; others are "invalid_request_error"."""


MOST_SAMPLES = 64


class ChatCompletions(Api):
    """The format in which conversations are held, too."""

    path = "/v1/chat/completions"
    fields = frozenset(
        {
            "messages", "tools", "max_tokens", "max_completion_tokens", "stop", "logprobs",
            "top_logprobs", "n",
        }
    )  # fmt: skip
    usual = {
        "tool_choice": ("auto",),
        "parallel_tool_calls": (True,),
        "response_format": ({"type": "text"},),
        "modalities": (["text"],),
    }

    def read(self, body: Mapping[str, Any], earlier: Mapping[str, Sequence[Object]]) -> Asked:
        """Return what is asked."""
        refuse(body, top_logprobs=(0,))
        samples = count(body, "n") or 1
        if samples > MOST_SAMPLES:
            raise AgentError(f"n is {samples}; ask for {MOST_SAMPLES} answers at most")
        table(body, "stream_options")
        return Asked(
            body,
            listed(body, "messages"),
            listed(body, "tools"),
            count(body, "max_completion_tokens", "max_tokens"),
            texts(body, "stop"),
            samples=samples,
        )

    def write(
        self, asked: Asked, replies: Sequence[Reply], decode: Callable[[Sequence[int]], str]
    ) -> Object:
        """Return a chat completion."""
        choices = []
        for index, reply in enumerate(replies):
            message = {**reply.message, "refusal": None}
            if reply.tool_calls:
                message["content"] = reply.content or None
            logprobs = None
            if asked.body.get("logprobs"):
                logprobs = {"content": token_logprobs(reply, decode), "refusal": None}
            choices.append(
                {
                    "index": index,
                    "message": message,
                    "finish_reason": reply.finish_reason,
                    "logprobs": logprobs,
                }
            )
        before, made = replies[0].before, sum(len(reply.ids) for reply in replies)
        return {
            "id": new_id("chatcmpl-"),
            "object": "chat.completion",
            "created": int(time.time()),
            "model": asked.model,
            "choices": choices,
            "usage": {
                "prompt_tokens": before,
                "completion_tokens": made,
                "total_tokens": before + made,
            },
        }

    def events(self, answer: Object, asked: Asked) -> Iterator[tuple[str, Any]]:
        """Yield chunks: each choice's message, its end, and the usage if asked for."""
        head = {**answer, "object": "chat.completion.chunk"}
        usage = head.pop("usage")
        for choice in answer["choices"]:
            delta = {name: value for name, value in choice["message"].items() if value is not None}
            if calls := delta.get("tool_calls"):
                delta["tool_calls"] = [{"index": at, **call} for at, call in enumerate(calls)]
            part = {**choice, "delta": delta, "finish_reason": None}
            del part["message"]
            yield "", {**head, "choices": [part]}
            end = {"index": choice["index"], "delta": {}, "finish_reason": choice["finish_reason"]}
            yield "", {**head, "choices": [end]}
        if table(asked.body, "stream_options").get("include_usage"):
            yield "", {**head, "choices": [], "usage": usage}
        yield "", "[DONE]"

    def error(self, status: int, text: str) -> Object:
        """Return an error as OpenAI's clients read it."""
        kind = ERRORS.get(status, "invalid_request_error")
        return {"error": {"message": text, "type": kind, "param": None, "code": None}}


def token_logprobs(reply: Reply, decode: Callable[[Sequence[int]], str]) -> list[Object]:
    """Return the tokens' texts and log-probabilities; a token may be half of a character."""
    made = []
    for token, logprob in zip(reply.ids.tolist(), reply.logprobs.tolist(), strict=True):
        text = decode([token])
        made.append(
            {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
        )
    return made
