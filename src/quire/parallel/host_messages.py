"""What ranks on several hosts say to each other: rank 0 to all others, and they to it, as over `SharedComm` on one."""

from __future__ import annotations

import logging
import queue
import socket
import threading
import time

import msgspec

from quire.core.errors import ConfigError
from quire.parallel.wire import GREETING_S, ConnectionDropped, Peer, call, greet

GREETED = 64
"""Callers who are greeted at once; more are sent away."""
log = logging.getLogger(__name__)


class Joining(msgspec.Struct, frozen=True):
    """The first message of a rank: which one of how many it is."""

    rank: int
    world: int


class Gate:
    """Callers of a socket who know the secret. Each is greeted by a thread of its own: a silent one holds up nobody."""

    def __init__(self, listener: socket.socket, secret: bytes) -> None:
        self._listener, self._secret = listener, secret
        self._found: queue.SimpleQueue[tuple[Peer, Joining]] = queue.SimpleQueue()
        self._room = threading.Semaphore(GREETED)

    def next(self, deadline: float) -> tuple[Peer, Joining] | None:
        """One who has said which rank it is, or None at `deadline`."""
        while time.monotonic() < deadline:
            try:
                return self._found.get_nowait()
            except queue.Empty:
                self._accept(0.02)
        return None

    def _accept(self, seconds: float) -> None:
        self._listener.settimeout(seconds)
        try:
            sock, _ = self._listener.accept()
        except OSError:
            return  # nobody, or one who has gone again
        if self._room.acquire(blocking=False):
            threading.Thread(target=self._greet, args=(sock,), daemon=True).start()
        else:
            sock.close()

    def _greet(self, sock: socket.socket) -> None:
        try:
            peer = greet(sock, self._secret, called=True)
            said = peer.receive(GREETING_S)
            if said is None:
                raise peer.drop("does not say which rank it is")
            try:
                self._found.put((peer, msgspec.msgpack.decode(said, type=Joining)))
            except msgspec.MsgspecError:
                raise peer.drop("does not say which rank it is") from None
        except ConnectionDropped as error:
            log.warning("%s", error)
        finally:
            self._room.release()


class Hub:
    """Rank 0's side: the others, by rank, once all of them have called `listener`."""

    rank = 0

    def __init__(self, listener: socket.socket, secret: bytes, world: int, seconds: float) -> None:
        """`ConfigError` when not all have come after so many seconds."""
        self.world = world
        self.peers: dict[int, Peer] = {}
        gate, deadline = Gate(listener, secret), time.monotonic() + seconds
        while len(self.peers) < world - 1 and (found := gate.next(deadline)):
            peer, joining = found
            if joining.world != world or not 0 < joining.rank < world or joining.rank in self.peers:
                log.warning("%s", peer.drop(f"is not one of the ranks that are missing: {joining}"))
            else:
                self.peers[joining.rank] = peer
        if missing := sorted({*range(1, world)} - set(self.peers)):
            self.leave()
            raise ConfigError(
                f"after {seconds:.0f} s ranks {missing} have not joined; start them, with the same secret"
            )

    def tell(self, message: bytes) -> None:
        """Send to all others. `ConnectionDropped` when one has left or does not take it in 30 s."""
        for peer in self.peers.values():
            peer.send(message)

    def listen(self, rank: int, milliseconds: int = 0) -> bytes | None:
        """What `rank` says next, or None when it has said nothing for so long. `ConnectionDropped` when it has left."""
        return self.peers[rank].receive(milliseconds / 1000)

    def leave(self) -> None:
        """All connections end."""
        for peer in self.peers.values():
            peer.close()


class Spoke:
    """Any other rank's side."""

    def __init__(self, host: str, port: int, secret: bytes, rank: int, world: int, seconds: float) -> None:
        """`ConnectionDropped` when rank 0 does not answer there for so many seconds."""
        self.rank, self.world = rank, world
        self.peer = call(host, port, secret, seconds)
        self.peer.send(msgspec.msgpack.encode(Joining(rank, world)))

    def hear(self, milliseconds: int) -> bytes | None:
        """What rank 0 says next, or None when it says nothing for so long. `ConnectionDropped` when it has left."""
        return self.peer.receive(milliseconds / 1000)

    def say(self, message: bytes) -> None:
        """Send to rank 0."""
        self.peer.send(message)

    def leave(self) -> None:
        """The connection ends."""
        self.peer.close()
