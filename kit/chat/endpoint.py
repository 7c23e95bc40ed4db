"""A server in front of the model, for clients of OpenAI and Anthropic as they are.

    client -- POST, key --> Endpoint -- the key's Door --> Conversation.chat --> the next turn

It listens on this machine alone, in a thread of the process in which the episodes are played. Each
episode has a key that cannot be guessed, and that ends with it.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

import attrs

from hybridflow.core.errors import DataError, HybridFlowError
from hybridflow.core.values.text import shorten
from hybridflow.kit.chat.anthropic_messages import AnthropicMessages
from hybridflow.kit.chat.api import Api, Asked, Object
from hybridflow.kit.chat.chat_completions import ChatCompletions
from hybridflow.kit.chat.conversation import (
    AgentError,
    EpisodeOver,
    Reply,
    TooManyCalls,
)
from hybridflow.kit.chat.rendering import Renderer
from hybridflow.kit.chat.responses import Responses

log = logging.getLogger(__name__)
ADDRESS = "127.0.0.1"
APIS: tuple[Api, ...] = (ChatCompletions(), Responses(), AnthropicMessages())
LARGEST = 32 * 2**20
"""Bytes of a request."""
REMEMBERED = 1_000
"""Calls and answers of a key that later ones may refer to."""
CONNECTIONS = 32
"""Connections at a time by a further socket."""
AGAIN_S = 0.1
"""Seconds before the next try to accept a connection, where one has failed."""
START_S = 30.0
"""Seconds that the server may take to start."""


class Chats(Protocol):
    """What answers calls: a Conversation, or many of them."""

    renderer: Renderer

    def several(
        self,
        count: int,
        messages: Sequence[Any],
        tools: Sequence[Any] = (),
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
    ) -> list[Future[Reply]]:
        """As Conversation.several."""


class Door:
    """One key at the endpoint, an episode's for one."""

    def __init__(self, chats: Chats):
        self.chats = chats
        self.earlier: dict[str, Sequence[Object]] = {}
        """Id of an answer -> the messages that a call which names it goes on from."""
        self.calls: dict[bytes, _Call] = {}
        """The last call of each request, by the digest of its body; the newest REMEMBERED ones."""

    def ask(self, asked: Asked, body: bytes, again: bool) -> _Call:
        """Ask, or return the call that the same request has made before.

        Clients send a request again after their own time limit, which is not another question:
        `again` where they say so. Others are believed to where the client had left.
        """
        digest = hashlib.sha256(body).digest()
        call = self.calls.get(digest)
        if call is None or not (again or call.left):
            # A question that is refused is no call that could be asked for again.
            self.calls.pop(digest, None)
            answers = self.chats.several(
                asked.samples, asked.messages, asked.tools, asked.max_tokens, asked.stop
            )
            call = self.calls[digest] = _Call(answers)
            _forget_old(self.calls)
        call.left = False
        return call


def _forget_old(held: dict[Any, Any]) -> None:
    while len(held) > REMEMBERED:
        del held[next(iter(held))]


@attrs.define(eq=False)
class _Call:
    """A question to the model."""

    answers: Sequence[Future[Reply]]
    left: bool = False
    """Whether its client did not wait for the answers."""


class Endpoint:
    """The server of one process."""

    def __init__(self, port: int = 0) -> None:
        """Start it, with port 0 at a free one.

        Raises HybridFlowError where its packages are missing, or the port is taken.
        """
        try:
            import uvicorn
            from starlette.applications import Starlette
            from starlette.routing import Route
        except ImportError as error:
            raise HybridFlowError(
                f"an endpoint for agents needs {error.name}; pip install 'hybridflow[agents]'"
            ) from error
        self._doors: dict[str, Door] = {}
        self._said: set[str] = set()
        """Fields of which it was said that they are not used."""
        routes = [Route(api.path, _Handler(self, api), methods=["POST"]) for api in APIS]
        routes.append(Route("/v1/models", self._models))
        app = Starlette(routes=routes, exception_handlers={404: _not_here, 405: _not_here})
        try:
            listener = socket.create_server((ADDRESS, port), backlog=1024)
        except OSError as error:
            raise HybridFlowError(f"port {port} cannot be served: {error.strerror}") from error
        self.port: int = listener.getsockname()[1]
        config = uvicorn.Config(
            app, log_config=None, access_log=False, lifespan="off", ws="none", loop="asyncio"
        )
        server = uvicorn.Server(config)
        self._server = server
        self._loop = asyncio.new_event_loop()
        serve = threading.Thread(
            target=self._loop.run_until_complete,
            args=(server.serve([listener]),),
            name="agents' endpoint",
            daemon=True,
        )
        serve.start()
        deadline = time.monotonic() + START_S
        while not server.started:
            if not serve.is_alive() or time.monotonic() > deadline:
                raise HybridFlowError(f"the endpoint for agents on port {self.port} did not start")
            time.sleep(0.005)

    @property
    def url(self) -> str:
        """Its address, without the version in front of each path."""
        return f"http://{ADDRESS}:{self.port}"

    def open(self, chats: Chats) -> str:
        """Return a new key, by which clients reach a conversation, or several."""
        key = f"sk-{secrets.token_urlsafe(32)}"
        self._doors[key] = Door(chats)
        return key

    def variables(self, key: str, url: str | None = None) -> dict[str, str]:
        """Return environment variables by which the clients of OpenAI and Anthropic find it.

        url: its address for them, where that is another one.
        """
        url = url or self.url
        return {
            "OPENAI_BASE_URL": f"{url}/v1",
            "OPENAI_API_KEY": key,
            "ANTHROPIC_BASE_URL": url,
            "ANTHROPIC_API_KEY": key,
        }

    def serve(self, door: socket.socket) -> Callable[[], object]:
        """Serve a further listening socket too; return what ends that, by any thread.

        It has CONNECTIONS at a time: the next one waits, so that nobody who is behind it can take
        more of this process's descriptors.
        """
        door.setblocking(False)
        served = asyncio.run_coroutine_threadsafe(_serve(door, self._server), self._loop)

        return served.cancel

    def close(self, key: str) -> None:
        """End a key; safe to call twice."""
        self._doors.pop(key, None)

    def door(self, headers: Mapping[str, str]) -> Door | None:
        """Return the door of a request's key, as OpenAI's or Anthropic's clients send it."""
        scheme, _, key = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            key = ""
        return self._doors.get(headers.get("x-api-key") or key.strip())

    def say_unused(self, fields: Mapping[str, Any]) -> None:
        """Say once of each field that a client has sent that nothing comes of it."""
        for name, value in fields.items():
            if name not in self._said:
                self._said.add(name)
                log.warning(
                    "an agent asks for %s = %.60r, which is not used: tokens are sampled by the "
                    "run's own settings ([sampling])",
                    name,
                    value,
                )

    async def _models(self, request: Any) -> Any:
        """Answer with the one model that there is."""
        from starlette.responses import JSONResponse

        if self.door(request.headers) is None:
            return JSONResponse(APIS[0].error(401, NO_KEY), 401)
        model = {"id": "policy", "object": "model", "created": 0, "owned_by": "hybridflow"}
        return JSONResponse({"object": "list", "data": [model]})


NO_KEY = "this key is of no episode that is played here; an episode's key ends with it"


async def _serve(door: socket.socket, server: Any) -> None:
    """Serve a listening socket until this is cancelled, with its connections."""
    loop = asyncio.get_running_loop()
    free = asyncio.Semaphore(CONNECTIONS)
    protocols: set[asyncio.Protocol] = set()

    class Counted(server.config.http_protocol_class):  # type: ignore[misc]
        """A connection that gives its place back."""

        def connection_lost(self, error: Exception | None) -> None:
            protocols.discard(self)
            free.release()
            super().connection_lost(error)

    def protocol() -> asyncio.Protocol:
        made: asyncio.Protocol = Counted(
            config=server.config, server_state=server.server_state, app_state={}
        )
        protocols.add(made)
        return made

    with door:
        try:
            while True:
                await free.acquire()
                try:
                    connection, _ = await loop.sock_accept(door)
                except OSError:  # of that connection, or this process has no descriptor left
                    free.release()
                    await asyncio.sleep(AGAIN_S)
                    continue
                await loop.connect_accepted_socket(protocol, connection)
        finally:
            for one in protocols:
                one.transport.abort()  # type: ignore[attr-defined]


class _Refused(Exception):
    """A request that is answered with an error."""

    def __init__(self, status: int, text: str):
        super().__init__(text)
        self.status = status


class _Handler:
    """Answers the requests of one format, as an ASGI application."""

    def __init__(self, endpoint: Endpoint, api: Api):
        self.endpoint = endpoint
        self.api = api

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        from starlette.requests import Request
        from starlette.responses import Response

        request = Request(scope, receive)
        kind = "application/json"
        try:
            asked, answer = await self._answered(request)
            status, content = 200, json.dumps(answer)
            if asked.body.get("stream"):
                kind = "text/event-stream"
                content = "".join(_lines(self.api.events(answer, asked)))
        except _Refused as error:
            status, content = error.status, json.dumps(self.api.error(error.status, str(error)))
        except _ClientIsGone:
            return
        await Response(content, status, media_type=kind)(scope, receive, send)

    async def _answered(self, request: Any) -> tuple[Asked, Object]:
        """Return what is asked, and the answer. Raises _Refused, _ClientIsGone."""
        door = self.endpoint.door(request.headers)
        if door is None:
            raise _Refused(401, NO_KEY)
        raw = await _body(request)
        try:
            body = json.loads(raw)
            if not isinstance(body, dict):
                raise AgentError(f"the body is {shorten(str(body))}; send a JSON object")
            asked = self.api.read(body, door.earlier)
        except (AgentError, DataError) as error:
            raise _Refused(400, str(error)) from error
        except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
            raise _Refused(400, f"the request cannot be read: {error!r}") from error

        self.endpoint.say_unused(self.api.unused(body))
        try:
            # A header of OpenAI's and Anthropic's clients.
            again = request.headers.get("x-stainless-retry-count", "0") != "0"
            call = door.ask(asked, raw, again)
            replies = await _unless_gone(request, call)
        except EpisodeOver as error:
            raise _Refused(410, str(error)) from error
        except TooManyCalls as error:
            raise _Refused(429, str(error)) from error
        except (AgentError, DataError) as error:
            raise _Refused(400, str(error)) from error
        made = self.api.write(asked, replies, door.chats.renderer.tokenizer.decode)
        if asked.goes_on_from is not None and body.get("store") is not False:
            door.earlier[made["id"]] = [*asked.goes_on_from, replies[0].message]
            _forget_old(door.earlier)
        return asked, made


class _ClientIsGone(Exception):
    """Nobody waits for the answer any more."""


async def _unless_gone(request: Any, call: _Call) -> Sequence[Reply]:
    """Wait for the answers. Raises _ClientIsGone; they come all the same."""
    waits = asyncio.gather(*map(asyncio.wrap_future, call.answers))
    gone = asyncio.ensure_future(_disconnected(request))
    both: set[asyncio.Future[Any]] = {waits, gone}
    await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
    if gone.done():
        if not waits.cancel():
            waits.exception()  # has been seen: it would be logged
        call.left = True
        raise _ClientIsGone
    gone.cancel()
    return waits.result()


async def _disconnected(request: Any) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _body(request: Any) -> bytes:
    """Return a request's body. Raises _Refused for one that is too large."""
    parts, length = [], 0
    async for part in request.stream():
        parts.append(part)
        length += len(part)
        if length > LARGEST:
            raise _Refused(413, f"a request has at most {LARGEST >> 20} MiB")
    return b"".join(parts)


def _lines(events: Iterator[tuple[str, Any]]) -> Iterator[str]:
    """Yield server-sent events."""
    for name, data in events:
        if name:
            yield f"event: {name}\n"
        text = data if isinstance(data, str) else json.dumps(data)
        yield f"data: {text}\n\n"


async def _not_here(request: Any, error: Any) -> Any:
    from starlette.responses import JSONResponse

    paths = ", ".join(f"POST {api.path}" for api in APIS)
    text = f"{request.method} {request.url.path} is not here; there are {paths}, GET /v1/models"
    return JSONResponse(APIS[0].error(404, text), 404)


_endpoint: Endpoint | None = None
_lock = threading.Lock()


def endpoint() -> Endpoint:
    """Return this process's endpoint, which the first call starts."""
    global _endpoint
    with _lock:
        if _endpoint is None:
            _endpoint = Endpoint()
        return _endpoint
