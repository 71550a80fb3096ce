"""The command line, `quire`. Commands import what is heavy only when they run."""

from __future__ import annotations

import sys

from quire.core.errors import QuireError


def main() -> None:
    """Run a command. An expected error is one message on standard error and the error's exit code."""
    try:
        from quire.cli.app import app

        app(prog_name="quire")
    except QuireError as error:
        print(f"quire: {error.message}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
