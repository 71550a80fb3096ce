"""`quire` whose engines run `chaos_worker`."""

from __future__ import annotations

from quire.cli import main
from quire.engine import process

if __name__ == "__main__":
    process.WORKER = "chaos_worker"
    main()
