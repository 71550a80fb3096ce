"""What of a mapped file is in memory."""

from __future__ import annotations

import re
from pathlib import Path


def resident(file: Path) -> int:
    """Bytes of the mapped `file` that this process has in memory."""
    found, here = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            here = line.endswith(str(file))
        elif here and line.startswith("Rss:"):
            found += int(line.split()[1]) << 10
    return found
