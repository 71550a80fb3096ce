"""vLLM's own load generator: `vllm bench serve`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from asked import MODEL, URL

command = [str(Path(sys.executable).parent / "vllm"), "bench", "serve", "--backend", "openai", "--base-url", URL,
           "--model", MODEL, "--served-model-name", "pydoc", "--dataset-name", "random", "--random-input-len", "16",
           "--random-output-len", "8", "--num-prompts", "8"]  # fmt: skip
done = subprocess.run(command, capture_output=True, text=True)
assert done.returncode == 0, (done.stdout + done.stderr)[-2000:]
[line] = [line for line in done.stdout.splitlines() if line.startswith("Successful requests")]
assert line.split()[-1] == "8", line
print(f"vllm bench serve: {' '.join(line.split())}")
