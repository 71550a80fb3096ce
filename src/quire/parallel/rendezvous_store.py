"""Where the ranks of torch.distributed find each other's addresses: rank 0 keeps them, and the others ask over `wire`.

torch's own TCPStore listens on all interfaces and believes everybody.
"""

from __future__ import annotations

import socket
import threading
from datetime import timedelta
from typing import Any, Literal

import msgspec
from torch._C._distributed_c10d import HashStore, Store

from quire.core.errors import QuireError
from quire.parallel.host_messages import Hub, Spoke
from quire.parallel.wire import ConnectionDropped, Peer

PATIENCE_S = 30.0


class StoreRequest(msgspec.Struct, frozen=True):
    """What a rank asks of the store."""

    what: Literal["set", "get", "add", "check", "wait", "delete_key", "num_keys"]
    keys: list[str] = []
    value: bytes = b""
    number: int = 0


class StoreReply(msgspec.Struct, frozen=True):
    """Reply of the store; its `error` is empty where there was none."""

    value: bytes = b""
    number: int = 0
    error: str = ""


def serve(listener: socket.socket, secret: bytes, world: int, seconds: float = PATIENCE_S) -> Store:
    """Rank 0's store, once all others have called; each is served by a thread until its connection ends."""
    store = HashStore()
    store.set_timeout(timedelta(seconds=seconds))
    hub = Hub(listener, secret, world, seconds)
    for peer in hub.peers.values():
        threading.Thread(target=_serve, args=(store, peer), daemon=True).start()
    return store


def _serve(store: Store, peer: Peer) -> None:
    decode, encode = msgspec.msgpack.Decoder(StoreRequest).decode, msgspec.msgpack.Encoder().encode
    try:
        while True:
            asked = peer.receive()
            assert asked is not None, "it waits for ever"
            peer.send(encode(_answer(store, decode(asked))))
    except (ConnectionDropped, msgspec.MsgspecError) as error:
        peer.drop(f"is served no longer: {error}")


def _answer(store: Store, asked: StoreRequest) -> StoreReply:
    keys = asked.keys or [""]
    try:
        if asked.what == "set":
            store.set(keys[0], asked.value)  # type: ignore[arg-type]  # it takes bytes as well
        elif asked.what == "get":
            return StoreReply(value=store.get(keys[0]))
        elif asked.what == "wait":
            store.wait(keys, timedelta(milliseconds=asked.number))
        else:
            of = {"add": lambda: store.add(keys[0], asked.number), "check": lambda: store.check(keys),
                  "delete_key": lambda: store.delete_key(keys[0]), "num_keys": store.num_keys}  # fmt: skip
            return StoreReply(number=int(of[asked.what]()))
    except RuntimeError as error:
        return StoreReply(error=str(error).partition("\n")[0] or "it took too long")
    return StoreReply()


class RemoteStore(Store):
    """Any other rank's store: what rank 0 keeps."""

    def __init__(self, host: str, port: int, secret: bytes, rank: int, world: int, seconds: float = PATIENCE_S) -> None:
        super().__init__()
        self._peer = Spoke(host, port, secret, rank, world, seconds).peer
        self._seconds, self._lock = seconds, threading.Lock()

    def _ask(self, asking: StoreRequest) -> StoreReply:
        try:
            with self._lock:
                self._peer.send(msgspec.msgpack.encode(asking))
                said = self._peer.receive(2 * self._seconds)
            answer = StoreReply(error="rank 0 does not answer") if said is None else _decode(said)
        except QuireError as error:
            raise RuntimeError(error.message) from None
        if answer.error:
            raise RuntimeError(answer.error)
        return answer

    def close(self) -> None:
        """Ask no more: a group that is made needs no store, but NCCL's while it runs."""
        self._peer.close()

    # What follows torch calls; a RuntimeError is what it expects where it went wrong.
    def set(self, key: str, value: bytes | str) -> None:
        """Keep a value."""
        self._ask(StoreRequest("set", [key], value.encode() if isinstance(value, str) else bytes(value)))

    def get(self, key: str) -> bytes:
        """A value, once somebody has set it."""
        return self._ask(StoreRequest("get", [key])).value

    def add(self, key: str, number: int) -> int:
        """Add to a number; returns it."""
        return self._ask(StoreRequest("add", [key], number=number)).number

    def check(self, keys: list[str]) -> bool:
        """Whether all of them are set."""
        return bool(self._ask(StoreRequest("check", keys)).number)

    def wait(self, keys: list[str], timeout: Any = None) -> None:
        """Until all of them are set."""
        seconds = self._seconds if timeout is None else min(self._seconds, timeout.total_seconds())
        self._ask(StoreRequest("wait", keys, number=round(1000 * seconds)))

    def delete_key(self, key: str) -> bool:
        """Whether there was such a key."""
        return bool(self._ask(StoreRequest("delete_key", [key])).number)

    def num_keys(self) -> int:
        """How many are set."""
        return self._ask(StoreRequest("num_keys")).number


def _decode(said: bytes) -> StoreReply:
    return msgspec.msgpack.decode(said, type=StoreReply)
