"""lm-evaluation-harness: local-completions on a task of our own, which needs no network."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

from asked import MODEL, URL

TASK = """task: tiny
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_target: 0
doc_to_choice: ["{{good}}", "{{bad}}"]
metric_list: [{metric: acc}]
"""
with tempfile.TemporaryDirectory() as work:
    rows = Path(work) / "rows.jsonl"
    row = {"question": "import os\nos.path.", "good": "join", "bad": "zebra"}
    rows.write_text("".join(json.dumps(row | {"question": f"{i}: {row['question']}"}) + "\n" for i in range(4)))
    (Path(work) / "tiny.yaml").write_text(TASK.replace("FILE", str(rows)))
    model = f"model=pydoc,base_url={URL}/v1/completions,tokenizer={MODEL},num_concurrent=2,max_length=512"
    command = [str(Path(sys.executable).parent / "lm_eval"), "--model", "local-completions", "--model_args", model,
               "--tasks", "tiny", "--include_path", work]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-2000:]
    [line] = [line for line in done.stdout.splitlines() if line.startswith("|tiny")]
print(f"lm_eval {version('lm_eval')}: {line}")
