"""`quire demo`: start the server, ask it several things at once over HTTP, stop it, and check that all of it worked."""

from __future__ import annotations

import asyncio
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from typing import IO, TYPE_CHECKING, Annotated, Any

import typer

from quire.core.errors import EngineFailure

if TYPE_CHECKING:
    from quire.bench.http import Client

START_SECONDS = 120.0
STOP_SECONDS = 30.0
ADDRESS = re.compile(r"serving \S+ on (https?://\S+)")

QUESTIONS = (
    "What does json.dumps do?",
    "Describe os.path.join.",
    "What is math.gcd?",
    "Explain itertools.chain.",
    "What does shutil.copytree do?",
)
TEXTS = ("import os\nimport sys\n", "def main(argv=None):\n")


@dataclass
class Answer:
    """One streamed answer and its clock."""

    asked: str
    text: str = ""
    tokens: int = 0
    sent: float = 0.0
    chunks: list[float] = field(default_factory=list)


def demo(
    model: Annotated[str | None, typer.Argument(metavar="[MODEL]", help="Folder or hub name.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or reference.")] = "auto",
) -> None:
    """Serve the embedded model on a free port, stream several answers at once, and shut it down cleanly."""
    command = [sys.executable, "-m", "quire", "serve", *([model] if model else []), "--port", "0", "--device", device]
    print(f"$ quire {' '.join(command[3:])}")
    started = time.perf_counter()
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert server.stderr is not None
        url = _wait_for_address(server, server.stderr)
        print(
            f"{url} is up after {time.perf_counter() - started:.1f} s; {len(QUESTIONS) + len(TEXTS)} requests at once"
        )
        begun = time.perf_counter()
        answers = asyncio.run(_ask_all(url))
        seconds = time.perf_counter() - begun
        _print(answers, seconds)
        server.send_signal(signal.SIGTERM)
        code = server.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        raise EngineFailure(f"the server did not stop within {STOP_SECONDS:.0f} s of SIGTERM") from None
    finally:
        if server.poll() is None:
            server.kill()
            server.wait()
        if server.stderr is not None:
            server.stderr.close()
    if code != 0:
        raise EngineFailure(f"the server ended with exit code {code}")
    print(f"SIGTERM: the server drained and ended with exit code 0; {time.perf_counter() - started:.1f} s in all")


def _wait_for_address(server: subprocess.Popen[str], log: IO[str]) -> str:
    """The address in the server's log; `EngineFailure` with the log when it ends before that."""
    seen = []
    for line in log:
        seen.append(line)
        found = ADDRESS.search(line)
        if found:
            return found[1]
    raise EngineFailure(f"the server ended with exit code {server.wait()}:\n{''.join(seen[-5:])}")


async def _ask_all(url: str) -> list[Answer]:
    from quire.bench.http import Client

    client = Client(url)
    name = (await client.get("/v1/models"))["data"][0]["id"]
    chats = [
        _stream(client, q, "/v1/chat/completions", {"messages": [{"role": "user", "content": q}]}) for q in QUESTIONS
    ]
    texts = [_stream(client, t, "/v1/completions", {"prompt": t}) for t in TEXTS]
    jobs = [job(name) for job in (*chats, *texts)]
    return list(await asyncio.wait_for(asyncio.gather(*jobs), START_SECONDS))


def _stream(client: Client, asked: str, path: str, fields: dict[str, Any]) -> Any:
    async def run(model: str) -> Answer:
        answer = Answer(asked, sent=time.perf_counter())
        body = {"model": model, "max_tokens": 48, "temperature": 0, "stream": True}
        async for event in client.events(path, body | fields | {"stream_options": {"include_usage": True}}):
            for choice in event["choices"]:
                piece = choice["text"] if "text" in choice else choice["delta"].get("content", "")
                if piece:
                    answer.chunks.append(time.perf_counter())
                    answer.text += piece
            if event.get("usage"):
                answer.tokens = event["usage"]["completion_tokens"]
        if not answer.text:
            raise EngineFailure(f"no text came back for {asked!r}")
        return answer

    return run


def _print(answers: list[Answer], seconds: float) -> None:
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
