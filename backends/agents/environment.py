"""The environment "agent": a function that chats with the model, and returns its reward.

    reset -> the function begins ... model.chat -> its tokens are reset's answer
    step  -> the model's turn is chat's result ... model.chat -> its tokens are step's answer
                                               ... return     -> the episode is done

So an agent has the deadlines, retries and outcomes of every environment.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import math
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from typing import Any

import attrs

from hybridflow.core.contracts.environment import Answer, Environment, Start, Turn
from hybridflow.core.contracts.tokenizer import Tokenizer
from hybridflow.core.errors import ConfigError
from hybridflow.core.plugins import registry
from hybridflow.kit.chat.conversation import AgentError, Conversation, EpisodeOver, Reply
from hybridflow.kit.chat.endpoint import endpoint
from hybridflow.kit.chat.parsing import FORMATS
from hybridflow.kit.chat.rendering import ChatRenderer, Message, PlainRenderer, Renderer
from hybridflow.kit.sandbox.process import Limits
from hybridflow.kit.sandbox.session import DOOR_URL, LIMITS, Sandbox

log = logging.getLogger(__name__)
THREAD = "agent"
"""Name of the threads of functions that are not `async`."""


class Reached:
    """Where other programs reach the model, in their own clients' formats."""

    def __init__(self, conversation: Conversation):
        self._conversation = conversation
        self._key: str | None = None
        self._sandboxes: list[Sandbox] = []
        self._lock = threading.Lock()
        self._over = False

    @property
    def url(self) -> str:
        """The base URL for clients of OpenAI, on this machine alone.

        Raises HybridFlowError where the packages of the extra `agents` are missing.
        """
        return f"{endpoint().url}/v1"

    @property
    def key(self) -> str:
        """The episode's API key, which ends with it."""
        with self._lock:
            if self._over:
                raise EpisodeOver("the episode has ended")
            if self._key is None:
                self._key = endpoint().open(self._conversation)
            return self._key

    @property
    def keep(self) -> int | None:
        """Answer.keep of the model's last turn."""
        return self._conversation.keep

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables by which the clients of OpenAI and Anthropic find it."""
        return endpoint().variables(self.key)

    def sandbox(
        self,
        folders: Mapping[str, str | os.PathLike[str]] | None = None,
        limits: Limits = LIMITS,
        variables: Mapping[str, str] | None = None,
    ) -> Sandbox:
        """Return a sandbox whose one door is the model, by the same variables; see Sandbox.

        It ends with the episode. Its methods wait: in an `async` function call them by
        `asyncio.to_thread`. Raises SandboxError.
        """
        reached = endpoint().variables(self.key, DOOR_URL)
        made = Sandbox(folders, limits, {**reached, **(variables or {})}, endpoint().serve)
        with self._lock:
            if not self._over:
                self._sandboxes.append(made)
                return made
        made.close()
        raise EpisodeOver("the episode has ended")

    def end(self) -> None:
        """End the key and the sandboxes, if there are any."""
        with self._lock:
            self._over = True
            key, self._key = self._key, None
        if key is not None:
            endpoint().close(key)
        for one in self._sandboxes:
            one.close()


class Model(Reached):
    """The model as an `async` agent has it."""

    async def chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] = (),
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
    ) -> Reply:
        """Have the model answer; `messages` are all of the conversation, its own answers included.

        tools: as in OpenAI's chat completions; max_tokens: limit of this answer, below the run's;
        stop: texts that end it, of which it has none. Raises AgentError, and EpisodeOver where a
        limit of the episode is reached.
        """
        asked = self._conversation.chat(messages, tools, max_tokens, stop)
        return await asyncio.wrap_future(asked)


class BlockingModel(Reached):
    """The model as an agent has it that is no `async` function, in a thread of its own."""

    def chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] = (),
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
    ) -> Reply:
        """Have the model answer, and wait for that; see Model.chat."""
        return self._conversation.chat(messages, tools, max_tokens, stop).result()


class AgentEnvironment(Environment):
    """One episode of an agent: `function(model, row)` plays it and returns its reward, or None.

    row: the data's fields, with `prompt`, the text of the row's prompt. Options:

    function: "package.module:function", `async` or not.
    chat: "template", the tokenizer's chat template; or "plain", contents one after the other.
    tools: the form of the model's calls of tools: "hermes", "json" or "none".
    template: further values for the chat template, as { enable_thinking = false }.
    """

    own_prompt = True

    def __init__(
        self,
        function: str = "",
        chat: str = "template",
        tools: str = "hermes",
        template: Mapping[str, Any] | None = None,
    ):
        if chat not in ("template", "plain"):
            raise ConfigError(
                f'environment.options.chat is {chat!r}; set "template" or "plain" (contents alone)'
            )
        if tools not in FORMATS:
            raise ConfigError(
                f"environment.options.tools is {tools!r}; set one of {', '.join(FORMATS)}"
            )
        if not function:
            raise ConfigError(
                'environment "agent" needs options.function = "my_agent:solve", a function of '
                "(model, row) that returns a reward"
            )
        found = registry().get("environment", function)
        if inspect.isclass(found) or not callable(found):
            raise ConfigError(
                f"environment.options.function is {function!r}, which is {found!r}; it must be a "
                "function of (model, row)"
            )
        try:
            inspect.signature(found).bind(None, {})
        except TypeError as error:
            raise ConfigError(
                f"environment.options.function: {function}{inspect.signature(found)} is not called "
                f"with (model, row): {error}"
            ) from error
        self.function = found
        self.chat = chat
        self.tools = tools
        self.template = dict(template or {})
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._events: asyncio.Queue[Answer | BaseException]
        """What the agent does, in its order: it asks, is done, or has raised."""
        self._model: Model | BlockingModel | None = None
        self._asked: Future[Turn] | None = None
        self._over = False
        self._lock = threading.Lock()

    def check(self, tokenizer: Tokenizer) -> None:
        """Show that the tokenizer's template can be followed (rendering.py)."""
        if remark := self._renderer(tokenizer).check('set environment.options.chat = "plain"'):
            log.warning("%s", remark)

    def _renderer(self, tokenizer: Tokenizer) -> Renderer:
        if self.chat == "plain":
            return PlainRenderer(tokenizer)
        return ChatRenderer(tokenizer, self.template)

    async def reset(self, start: Start) -> Answer:  # type: ignore[override]
        """Begin the agent; return its first tokens."""
        assert start.tokenizer is not None
        conversation = Conversation(self._renderer(start.tokenizer), self.tools, self._ask)
        row = {"prompt": start.prompt, **start.meta}
        self._loop = asyncio.get_running_loop()
        self._events = asyncio.Queue()
        is_async = inspect.iscoroutinefunction(self.function)
        self._model = Model(conversation) if is_async else BlockingModel(conversation)
        self._task = self._loop.create_task(self._play(self._model, row))
        return await self._next()

    async def step(self, turn: Turn) -> Answer:  # type: ignore[override]
        """Give the agent the turn that it has asked for; return what it asks for next."""
        assert self._asked is not None
        self._asked.set_result(turn)
        return await self._next()

    def close(self) -> None:
        """End the agent and its key: its calls raise EpisodeOver, an `async` one is cancelled."""
        with self._lock:
            self._over = True
            asked, loop, task = self._asked, self._loop, self._task
        if self._model is not None:
            self._model.end()
        if asked is not None:
            with contextlib.suppress(InvalidStateError):  # it has been answered
                asked.set_exception(EpisodeOver("the episode has ended"))
        if loop is not None and task is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended, and the agent with it
                loop.call_soon_threadsafe(task.cancel)

    async def _next(self) -> Answer:
        event = await self._events.get()
        if isinstance(event, BaseException):
            raise event
        # An agent may have ended while a turn was made, which is answered by that.
        if event.done and self._model is not None:
            return attrs.evolve(event, keep=self._model.keep)
        return event

    def _ask(self, answer: Answer) -> Future[Turn]:
        """Ask for a turn of the model after an answer's tokens, from any thread."""
        assert self._loop is not None
        asked: Future[Turn] = Future()
        with self._lock:
            if self._over:
                raise EpisodeOver("the episode has ended")
            self._asked = asked
            self._loop.call_soon_threadsafe(self._events.put_nowait, answer)
        return asked

    async def _play(self, model: Model | BlockingModel, row: Mapping[str, Any]) -> None:
        """Run the agent to its end."""
        try:
            if isinstance(model, Model):
                reward = await self.function(model, row)
            else:
                reward = await _in_thread(self.function, model, row)
            self._events.put_nowait(Answer(reward=_reward(reward), done=True))
        except asyncio.CancelledError:
            self._events.put_nowait(AgentError("the agent was cancelled"))
            raise
        except BaseException as error:  # one that calls sys.exit must not be waited for
            self._events.put_nowait(error)


def _reward(value: Any) -> float:
    """Return what a function has returned as a reward. Raises TypeError where it is none."""
    if value is None:
        return 0.0
    if isinstance(value, (int, float)) and math.isfinite(value):
        return float(value)
    raise TypeError(f"the agent returned {value!r:.80}; return a finite number, or None")


async def _in_thread(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function in a thread of its own; one that never ends holds up nobody."""
    done: Future[tuple[Any, BaseException | None]] = Future()
    done.set_running_or_notify_cancel()

    def work() -> None:
        try:
            done.set_result((function(*args), None))
        except BaseException as error:  # as a value: a loop takes no StopIteration, for one
            done.set_result((None, error))

    threading.Thread(target=work, name=THREAD, daemon=True).start()
    value, error = await asyncio.wrap_future(done)
    if error is not None:
        raise error
    return value
