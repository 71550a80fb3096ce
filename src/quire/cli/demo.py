"""`quire demo`: start the server, ask it several things at once over HTTP, stop it, and check that all of it worked."""

from __future__ import annotations

import asyncio
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from quire.cli.flags import ENGINE, option_command, to_arguments, to_engine
from quire.core.errors import EngineFailure, QuireError, Unavailable
from quire.core.machine import end_with_parent
from quire.store.names import PREFERRED
from quire.store.progress import Shown, amount

if TYPE_CHECKING:
    from quire.bench.http import Client

START_SECONDS = 120.0
ANSWER_SECONDS = 60.0
"""What an answer may pause; all of it may take six times as long, as under an emulator."""
STOP_SECONDS = 30.0
ADDRESS = re.compile(r"serving .+ on (https?://\S+)")

PULL_SECONDS = 60.0
"""What a demo waits for the download of a real model."""

QUESTIONS = (
    "What does json.dumps do?",
    "Describe os.path.join.",
    "What is math.gcd?",
    "Explain itertools.chain.",
    "What does shutil.copytree do?",
)
"""For the bundled model, which was trained on such."""
TEXTS = ("for key, value in items.items():\n    if not isinstance(", "    def __repr__(self):\n        return")
GENERAL_QUESTIONS = (
    "What is the capital of France?",
    "Explain in two sentences why the sky is blue.",
    "Write a short poem about the sea.",
    "Name three fruits, and a dish made of each.",
    "What is a language model?",
)
"""For any other model."""
GENERAL_TEXTS = ("Once upon a time there was a lighthouse keeper who", "The three laws of motion are")


@dataclass
class StreamedAnswer:
    """One streamed answer and its clock."""

    asked: str
    text: str = ""
    tokens: int = 0
    sent: float = 0.0
    chunks: list[float] = field(default_factory=list)


@option_command("demo", ENGINE)
def demo(options: dict[str, Any]) -> None:
    """Serve a model on a free port, stream several answers at once, and shut it down cleanly.

    Without a model that of the store's default, or smollm2, which is pulled, or the bundled one where it cannot be had.
    """
    options = _with_model(options)
    to_engine(options)
    command = [sys.executable, "-m", "quire", "serve", "--port", "0", *to_arguments(options)]
    print(f"$ quire {' '.join(command[3:])}")
    started = time.perf_counter()
    # A demo that is killed cannot end its server.
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, preexec_fn=end_with_parent) as server:
        try:
            url = _wait_for_address(server)
            print(f"{url} is up after {time.perf_counter() - started:.1f} s")
            bundled = options.get("model", "") in ("", "pydoc")
            _print(*asyncio.run(_ask_all(url, bundled)))
            _stop(server)
        finally:
            _end(server)
    print(f"SIGTERM: the server drained and ended with exit code 0; {time.perf_counter() - started:.1f} s in all")


def _with_model(options: dict[str, Any]) -> dict[str, Any]:
    """`options` with the model that the demo serves where none was given; says which, and why."""
    from quire.store.names import default_model
    from quire.store.pull import pull

    if "model" in options:
        return options
    if (default := default_model()) is None:
        try:
            with _Patient() as progress:
                default = pull(PREFERRED, progress)
        except QuireError as error:
            print(f"no real model can be had ({error.message})\nserving pydoc, which comes with quire and knows Python")
            return options
    print(f"serving {default.name}: {amount(default.size)}, {default.quantization}, {default.license}")
    return options | {"model": default.name}


class _Patient(Shown):
    """Progress of a download that ends where it takes too long for a demo; what came is kept for `quire pull`."""

    def begin(self, what: str, total: int | None, done: int) -> None:
        """Begin to count seconds."""
        super().begin(what, total, done)
        self._end = time.monotonic() + PULL_SECONDS

    def reach(self, done: int) -> None:
        """Give up after `PULL_SECONDS`."""
        super().reach(done)
        if time.monotonic() > self._end:
            raise Unavailable(f"{PREFERRED} was not here within {PULL_SECONDS:.0f} s; quire pull {PREFERRED} goes on")


def _wait_for_address(server: subprocess.Popen[str]) -> str:
    """The address in the server's log; `EngineFailure` with the log when it ends before that or takes too long."""
    assert server.stderr is not None
    watchdog = threading.Timer(START_SECONDS, server.kill)
    watchdog.start()
    seen = []
    try:
        for line in server.stderr:
            seen.append(line)
            if found := ADDRESS.search(line):
                return found[1]
    finally:
        watchdog.cancel()
    raise EngineFailure(f"the server ended with exit code {server.wait()}:\n{''.join(seen[-5:])}")


def _stop(server: subprocess.Popen[str]) -> None:
    """Ask the server to end, as an orchestrator would; `EngineFailure` unless it does so with exit code 0."""
    server.send_signal(signal.SIGTERM)
    try:
        _, log = server.communicate(timeout=STOP_SECONDS)
    except subprocess.TimeoutExpired:
        raise EngineFailure(f"the server did not stop within {STOP_SECONDS:.0f} s of SIGTERM") from None
    if server.returncode != 0:
        raise EngineFailure(f"the server ended with exit code {server.returncode}:\n{log}")


def _end(server: subprocess.Popen[str]) -> None:
    """End what still runs after a failure or Ctrl-C, by force only if it must be: a killed server cannot clean up."""
    server.terminate()
    try:
        server.communicate(timeout=STOP_SECONDS)
    except subprocess.TimeoutExpired:
        server.kill()


async def _ask_all(url: str, bundled: bool) -> tuple[list[StreamedAnswer], float]:
    """All answers, and the seconds they took together."""
    from quire.bench.http import Client, ClientTimeouts

    client = Client(url, patience=ClientTimeouts.of(ANSWER_SECONDS))
    name = await _model_name(client)
    questions, texts = (QUESTIONS, TEXTS) if bundled else (GENERAL_QUESTIONS, GENERAL_TEXTS)
    asked: list[tuple[str, str, dict[str, Any]]] = [
        *((q, "/v1/chat/completions", {"messages": [{"role": "user", "content": q}]}) for q in questions),
        *((t, "/v1/completions", {"prompt": t, "max_tokens": 32, "stop": "\n\n"}) for t in texts),
    ]
    begun = time.perf_counter()
    jobs = (_ask(client, text, path, {"model": name} | fields) for text, path, fields in asked)
    answers = await asyncio.gather(*jobs)
    return list(answers), time.perf_counter() - begun


async def _model_name(client: Client) -> str:
    """The served model's name, as soon as the server listens (its log tells the address a moment earlier)."""
    end = time.monotonic() + ANSWER_SECONDS
    while True:
        try:
            return str((await client.get("/v1/models"))["data"][0]["id"])
        except Unavailable:
            if time.monotonic() > end:
                raise
            await asyncio.sleep(0.05)


async def _ask(client: Client, text: str, path: str, fields: dict[str, Any]) -> StreamedAnswer:
    answer = StreamedAnswer(text, sent=time.perf_counter())
    body = {"max_tokens": 64, "temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
    async for event in client.events(path, body | fields):
        for choice in event["choices"]:
            piece = choice["text"] if "text" in choice else choice["delta"].get("content", "")
            if piece:
                answer.chunks.append(time.perf_counter())
                answer.text += piece
        if event.get("usage"):
            answer.tokens = event["usage"]["completion_tokens"]
    if not answer.text:
        raise EngineFailure(f"no text came back for {text!r}")
    return answer


def _print(answers: list[StreamedAnswer], seconds: float) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(show_lines=True)
    table.add_column("asked", ratio=2)
    table.add_column("answered", ratio=4)
    for name in ("TTFT ms", "TPOT ms", "tokens", "tokens/s"):
        table.add_column(name, justify="right", no_wrap=True)
    for a in answers:
        total, first = a.chunks[-1] - a.sent, a.chunks[0] - a.sent
        tpot = (total - first) / max(1, a.tokens - 1)
        numbers = (f"{1e3 * first:.0f}", f"{1e3 * tpot:.1f}", str(a.tokens), f"{a.tokens / total:.0f}")
        table.add_row(Text(a.asked.strip()), Text(a.text.strip()), *numbers)
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    tokens = sum(a.tokens for a in answers)
    print(f"{tokens} tokens for {len(answers)} requests in {seconds:.2f} s: {tokens / seconds:.0f} tokens/s together")
