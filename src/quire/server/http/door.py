"""What the gateway and the signals need of whatever is behind them: one model, or several."""

from __future__ import annotations

from typing import Protocol

from prometheus_client import CollectorRegistry

from quire.core.errors import QuireError
from quire.engine.edge.turns import Turns
from quire.server.http.exchange import Exchange
from quire.server.http.history import History
from quire.server.http.seen import Seen
from quire.server.keys import Keys
from quire.server.options import ServerOptions


class Engines(Protocol):
    """One engine, or all of them."""

    turns: Turns

    @property
    def failure(self) -> QuireError | None: ...

    def check_room(self) -> None: ...

    def restart(self) -> None: ...

    def fail_all(self, error: QuireError) -> None: ...


class Door(Protocol):
    """`active` counts requests being served, `draining` is set by the first SIGTERM."""

    draining: bool
    active: int
    created: int
    keys: Keys
    seen: Seen
    history: History

    @property
    def engine(self) -> Engines: ...

    @property
    def options(self) -> ServerOptions: ...

    @property
    def registries(self) -> list[CollectorRegistry]: ...

    def ended(self, exchange: Exchange) -> None: ...

    def close(self) -> None: ...
