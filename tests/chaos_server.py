"""`quire` whose engines run `chaos_worker`."""

from __future__ import annotations

from quire.cli import main
from quire.engine.processes import channel

if __name__ == "__main__":
    channel.WORKER = "chaos_worker"
    main()
