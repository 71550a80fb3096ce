"""Lists of models, and a server of several in a thread of this process, for tests."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgspec

from live_server import wait_until
from quire.cli.models import model_entries
from quire.core.config import EngineConfig
from quire.core.errors import EngineFailure, ModelError
from quire.core.pooling import Pooling
from quire.engine.client import AdapterChanged, EngineClient, EngineInfo, StepReport
from quire.server.draining import make_server
from quire.server.http.address import bind
from quire.server.models.entry import ModelEntry
from quire.server.models.start import StartEngine, server_of_several
from quire.server.server_options import ServerOptions
from stub_engine import StubEngine, stub_info
from tiny_model import OPTIONS


def entry(name: str, needed: int = 1, pinned: bool = False, config: EngineConfig | None = None) -> ModelEntry:
    """A model of which nothing is read."""
    return ModelEntry(
        name=name,
        config=config or EngineConfig(),
        server_options={},
        needed_bytes=needed,
        max_model_len=100,
        folder="",
        root=name,
        scheme="none",
        passport={},
        pinned=pinned,
    )


def list_of(folder: Path, names: str, **options: Any) -> list[ModelEntry]:
    """One tiny model under several names."""
    return model_entries(OPTIONS | options | {"model": [f"{name}={folder}" for name in names]})


class Stub(StubEngine):
    """Has adapters, as far as their names go."""

    def __init__(self, info: EngineInfo, step_seconds: float) -> None:
        super().__init__(info, step_seconds)
        self._changes: list[AdapterChanged] = []

    def change_adapter(self, name: str, folder: str) -> None:
        """Take a name, or drop it."""
        others = tuple(each for each in self.info.adapters if each != name)
        self.info = msgspec.structs.replace(self.info, adapters=(*others, name) if folder else others)
        self._changes.append(AdapterChanged(name, self.info.adapters))

    def poll(self, timeout: float) -> StepReport | None:
        """What became of changes, and steps."""
        if self._changes:
            return StepReport([], self._stats, (self._changes.pop(),))
        return super().poll(timeout)


@dataclass
class Stubs:
    """Starts stub engines, of which `engines` has the latest of each model, and notes the order in `loaded`.

    Facts by which replies of a and b can be told apart: their longest sequences have 100 and 90 tokens, their
    vocabularies 260 and 261. `gates`: a model is loaded once its gate is open; `broken`: models that cannot be.
    """

    engines: dict[str, StubEngine] = field(default_factory=dict)
    loaded: list[str] = field(default_factory=list)
    step_seconds: float = 0.0
    gates: dict[str, threading.Event] = field(default_factory=dict)
    broken: set[str] = field(default_factory=set)

    def __call__(self, until: ExitStack, config: EngineConfig) -> EngineClient:
        """Start one (`StartEngine`)."""
        [name] = config.model.served_model_name
        gate, given_up = self.gates.get(name), threading.Event()
        until.callback(given_up.set)
        while gate is not None and not gate.wait(0.01):
            if given_up.is_set():
                raise EngineFailure("it was given up")
        if name in self.broken:
            raise ModelError("config.json: there is no such file")
        info = stub_info(
            folder=config.model.model,
            served_name=name,
            vocab_size=260 + (name == "b"),
            max_model_len=90 if name == "b" else 100,
            adapters=tuple(module.partition("=")[0] for module in config.lora.lora_modules),
            pooling=Pooling(refused=f"{name} makes none"),
        )
        self.engines[name] = Stub(info, self.step_seconds)
        self.loaded.append(name)
        return self.engines[name]

    def asked(self) -> str:
        """Names of the models that got requests since the last time."""
        names = "".join(name for name, engine in self.engines.items() if engine.submitted)
        for engine in self.engines.values():
            engine.submitted.clear()
        return names


class Server:
    """One that runs."""

    def __init__(self, models: Sequence[ModelEntry], start: StartEngine, options: ServerOptions) -> None:
        self.state = server_of_several(models, options, start)
        self._socket = bind(options)
        self.server = make_server(self.state)
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [self._socket]}, daemon=True)
        self.thread.start()
        wait_until(lambda: self.server.started)
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self.http = httpx.Client(base_url=self.url, timeout=120)

    def post(self, path: str, body: dict[str, Any] | None = None, **more: Any) -> httpx.Response:
        """POST a JSON body, or none."""
        return self.http.post(path, json=body, **more)

    def complete(self, model: str, **fields: Any) -> str:
        """The text of a completion that must succeed."""
        reply = self.post("/v1/completions", {"model": model, "prompt": "x", "max_tokens": 3, **fields})
        assert reply.status_code == 200, reply.text
        assert reply.json()["model"] == model
        return str(reply.json()["choices"][0]["text"])

    def states(self) -> dict[str, str]:
        """Of each model and adapter."""
        return {card["id"]: card["status"] for card in self.http.get("/v1/models").json()["data"]}

    def stop(self) -> None:
        """Stop at once."""
        self.http.close()
        self.server.should_exit = True
        self.thread.join(30)
        self._socket.close()
        assert not self.thread.is_alive()


@contextlib.contextmanager
def serving(models: Sequence[ModelEntry], start: StartEngine, **options: Any) -> Iterator[Server]:
    """A running server, stopped at the end."""
    server = Server(models, start, ServerOptions(port=0, **options))
    try:
        yield server
    finally:
        server.stop()
