"""What llama-bench of llama.cpp prints: `-o json`, `jsonl`, `csv` or `md`, a row for each test.

A test computes a prompt (pp), generates from an empty context (tg), or both (pg); -d fills the context before. Rates
leave sampling out, and tokens are made up.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from quire.bench.suite.imports.common import count, made, number, numbers, read_csv, read_json, table, told
from quire.core.errors import ConfigError
from quire.figures.schema import FigureRow, RowEngine, RowLoad, RowMachine, RowModel

DIALECT = {
    "prefill_tokens_per_s": "tokens of one prompt / time to compute it, no token sampled",
    "decode_tokens_per_s": "tokens made one by one from a context of n_depth / their time, none sampled",
    "total_tokens_per_s": "tokens of a prompt and after it / their time, none sampled",
}
TEST = re.compile(r"(pp|tg)\s*(\d+)(?:\s*\+\s*tg\s*(\d+))?(?:\s*@\s*d(\d+))?")


def knows(text: str, found: Any = None) -> bool:
    """Whether a text, or the JSON value it is, is what it prints."""
    if found is not None:
        first = found[0] if isinstance(found, list) and found else found
        return {"n_prompt", "n_gen", "avg_ts"} <= table(first).keys()
    first_line = text.lstrip().partition("\n")[0]
    if first_line.startswith("|"):
        return {"model", "test", "t/s"} <= {cell.strip() for cell in first_line.split("|")}
    return {"n_prompt", "n_gen", "avg_ts"} <= set(first_line.split(","))


def read(text: str, where: str) -> list[FigureRow]:
    """A row for each test."""
    tests = list(_tests(text, where))
    if not tests:
        raise ConfigError(f"{where}: no test in it")
    return [_row(test, where) for test in tests]


def _tests(text: str, where: str) -> Iterator[dict[str, Any]]:
    start = text.lstrip()
    if start.startswith("|"):
        yield from _markdown(start, where)
    elif start.startswith("["):
        yield from (table(each) for each in read_json(text, where))
    elif start.startswith("{"):
        yield from (table(read_json(line, where)) for line in start.splitlines() if line.strip())
    else:
        yield from read_csv(text, where)


def _markdown(text: str, where: str) -> Iterator[dict[str, Any]]:
    """Rows of a Markdown table by the same names as JSON has. Lines after the table say which build it was."""
    lines = [line for line in text.splitlines() if line.strip()]
    names, build = [cell.strip() for cell in lines[0].strip().strip("|").split("|")], re.search(r"build:\s*(\S+)", text)
    for line in lines[2:]:
        if not line.startswith("|"):
            break
        found = dict(zip(names, (cell.strip() for cell in line.strip().strip("|").split("|")), strict=False))
        test, rate = TEST.search(found.get("test", "")), found.get("t/s", "").replace("\u00b1", " ").split()
        if test is None or not rate:
            raise ConfigError(f"{where}: {line!r} says no test or no rate")
        kind, first, second, depth = test.groups()
        yield {
            "model_type": found.get("model", ""),
            "model_n_params": _parameters(found.get("params", "")),
            "backends": found.get("backend", ""),
            "n_prompt": first if kind == "pp" else 0,
            "n_gen": second or (first if kind == "tg" else 0),
            "n_depth": depth or 0,
            "n_threads": found.get("threads"),
            "avg_ts": rate[0],
            "build_commit": build[1] if build else "",
        }


def _parameters(text: str) -> float:
    """Parse a number of parameters: "7.62 B"."""
    value, _, unit = text.partition(" ")
    return (number(value) or 0.0) * {"B": 1e9, "M": 1e6, "K": 1e3}.get(unit.strip(), 1.0)


def _row(test: dict[str, Any], where: str) -> FigureRow:
    reads, writes, rate = count(test.get("n_prompt")), count(test.get("n_gen")), number(test.get("avg_ts"))
    if rate is None or not (reads or writes):
        raise ConfigError(f"{where}: a test without tokens or rate: {json.dumps(test)[:200]}")
    name = "total_tokens_per_s" if reads and writes else "prefill_tokens_per_s" if reads else "decode_tokens_per_s"
    samples = test.get("samples_ts")
    rates = [value for each in samples if (value := number(each)) is not None] if isinstance(samples, list) else []
    kind, kv = told(test.get("model_type")), told(test.get("type_k"))
    wanted = ("n_batch", "n_ubatch", "n_threads", "n_gpu_layers", "flash_attn")
    options = {key: int(value) for key, value in numbers({key: test.get(key) for key in wanted}).items()}
    depth = count(test.get("n_depth"))
    return made(
        "llama-bench",
        metrics={name: rate},
        engine=RowEngine(
            name="llama.cpp", version=told(test.get("build_number")), commit=told(test.get("build_commit"))
        ),
        model=RowModel(
            name=kind or told(test.get("model_filename")).rpartition("/")[2] or "unknown",
            parameters=count(test.get("model_n_params")),
            format=_format(kind),
            kv_format=kv,
        ),
        load=RowLoad(
            input_len=reads + (0 if reads else depth), output_len=writes, name=f"depth {depth}" if depth else ""
        ),
        machine=RowMachine(name=_machine(test)),
        dialect=DIALECT,
        samples={name: rates} if rates else {},
        options=options,
        time=told(test.get("test_time")),
    )


def _machine(test: dict[str, Any]) -> str:
    """The device that computed: the GPU where layers lie on one."""
    on_gpu = (
        told(test.get("gpu_info")) if count(test.get("n_gpu_layers")) and told(test.get("backends")) != "CPU" else ""
    )
    return on_gpu or told(test.get("cpu_info")) or "unknown"


def _format(kind: str) -> str:
    """`q4_k - medium` of "qwen2 7B Q4_K - Medium", as quire writes it: q4_k_m."""
    found = re.search(r"\b(I?Q\d\w*|BF16|F16|F32|MXFP4)\b(?:\s*-\s*(Small|Medium|Large))?", kind, re.IGNORECASE)
    if found is None:
        return ""
    return found[1].lower() + (f"_{found[2][0].lower()}" if found[2] else "")
