"""The command line, `quire`. Commands import what is heavy only when they run."""

from __future__ import annotations

import codecs
import errno
import io
import os
import sys

from quire.core.errors import QuireError
from quire.parallel.prestart import drop_waiting, start_ahead

UNWRITABLE = (errno.EPIPE, errno.ENOSPC, errno.EIO, errno.EBADF, errno.EFBIG, errno.EDQUOT)
"""How writing to standard output fails: nobody reads, no space, a broken device, closed, or a limit of size."""


def main() -> None:
    """Run a command. An expected error is one message on standard error and the error's exit code."""
    _read_and_write_utf8()
    try:
        if sys.argv[1:2] == ["serve"] and not {"-h", "--help", "--help-all"}.intersection(sys.argv):
            start_ahead("quire.engine.processes.worker")  # which imports the engine while we import the server
        from quire.cli.app import app

        try:
            app(prog_name="quire")
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except OSError as error:
        if error.filename is not None or error.errno not in UNWRITABLE:
            raise
        # What could not be written is still in the buffer, and would fail again at the end.
        if sys.stdout is not None:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        print(f"quire: standard output cannot be written: {error.strerror}", file=sys.stderr)
        sys.exit(1)
    except QuireError as error:
        print(f"quire: {error.message}", file=sys.stderr)
        sys.exit(error.exit_code)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        print("quire: this needs PyTorch, which is not installed: pip install 'quire[train]'", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        drop_waiting()


def _read_and_write_utf8() -> None:
    """Where the locale knows ASCII alone (LC_ALL=C), bytes are UTF-8: the text of models is not ASCII."""
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and codecs.lookup(stream.encoding).name == "ascii":
            stream.reconfigure(encoding="utf-8", errors="strict" if stream is sys.stdin else "backslashreplace")
