"""A program on a terminal of its own: what it shows, and keys that are typed."""

from __future__ import annotations

import functools
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Sequence
from fcntl import ioctl

SEQUENCES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Terminal:
    """Runs Python with `words` on a pseudo-terminal of 80 x 24; `seen` is all that it has shown."""

    def __init__(self, words: Sequence[str], environment: dict[str, str] | None = None) -> None:
        self._ours, theirs = pty.openpty()
        ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        env = os.environ | {"TERM": "xterm-256color"} | (environment or {})
        default = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
        command = [sys.executable, *words]
        self.process = subprocess.Popen(
            command, stdin=theirs, stdout=theirs, stderr=theirs, preexec_fn=default, env=env
        )
        os.close(theirs)
        self.seen = ""
        self._at = 0

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._ours)

    @property
    def new(self) -> str:
        """What came since the last `wait`, without sequences for colours and the cursor."""
        return SEQUENCES.sub("", self.seen)[self._at :]

    def wait(self, text: str, seconds: float = 20.0) -> str:
        """Read until `text` was shown since the last wait; all that was shown since then."""
        end = time.monotonic() + seconds
        while text not in self.new:
            assert time.monotonic() < end, f"no {text!r} in {self.new!r}"
            self._read(f"{text!r}")
        new = self.new[: self.new.index(text) + len(text)]
        self._at += len(new)
        return new

    def wait_for(self, characters: int, seconds: float = 20.0) -> None:
        """Read until so many characters were shown since the last wait."""
        end = time.monotonic() + seconds
        while len(self.new) < characters:
            assert time.monotonic() < end, self.new
            self._read(f"{characters} characters")

    def _read(self, missing: str) -> None:
        if not select.select([self._ours], [], [], 0.1)[0]:
            return
        try:
            data = os.read(self._ours, 1 << 16)
        except OSError:  # the program has ended
            data = b""
        assert data, f"it ended without {missing}: {self.new!r}"
        self.seen += data.decode(errors="replace")

    def type(self, text: str) -> None:
        """Type a line."""
        os.write(self._ours, f"{text}\n".encode())

    def press(self, key: bytes) -> None:
        """Press one key: b"\\x03" is Ctrl-C."""
        os.write(self._ours, key)

    def interrupt(self) -> None:
        """Send what Ctrl-C sends: the terminal is not that of a session.

        CPython's readline notes a signal that comes between its prompt and its `select` at the next key only, which
        nobody's hands are fast enough for: a moment is waited.
        """
        time.sleep(0.2)
        self.process.send_signal(signal.SIGINT)
