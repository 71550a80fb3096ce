"""The process of a rank that is not the first: `python -m quire.engine.processes.rank`, started by `Ranks`.

It is here because `quire.run`, which has all else of a rank, may not import `quire.speculate`.
"""

from __future__ import annotations

import sys

from quire.run.worker_rank import main
from quire.speculate.load_drafts import load_everywhere

if __name__ == "__main__":
    sys.exit(main(load_everywhere))
