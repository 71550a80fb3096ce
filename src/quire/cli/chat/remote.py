"""A conversation with the model of a running server that speaks OpenAI's API."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import Generator
from typing import Any

from quire.bench.http import Client, HttpFailure
from quire.cli.chat.answer import Answer
from quire.cli.chat.backend import Stopped
from quire.cli.chat.conversation import Conversation
from quire.core.errors import BadRequest, ConfigError

LOOK_SECONDS = 0.1
"""How often it is looked whether the answer is to end early."""


class RemoteChat:
    """Answers by /v1/chat/completions of a server (`backend.ChatBackend`).

    `model`: the name that requests give; "" takes the first one that /v1/models lists. Raises `ConfigError` for an
    address that is none, `Unavailable` where nothing answers, and `HttpFailure` for what the server refuses.
    """

    def __init__(self, url: str, api_key: str | None = None, model: str = "") -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        if "://" not in self.url:
            self.url = f"http://{self.url}"
        try:
            self._client = Client(self.url, api_key)
        except ConfigError:
            raise ConfigError(f"--server {url!r} is not like http://127.0.0.1:8000", param="server") from None
        self._models = [str(each["id"]) for each in asyncio.run(self._client.get("/v1/models"))["data"]]
        if model and model not in self._models:
            raise ConfigError(
                f"{self.url} has no model {model!r}; it has {', '.join(self._models)}. A prompt comes behind the model",
                param="model",
            )
        if not self._models:
            raise ConfigError(f"{self.url} lists no model", param="server")
        self.name = model or self._models[0]
        self.timings = ""

    @property
    def facts(self) -> list[str]:
        """The server, and its other models."""
        others = [name for name in self._models if name != self.name]
        more = [f"other models of the server: {', '.join(others)} (--model NAME)"] if others else []
        return [f"served by {self.url}", *more]

    def check_image(self) -> None:
        """Refuse nothing: the server knows, and says so."""

    def tools_note(self) -> str:
        """Say nothing: the server knows."""
        return ""

    def answer(self, conversation: Conversation, stopped: Stopped, answer: Answer) -> Generator[str, None, None]:
        """Stream the answer; what the server refuses is a `BadRequest` with its words."""
        body: dict[str, Any] = {
            "model": self.name,
            "messages": conversation.for_server(),
            "stream": True,
            "stream_options": {"include_usage": True},
            **conversation.settings,
        }
        if conversation.tools:
            body["tools"] = conversation.tools
        self.timings, events = "", _Events(answer)
        stream = _Stream(self._client, body)
        try:
            while (event := stream.next(stopped)) is not None:
                yield events.shown(event)
            yield answer.end()
            self.timings = events.timings()
        except HttpFailure as error:
            raise BadRequest(error.message) from None
        finally:
            stream.close()


class _Events:
    """Reads the events of an answer into `answer`, with the usage and the times of tokens."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self.usage: dict[str, Any] = {}
        self.sent, self.first, self.last = time.perf_counter(), 0.0, 0.0

    def shown(self, event: dict[str, Any]) -> str:
        """What is shown of an event."""
        self.usage = event.get("usage") or self.usage
        if not event.get("choices"):
            return ""
        delta = event["choices"][0].get("delta") or {}
        for call in delta.get("tool_calls") or ():
            function = call.get("function") or {}
            self._answer.add_call(
                call.get("index", 0), call.get("id") or "", function.get("name") or "", function.get("arguments") or ""
            )
        thought = delta.get("reasoning_content") or delta.get("reasoning") or ""
        text = delta.get("content") or ""
        if thought or text:
            self.last = time.perf_counter()
            self.first = self.first or self.last
        return self._answer.add_thought(thought) + self._answer.add_content(text)

    def timings(self) -> str:
        """One line, as that of a local model."""
        if not self.first:
            return ""
        written = int(self.usage.get("completion_tokens") or 0)
        read = int(self.usage.get("prompt_tokens") or 0)
        speed = (written - 1) / (self.last - self.first) if self.last > self.first and written > 1 else 0.0
        return (
            f"[{read} prompt tokens, {written} written, first after {1e3 * (self.first - self.sent):.0f} ms, "
            f"then {speed:.0f} tokens/s, {self.last - self.sent:.2f} s in all]"
        )


class _Stream:
    """The events of one request, read in a thread so that Ctrl-C ends it at once."""

    def __init__(self, client: Client, body: dict[str, Any]) -> None:
        self._events: queue.Queue[dict[str, Any] | Exception | None] = queue.Queue()
        self._loop = asyncio.new_event_loop()
        self._job = self._loop.create_task(self._read(client, body))
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    async def _read(self, client: Client, body: dict[str, Any]) -> None:
        async with contextlib.aclosing(client.events("/v1/chat/completions", body)) as events:  # type: ignore[type-var]
            async for event in events:
                self._events.put(event)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._job)
            self._events.put(None)
        except asyncio.CancelledError:
            self._events.put(None)
        except Exception as error:  # `next` raises it
            self._events.put(error)
        finally:
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()

    def next(self, stopped: Stopped) -> dict[str, Any] | None:
        """The next event; None at the end, and as soon as `stopped`. Raises what the request was refused by."""
        while not stopped():
            try:
                found = self._events.get(timeout=LOOK_SECONDS)
            except queue.Empty:
                continue
            if isinstance(found, Exception):
                raise found
            return found
        return None

    def close(self) -> None:
        """End the request, which the server then gives up."""
        with contextlib.suppress(RuntimeError):  # it has ended already
            self._loop.call_soon_threadsafe(self._job.cancel)
        self._thread.join(timeout=5.0)
