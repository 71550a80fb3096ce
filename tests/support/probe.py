"""Asks a port until a line comes on standard input; prints the seconds of each answer: `probe.py PORT WHAT`.

WHAT: "livez", or "refusal", which asks for a stream of 40 tokens and counts the answers that are a 429.
"""

from __future__ import annotations

import select
import socket
import sys
import time

BODY = b'{"prompt": [8, 9], "max_tokens": 40, "stream": true}'
ASKED = {
    "livez": (b"GET /livez HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n", b"200"),
    "refusal": (
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n%s" % (len(BODY), BODY),
        b"429",
    ),
}


def main(port: int, what: str) -> None:
    """One probe every 20 ms, or when the last was answered."""
    data, status = ASKED[what]
    took = []
    while not select.select([sys.stdin], [], [], 0.02)[0]:
        began = time.monotonic()
        with socket.create_connection(("127.0.0.1", port), 60.0, ("127.0.0.5", 0)) as sock:
            sock.sendall(data)
            answer = sock.recv(1000)
        assert answer.startswith(b"HTTP/1.1 ") and (what == "refusal" or answer[9:12] == status), answer
        if answer[9:12] == status:
            took.append(time.monotonic() - began)
    print(*took)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
