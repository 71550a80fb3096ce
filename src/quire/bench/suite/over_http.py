"""Any server with OpenAI's API as a measured process: `python -m quire.bench.suite.over_http URL`, by the protocol.

With `--start WORDS`, a command as a JSON list, it starts the server itself, on a free port, and ends it when it ends.
Streamed completions of token ids, temperature 0, ends of text ignored where the server knows how. Its model is the
first that it names.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from contextlib import ExitStack
from typing import Any

from quire.bench.http import Client
from quire.bench.suite.foreign.protocol import Item, Record, serve
from quire.bench.suite.servers import started
from quire.core.errors import QuireError
from quire.core.machine import end_with_parent


class Server:
    """A server of which only the URL is known."""

    def __init__(self, url: str, pid: int = 0) -> None:
        """`pid`: of its first process, where it was started here."""
        self._pid = pid
        self._client = Client(url.removesuffix("/v1"))
        self.model = str(asyncio.run(self._client.get("/v1/models"))["data"][0]["id"])

    def facts(self) -> dict[str, Any]:
        """What the server calls its model."""
        return {"model": self.model} | ({"pid": self._pid} if self._pid else {})

    def load(self, items: list[list[Any]], most: int, twice: bool = False) -> dict[str, Any]:
        """Requests when they are due, at most `most` in flight: see `protocol.run_load`, whose answer this is.

        `twice`: once before, which is not measured.
        """
        if twice:
            asyncio.run(self._load([Item(*item) for item in items], most))
        return asyncio.run(self._load([Item(*item) for item in items], most))

    async def _load(self, items: list[Item], most: int) -> dict[str, Any]:
        room = asyncio.Semaphore(most or len(items))
        started = time.perf_counter()

        async def one(item: Item) -> Record:
            await asyncio.sleep(started + item.due - time.perf_counter())
            async with room:
                record = Record(item.due, time.perf_counter() - started, [], [])
                await self._send(item, record, started)
            return record

        found = await asyncio.gather(*(one(item) for item in items), return_exceptions=True)
        records, failed = [], []
        for item, record in zip(items, found, strict=True):
            if isinstance(record, QuireError | KeyError):
                failed.append(f"{type(record).__name__}: {record}")
                records.append(Record(item.due, item.due, [], []))
            elif isinstance(record, BaseException):
                raise record
            else:
                records.append(record)
        return {"records": records, "decode": [0, 0.0], "seconds": time.perf_counter() - started, "failures": failed}

    async def _send(self, item: Item, record: Record, started: float) -> None:
        """A chunk may be several tokens; the server's own count, at the end, is right."""
        body = {
            "model": self.model, "prompt": item.prompt, "max_tokens": item.output, "temperature": 0, "stream": True,
            "stream_options": {"include_usage": True}, "ignore_eos": True,
        }  # fmt: skip
        async for event in self._client.events("/v1/completions", body):
            if event["choices"]:
                record.times.append(time.perf_counter() - started)
                record.tokens.append(1)
            if event.get("usage") and record.tokens:
                record.tokens[-1] += event["usage"]["completion_tokens"] - sum(record.tokens)


def main() -> None:
    """Ask for the model, say so, obey."""
    end_with_parent(signal.SIGKILL)
    with ExitStack() as until:
        try:
            if sys.argv[1] == "--start":
                found = until.enter_context(started(json.loads(sys.argv[2])))
                server = Server(found.url, found.pid)
            else:
                server = Server(sys.argv[1])
        except (QuireError, KeyError, IndexError) as error:
            print(json.dumps({"error": f"{sys.argv[-1]}: {error}"}), flush=True)
            return
        serve(server)


if __name__ == "__main__":
    main()
