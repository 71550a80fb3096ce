"""GuideLLM: a benchmark of a few requests."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from asked import MODEL, URL

command = [str(Path(sys.executable).parent / "guidellm"), "benchmark", "run", "--target", URL, "--model", "pydoc",
           "--processor", MODEL, "--profile", "synchronous", "--max-requests", "4",
           "--data", "prompt_tokens=16,output_tokens=8"]  # fmt: skip
done = subprocess.run(command, capture_output=True, text=True)
assert done.returncode == 0, (done.stdout + done.stderr)[-2000:]
print(f"guidellm {version('guidellm')}: synchronous, 4 requests")
