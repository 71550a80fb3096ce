"""A real server on a free port in a thread of this process, over a stub engine and the embedded model's tokenizer."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import httpx
import msgspec
import openai

from paths import PYDOC
from quire.core.config import EngineConfig, flat_config
from quire.engine.frontend.async_engine import AsyncEngine
from quire.server.app import create_app
from quire.server.draining import DrainingServer, uvicorn_config
from quire.server.http.address import bind
from quire.server.models.start import server_of_one
from quire.server.server_options import ServerOptions
from quire.server.service import Service
from quire.text.template import ChatTemplate
from quire.text.tokenizer import Tokenizer
from stub_engine import StubEngine

FOLDER = PYDOC


@cache
def text_tools() -> tuple[Tokenizer, ChatTemplate]:
    """The embedded model's tokenizer and chat template."""
    tokenizer = Tokenizer.from_folder(FOLDER)
    template = ChatTemplate.from_folder(FOLDER, tokenizer)
    assert template is not None
    return tokenizer, template


def wait_until(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    """Fail unless `condition` comes true in time."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the condition did not come true in time"
        time.sleep(0.005)


class LiveServer:
    """What a test talks to. `tools`: another tokenizer and template than the embedded model's."""

    def __init__(
        self,
        stub: StubEngine,
        options: ServerOptions,
        config: EngineConfig | None = None,
        tools: tuple[Tokenizer, ChatTemplate] | None = None,
    ) -> None:
        self.stub = stub
        self.tokenizer, self.template = tools or text_tools()
        self.engine = AsyncEngine(stub)
        self.service = Service(self.engine, self.tokenizer, self.template, options, config or EngineConfig())
        self.state = server_of_one(self.service)
        self.app = create_app(self.state)
        self._socket = bind(options)
        self.port: int = self._socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.server = DrainingServer(uvicorn_config(self.app, options), self.state)
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [self._socket]}, daemon=True)
        self.http = httpx.Client(base_url=self.url, timeout=10.0)

    def start(self) -> None:
        """Return once requests are answered."""
        self.thread.start()
        wait_until(lambda: self.server.started)

    def stop(self) -> None:
        """Stop at once."""
        self.http.close()
        self.server.should_exit = True
        self.server.config.timeout_graceful_shutdown = 0
        self.thread.join(5.0)
        assert not self.thread.is_alive()
        self.engine.close()
        self._socket.close()

    def openai(self, key: str = "none") -> openai.OpenAI:
        """OpenAI's own client, without retries."""
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=10.0)

    def post(self, path: str, body: dict[str, Any], **more: Any) -> httpx.Response:
        """POST a JSON body."""
        return self.http.post(path, json=body, **more)

    def complete(self, prompt: Any = "hello", **fields: Any) -> dict[str, Any]:
        """A completion that must succeed."""
        reply = self.post("/v1/completions", {"prompt": prompt, **fields})
        assert reply.status_code == 200, reply.text
        return msgspec.json.decode(reply.content, type=dict[str, Any])

    def chat(self, text: str = "hello", **fields: Any) -> dict[str, Any]:
        """A chat completion that must succeed."""
        reply = self.post("/v1/chat/completions", {"messages": [{"role": "user", "content": text}], **fields})
        assert reply.status_code == 200, reply.text
        return msgspec.json.decode(reply.content, type=dict[str, Any])

    def events(self, path: str, body: dict[str, Any]) -> tuple[list[dict[str, Any]], bool]:
        """The JSON events of a stream, and whether it ended with [DONE]."""
        reply = self.post(path, body | {"stream": True})
        assert reply.status_code == 200, reply.text
        assert reply.headers["content-type"].startswith("text/event-stream")
        data = [line[6:] for line in reply.text.split("\n") if line.startswith("data: ")]
        done = data[-1] == "[DONE]"
        return [msgspec.json.decode(item) for item in data[: -1 if done else None]], done


@contextlib.contextmanager
def live(
    stub: StubEngine | None = None, tools: tuple[Tokenizer, ChatTemplate] | None = None, **options: Any
) -> Iterator[LiveServer]:
    """A running server, stopped at the end; `options` are its own and its engine's."""
    own = {name: options.pop(name) for name in ServerOptions.__struct_fields__ if name in options}
    server = LiveServer(stub or StubEngine(), ServerOptions(port=0, **own), flat_config(**options), tools)
    server.start()
    try:
        yield server
    finally:
        server.stop()


LONG: dict[str, Any] = {"prompt": "x", "max_tokens": 200}


def open_stream(server: LiveServer, body: dict[str, Any] | None = None, window: int = 65536) -> socket.socket:
    """A stream on a socket of its own, started and left unread."""
    data = httpx.Request("POST", server.url, json=(body or LONG) | {"stream": True}).read()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, window)
    sock.settimeout(10)
    sock.connect(("127.0.0.1", server.port))
    sock.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    return sock


def read_all(sock: socket.socket) -> str:
    """Everything until the server closes the connection, or the response is complete."""
    data = b""
    while not data.endswith(b"0\r\n\r\n"):
        chunk = sock.recv(65536)
        if not chunk:
            break
        data += chunk
    sock.close()
    return data.decode()
