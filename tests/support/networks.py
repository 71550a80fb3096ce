"""Hosts on this machine: network namespaces, joined by a cable that has a delay, loses some of what it carries, and can
be cut. Needs root.

The cable is a pair of virtual interfaces, whose delay and loss are the kernel's (tc, netem). Kernels without netem get
one made of two TAP devices, and a thread that carries frames between them.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import heapq
import os
import random
import select
import shutil
import struct
import subprocess
import threading
import time
from pathlib import Path

TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
CLONE_NEWNET = 0x40000000
DELAY, LOSS = 0.001, 0.01
ADDRESSES = ("10.77.0.1", "10.77.0.2")


def why_not() -> str | None:
    """Why this machine cannot have namespaces, if it cannot."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return "network namespaces need root and iproute2"
    name = f"quire-try-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    subprocess.run(["ip", "netns", "del", name], capture_output=True)
    return f"no network namespaces: {made.stderr.strip()}" if made.returncode else None


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


class Network:
    """Two hosts with an address of `ADDRESSES` each, on the interface "cable"; `kind` says what the cable is."""

    def __init__(self) -> None:
        self.names = tuple(f"quire-{os.getpid()}-{i}" for i in range(2))
        self._cable: _Carried | None = None
        for name in self.names:
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
        self.kind = "veth with netem" if self._with_netem() else "TAP devices and a thread"
        if self._cable is None and not self.kind.startswith("veth"):
            self._cable = _Carried(self.names)
        for name, address in zip(self.names, ADDRESSES, strict=True):
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", "cable")
            _ip("-n", name, "link", "set", "cable", "up")

    def _with_netem(self) -> bool:
        one, two = self.names
        _ip("link", "add", "cable", "netns", one, "type", "veth", "peer", "name", "cable", "netns", two)
        words = ["dev", "cable", "root", "netem", "delay", f"{DELAY * 1000}ms", "loss", f"{LOSS * 100}%"]
        for name in self.names:
            if subprocess.run(["tc", "-n", name, "qdisc", "add", *words], capture_output=True).returncode:
                _ip("-n", one, "link", "del", "cable")
                return False
        return True

    def within(self, host: int) -> list[str]:
        """What runs a command on a host."""
        return ["ip", "netns", "exec", self.names[host]]

    def cut(self) -> None:
        """Nothing is carried any more."""
        _ip("-n", self.names[1], "link", "set", "cable", "down")

    def mend(self) -> None:
        """As before."""
        _ip("-n", self.names[1], "link", "set", "cable", "up")

    def close(self) -> None:
        """Leave nothing."""
        if self._cable is not None:
            self._cable.close()
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)

    def __enter__(self) -> Network:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Carried:
    """A cable whose frames a thread carries; `lost` of `carried` were not."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self._files = [_tap(name) for name in names]
        self.carried = self.lost = 0
        self._closing = False
        self._thread = threading.Thread(target=self._carry, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closing = True
        self._thread.join()
        for file in self._files:
            os.close(file)

    def _carry(self) -> None:
        rng, waiting, count = random.Random(1), list[tuple[float, int, int, bytes]](), 0
        poll = select.poll()
        for file in self._files:
            poll.register(file, select.POLLIN)
        while not self._closing:
            ready = poll.poll(1 if waiting else 100)
            for file, events in ready:
                with contextlib.suppress(OSError):  # the interface is down
                    frame = os.read(file, 65536) if events & select.POLLIN else b""
                    self.carried += 1
                    if rng.random() < LOSS:
                        self.lost += 1
                    elif frame:
                        other = self._files[self._files[0] == file]
                        heapq.heappush(waiting, (time.monotonic() + DELAY, count := count + 1, other, frame))
            if ready and not any(events & select.POLLIN for _, events in ready):
                time.sleep(0.01)
            while waiting and waiting[0][0] <= time.monotonic():
                _, _, file, frame = heapq.heappop(waiting)
                with contextlib.suppress(OSError):
                    os.write(file, frame)


def _tap(name: str) -> int:
    """A TAP device "cable" in a namespace; only the thread that makes it is there."""
    found: list[int] = []

    def make() -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        with Path(f"/run/netns/{name}").open() as namespace:
            if libc.setns(namespace.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns")
        file = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
        fcntl.ioctl(file, TUNSETIFF, struct.pack("16sH22x", b"cable", IFF_TAP | IFF_NO_PI))
        found.append(file)

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    return found[0]
