"""Two servers that speculate, `quire serve` and llama.cpp's: tokens a second of single streams, the same text asked.

    python -m benchmarks.peers.speculation

The embedded model as GGUF (Q8_0, one file for both), greedy. Prompts are token ids: conversations whose answer stands
in the prompt for look-ups by n-grams, beginnings of held-out modules for a draft model, which is the same model in
Q4_0. Each way beside the same server without it; servers are loaded and idle, and asked in turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.common.results import RESULTS
from benchmarks.common.servers import Server, server
from benchmarks.compress.format_quality import gguf_file, write_model
from benchmarks.speculation.drafts import asked_again, texts
from quire.bench.suite.environments import LLAMA_CPP_PYTHON, environment

OURS: dict[str, dict[str, Any] | None] = {
    "off": None, "ngram": {"method": "ngram"},
    "draft": {"method": "draft_model", "num_speculative_tokens": 5},
}  # fmt: skip
THEIRS: dict[str, list[str]] = {
    "off": [],
    "ngram": ["--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", "4", "--spec-ngram-simple-size-m", "16"],
    "draft": ["--spec-type", "draft-simple", "--spec-draft-n-max", "5"],
}


def ask(server: Server, path: str, body: dict[str, Any]) -> tuple[float, dict[str, Any]]:
    """Seconds of one request, and the reply."""
    data = json.dumps(body).encode()
    request = urllib.request.Request(server.url + path, data, {"Content-Type": "application/json"})
    begin = time.perf_counter()
    with urllib.request.urlopen(request, timeout=300) as reply:
        found = json.load(reply)
    return time.perf_counter() - begin, found


def seconds(server: Server, ours: bool, prompt: list[int], tokens: int) -> float:
    """A completion of so many tokens."""
    if ours:
        body = {"model": "m", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        took, found = ask(server, "/v1/completions", body)
        count = found["usage"]["completion_tokens"]
    else:
        body = {"prompt": prompt, "n_predict": tokens, "temperature": 0, "ignore_eos": True, "cache_prompt": True}
        took, found = ask(server, "/completion", body)
        count = found["tokens_predicted"]
    assert count == tokens, found
    return took


def servers(stack: ExitStack, args: argparse.Namespace) -> dict[tuple[str, str], Server]:
    """All six, by (engine, way)."""
    folder = args.work / "pydoc-f32"
    if not (folder / "model.safetensors").exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_model("pydoc", folder, 0)
    target, draft = (gguf_file(args.work, folder, fmt) for fmt in ("q8_0", "q4_0"))
    env = environment(args.work, "llama")
    binary, threads = env.folder / "build" / "bin" / "llama-server", str(args.threads)
    up = {}
    for way, asked in OURS.items():
        asked = asked and asked | ({"model": str(draft)} if way == "draft" else {})
        words = [sys.executable, "-m", "quire", "serve", str(target), "--served-model-name", "m", "--threads", threads]
        words += ["--speculative-config", json.dumps(asked)] if asked else []
        up["quire", way] = stack.enter_context(server(words, {}, args.work / f"quire-{way}.log"))
        words = [str(binary), "--model", str(target), "--parallel", "1", "--ctx-size", "1024", "--threads", threads]
        words += ["--no-webui", *THEIRS[way], *(["--model-draft", str(draft)] if way == "draft" else [])]
        up["llama.cpp", way] = stack.enter_context(server(words, env.variables, args.work / f"llama-{way}.log"))
    return up


def main() -> None:
    """Start all, ask in turns, print, keep in results/speculation.json."""
    about, _, more = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        description=about, epilog=more, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=120)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--work", type=Path, default=Path.home() / ".cache" / "quire-peers")
    parser.add_argument("--output", type=Path, default=RESULTS / "speculation.json")
    args = parser.parse_args()
    args.work = args.work.absolute()
    prompts = {"ngram": asked_again(8), "draft": texts(8, 64)}
    found: dict[str, dict[str, float]] = {}
    with ExitStack() as stack:
        up = servers(stack, args)
        for task, rows in prompts.items():
            rates: dict[tuple[str, str], list[float]] = {
                (who, way): [] for who in ("quire", "llama.cpp") for way in ("off", task)
            }
            for turn in range(args.rounds + 1):
                for row in rows:
                    for (who, way), kept in rates.items():
                        took = seconds(up[who, way], who == "quire", row, args.tokens)
                        kept += [args.tokens / took] if turn else []
            middle = {f"{who} {way}": statistics.median(kept) for (who, way), kept in rates.items()}
            ratio = middle[f"quire {task}"] / middle[f"llama.cpp {task}"]
            found[task] = middle | {"ratio": ratio, "ratio_off": middle["quire off"] / middle["llama.cpp off"]}
    rows = json.loads(args.output.read_text())
    facts = {"command": "python -m benchmarks.peers.speculation", "llama.cpp": LLAMA_CPP_PYTHON}
    rows["beside llama.cpp"] = facts | found
    args.output.write_text(json.dumps(rows, indent=1) + "\n")
    print(json.dumps(rows["beside llama.cpp"], indent=1))


if __name__ == "__main__":
    main()
