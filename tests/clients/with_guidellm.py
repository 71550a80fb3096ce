"""GuideLLM: a benchmark of a few requests."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from asked import MODEL, URL

command = [
    str(Path(sys.executable).parent / "guidellm"), "run", "--disable-progress",
    "--backend", f"kind=openai_http,target={URL},model=pydoc",
    "--tokenizer", f"kind=huggingface_auto,model={MODEL}",
    "--profile", "kind=synchronous",
    "--constraint", "kind=max_requests,count=4",
    "--data", "kind=synthetic_text,prompt_tokens=16,output_tokens=8",
]  # fmt: skip
done = subprocess.run(command, capture_output=True, text=True)
assert done.returncode == 0, (done.stdout + done.stderr)[-2000:]
print(f"guidellm {version('guidellm')}: synchronous, 4 requests")
