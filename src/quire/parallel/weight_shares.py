"""A host's share of the weights, for other hosts: over a link they ask for bytes of a file in memory, and get them."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import struct
import threading
import time

from quire.parallel.link import Address, Link, dial
from quire.parallel.wire import ConnectionDropped, read_exactly

logger = logging.getLogger("quire.cluster")

ASK = b"shares"
"""What a link says first that is for a share."""
HEADER = struct.Struct("<q")
"""The file's first bytes: how long it is once it is whole, 0 before."""
REQUEST = struct.Struct("<qq")
"""Offset and bytes, as csrc/stream.cpp asks."""
LONGEST = 64 << 20
POLL_SECONDS, AGAIN_SECONDS = 1.0, 0.5
REPLY_SECONDS = 30.0


def length(file: int) -> int:
    """Bytes of a share that is whole; 0 before."""
    return int(HEADER.unpack(os.pread(file, HEADER.size, 0).ljust(HEADER.size, b"\0"))[0])


def serve(link: Link, file: int) -> None:
    """Answer who asks over `link`, once the share is whole; `ConnectionDropped` when the link ends, or asks for what
    is not."""
    while True:
        said = link.receive(POLL_SECONDS)
        if said is None:
            continue
        offset, size = REQUEST.unpack(said) if len(said) == REQUEST.size else (-1, 0)
        while not length(file):
            link.receive(POLL_SECONDS)  # raises when the link has ended
        if offset < 0 or not 0 < size <= LONGEST or offset + size > length(file):
            raise ConnectionDropped(f"{link.address[0]} asks for {size:,} bytes at {offset:,}, which are not there")
        link.send(os.pread(file, size, offset))


class RemoteShare:
    """The share of another host, as a socket that native readers ask. A host that is gone ends it."""

    def __init__(self, address: Address, secret: bytes) -> None:
        """The host may come later: who asks before waits."""
        self._address, self._secret = address, secret
        self._own, self._readers = socket.socketpair()
        self._closing = threading.Event()
        self.lost = False
        """Whether the host is gone."""
        self._thread = threading.Thread(target=self._run, name="quire-share", daemon=True)
        self._thread.start()

    def fileno(self) -> int:
        """The descriptor to ask at."""
        return self._readers.fileno()

    def leave(self) -> None:
        """Whoever waits for bytes, or asks for more, gets an error."""
        self._closing.set()
        with contextlib.suppress(OSError):  # the thread was first
            self._own.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Let the descriptor go, which nobody uses any more."""
        self.leave()
        self._readers.close()

    def _run(self) -> None:
        link = self._dial()
        try:
            if link is not None:
                link.send(ASK)
            while link is not None and not self._closing.is_set():
                self._pass_on(link)
        except (ConnectionDropped, OSError) as lost:
            if not self._closing.is_set():
                self.lost = True
                logger.error("the weights of host %s:%d are gone: %s", *self._address, lost)
        finally:
            self._own.close()
            if link is not None:
                link.close()

    def _dial(self) -> Link | None:
        told = False
        while not self._closing.is_set():
            try:
                return dial(self._address, self._secret)
            except ConnectionDropped as error:
                if not told:
                    logger.info("waiting for the weights of host %s:%d: %s", *self._address, error)
                told = True
                self._closing.wait(AGAIN_SECONDS)
        return None

    def _pass_on(self, link: Link) -> None:
        """A request and its reply; or, when there is none for a moment, the signs of life that came."""
        asked = select.poll()
        asked.register(self._own, select.POLLIN)
        if not asked.poll(1000 * POLL_SECONDS):
            link.receive(0.0)
            return
        link.send(read_exactly(self._own, REQUEST.size, time.monotonic() + POLL_SECONDS))
        reply = None
        while reply is None:
            reply = link.receive(POLL_SECONDS)
        self._own.settimeout(REPLY_SECONDS)
        self._own.sendall(reply)
