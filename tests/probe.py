"""Asks /livez of a port until a line comes on standard input; prints the seconds of each answer: `probe.py PORT`."""

from __future__ import annotations

import select
import socket
import sys
import time


def main(port: int) -> None:
    """One probe every 20 ms, or when the last was answered."""
    took = []
    while not select.select([sys.stdin], [], [], 0.02)[0]:
        began = time.monotonic()
        with socket.create_connection(("127.0.0.1", port), 60.0, ("127.0.0.5", 0)) as sock:
            sock.sendall(b"GET /livez HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            assert sock.recv(1000).startswith(b"HTTP/1.1 200")
        took.append(time.monotonic() - began)
    print(*took)


if __name__ == "__main__":
    main(int(sys.argv[1]))
