"""What the endpoint's formats have in common: from a client's JSON to a call of the model and back.

read     the body -> Asked: messages and tools in the form of OpenAI's chat completions
write    Replies  -> the body of the answer
events   the same as a stream's events, in one piece each
"""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import attrs

from hybridflow.core.values.text import shorten
from hybridflow.kit.chat.conversation import AgentError, Reply

Object = dict[str, Any]
"""A JSON object."""
HARMLESS = frozenset(
    {
        "model", "stream", "stream_options", "user", "metadata", "store", "service_tier",
        "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "cache_control",
    }
)  # fmt: skip
"""Fields that say how an answer comes, and to whom, and change nothing of what it says."""


@attrs.frozen
class Asked:
    """One call of a client."""

    body: Mapping[str, Any]
    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Object] = ()
    max_tokens: int | None = None
    stop: Sequence[str] = ()
    samples: int = 1
    """Number of answers."""
    goes_on_from: Sequence[Object] | None = None
    """The messages to which a later call can refer by the answer's id; None where none can."""

    @property
    def model(self) -> str:
        """The name that the client has for the model, which it gets back."""
        return str(self.body.get("model", "policy"))


class Api(ABC):
    """One format of an endpoint."""

    path: ClassVar[str]
    fields: ClassVar[frozenset[str]]
    """The fields of a body that are read, beside HARMLESS."""
    usual: ClassVar[Mapping[str, Sequence[Any]]] = {}
    """Other field -> the values by which it asks for nothing."""

    @abstractmethod
    def read(self, body: Mapping[str, Any], earlier: Mapping[str, Sequence[Object]]) -> Asked:
        """Return what is asked. Raises AgentError, or DataError, where that cannot be.

        earlier: the messages up to each answer of the episode, by the answer's id.
        """

    @abstractmethod
    def write(
        self, asked: Asked, replies: Sequence[Reply], decode: Callable[[Sequence[int]], str]
    ) -> Object:
        """Return the answer of `samples` replies; decode: from tokens to text."""

    @abstractmethod
    def events(self, answer: Object, asked: Asked) -> Iterator[tuple[str, Any]]:
        """Yield (name or "", data) of the events by which an answer is streamed."""

    @abstractmethod
    def error(self, status: int, text: str) -> Object:
        """Return the body of an error."""

    def unused(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields that ask for what only the run's settings decide."""
        return {
            name: value
            for name, value in body.items()
            if name not in self.fields | HARMLESS
            and value is not None
            and value not in self.usual.get(name, ())
        }


def new_id(kind: str) -> str:
    """Return an id as the formats have it: resp_..., msg_..."""
    return f"{kind}{uuid.uuid4().hex}"


def listed(body: Mapping[str, Any], name: str) -> list[Any]:
    """Return a field that is a list of objects; none where it is missing. Raises AgentError."""
    found = body.get(name) or []
    if not isinstance(found, list) or not all(isinstance(one, Mapping) for one in found):
        raise AgentError(f"{name} is {shorten(str(found))}; send a list of objects")
    return found


def count(body: Mapping[str, Any], *names: str) -> int | None:
    """Return the first of these fields that is there, a number from 1 on. Raises AgentError."""
    for name in names:
        if (value := body.get(name)) is not None:
            if not isinstance(value, int) or value < 1:
                raise AgentError(f"{name} is {value!r}; ask for 1 at least")
            return value
    return None


def table(body: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a field that is an object; an empty one where it is missing. Raises AgentError."""
    found = body.get(name) or {}
    if not isinstance(found, Mapping):
        raise AgentError(f"{name} is {shorten(str(found))}; send an object")
    return found


def texts(body: Mapping[str, Any], name: str) -> list[str]:
    """Return a field that is a text or several. Raises AgentError."""
    found = body.get(name) or []
    every = [found] if isinstance(found, str) else found
    if not isinstance(every, list) or not all(isinstance(one, str) and one for one in every):
        raise AgentError(f"{name} is {shorten(str(found))}; send texts that are not empty")
    return every


def refuse(body: Mapping[str, Any], **allowed: Sequence[Any]) -> None:
    """Raise AgentError for a field with another value than these, which cannot be had here."""
    for name, values in allowed.items():
        value = body.get(name)
        if value is not None and value not in values:
            raise AgentError(f"{name} is {value!r:.60}, which this endpoint does not have")
