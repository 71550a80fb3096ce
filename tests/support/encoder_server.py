"""A live server over a real engine of a tiny encoder, with the encoder's own tokenizer."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from live_server import LiveServer
from quire.core.config import flat_config
from quire.server.server_options import ServerOptions
from quire.text.tokenizer import Tokenizer
from real_server import Shared
from stub_engine import StubEngine


@contextlib.contextmanager
def serving(folder: Path, **options: Any) -> Iterator[LiveServer]:
    """A running server of the model in `folder`, stopped at the end; `options` are its engine's."""
    config = flat_config(model=str(folder), device="cpu", **{"num_blocks": 512} | options)
    tools: Any = (Tokenizer.from_folder(folder), None)
    server = LiveServer(cast(StubEngine, Shared(config)), ServerOptions(port=0), config, tools)
    server.start()
    try:
        yield server
    finally:
        server.stop()
