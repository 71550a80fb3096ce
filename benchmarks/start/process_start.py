"""The start of a process until it is of use: an engine's first token, a server's readiness, a template's first text.

    python -m benchmarks.start.process_start engine      llama-1b as a Q4_K_M file, and bf16 to int4
    python -m benchmarks.start.process_start engine --case q4_k_m --rounds 5
    python -m benchmarks.start.process_start server MODEL.gguf --llama-server build/bin/llama-server
    python -m benchmarks.start.process_start template

`engine`: a first start finds nothing that an earlier one kept: neither packed weights nor tuning. A later one finds
packed weights where any are kept (a file's own blocks are packed anew, as fast as they would be read). Each is a fresh
process that imports, loads, continues one word and prints the first token; the clock runs from before it is made until
that line is here. llama.cpp reads the same Q4_K_M file; it cannot quantize while it loads, so beside bf16 to int4 it
loads the bf16 weights as they are. "dropped": the pages of the model and of what was kept are dropped before (by
posix_fadvise; libraries stay). Phases of quire, in seconds, are of the same runs.

`server`: the clock runs from before the process is made until GET /health answers. "cold": the pages of the model are
dropped before. One start of each is not counted: it compiles Python's modules, as installs do. Memory is the
proportional set of all processes once they answered one request of one token, so that what they share counts once.
Processor time is theirs until they were ready, user and system: where others work beside, it says more than the clock.

`template`: chat templates are rendered in a process of their own. "start": a process until its first text, compilation
included; "warm": one more rendering; "here": the same template rendered by jinja in this process.

Starts take turns; medians count.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.common.results import RESULTS, ROOT, parser_of

# Nothing of quire is imported here: a measured process, which is this file too, imports it under its clock.

# -------------------------------------------------------------------------------------------------------------- engine

CASES: dict[str, dict[str, str]] = {"q4_k_m": {}, "bf16-int4": {"quantization": "int4"}}


def phases(model: str, options: dict[str, Any]) -> None:
    """Start quire in this process, print the first token's line, and say what took how long."""
    began = time.perf_counter()
    from quire.core.config import flat_config
    from quire.core.machine import uncollected
    from quire.model.load.packed_folder import ask_ahead

    config = flat_config(model=model, **options)
    ask_ahead(config.model)  # as `quire generate` does
    with uncollected(forever=True):
        from quire import LLM, SamplingParams
        from quire.engine import engine

    found = {"imports": time.perf_counter() - began}
    load, warm, tune = engine.load_model, engine.warm_up, engine.tune
    for name, what in (("load_model", load), ("warm_up", warm), ("tune", tune)):
        setattr(engine, name, _timed(name, what, found))
    with uncollected(forever=True):
        llm = LLM.from_config(config)
    began = time.perf_counter()
    for _ in llm.stream("hello", SamplingParams(max_tokens=1, temperature=0.0)):
        found["first token"] = time.perf_counter() - began
        print(json.dumps(found), flush=True)
    writing = llm.engine.engine.model.writing
    if writing is not None:  # nobody waits for it elsewhere; here the next start shall find it on a busy machine too
        writing.finish(600)


def _timed(name: str, call: Any, into: dict[str, float]) -> Any:
    def timed(*facts: Any) -> Any:
        began = time.perf_counter()
        try:
            return call(*facts)
        finally:
            into[name] = time.perf_counter() - began

    return timed


def files_of(path: Path) -> list[Path]:
    """A file itself, or those of a folder."""
    return [path] if path.is_file() else [found for found in path.rglob("*") if found.is_file()]


def drop(*paths: Path) -> None:
    """Write the files' pages out and have the system forget them."""
    for path in (file for found in paths for file in files_of(found)):
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def start(words: list[str], variables: dict[str, str]) -> dict[str, float]:
    """Seconds until the first line, and what it says. `SystemExit` when there is none."""
    began = time.perf_counter()
    with subprocess.Popen(words, env=os.environ | variables, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        seconds = time.perf_counter() - began
    if not line:
        raise SystemExit(f"exit code {process.returncode} from: {' '.join(words)}")
    told: dict[str, float] = json.loads(line)
    return {"start": seconds} | told


class Starts:
    """The processes of one case; `kept` is what quire keeps for later starts."""

    def __init__(self, args: argparse.Namespace, case: str, kept: Path) -> None:
        from quire.bench.suite.engines import FOREIGN, EngineJob, gguf_file
        from quire.bench.suite.environments import environment
        from quire.bench.suite.models import source_of

        form = "q4_k_m" if case == "q4_k_m" else "bf16"
        asked = EngineJob(args.work, source_of("llama-1b", args.work), form, args.threads, make=True)
        env = environment(args.work, "llama")
        theirs = gguf_file(asked)
        ours = theirs if not CASES[case] else Path(asked.checkpoint)
        options = json.dumps({"threads": args.threads, "max_model_len": 2048} | CASES[case])
        self.kept, self.files, self._keeps = kept, [theirs, ours], bool(CASES[case])
        self._quire = [sys.executable, "-m", "benchmarks.start.process_start", "--start", str(ours), options]
        self._theirs = [env.python, str(FOREIGN / "peer_llama_cpp.py"), "first", str(theirs), str(args.threads)]
        self._variables = env.variables

    def run(self, what: str, dropped: bool) -> dict[str, float]:
        """One start: "llama.cpp", "first" or "later" of quire."""
        if what == "first":
            for file in files_of(self.kept):
                file.unlink()
        if dropped:
            drop(*self.files, self.kept)
        else:
            for path in (file for found in (*self.files, self.kept) for file in files_of(found)):
                _read(path)
        if what == "llama.cpp":
            return start(self._theirs, self._variables)
        found = start(self._quire, {"XDG_CACHE_HOME": str(self.kept)})
        if self._keeps and not list(self.kept.glob("quire/packed/packed-*")):
            raise SystemExit(f"nothing was kept in {self.kept}: is the disk nearly full?")
        return found


def _read(path: Path) -> None:
    """Have the file's pages in memory."""
    with path.open("rb") as file:
        while file.read(16 << 20):
            pass


def start_rows(args: argparse.Namespace, case: str) -> list[dict[str, Any]]:
    """A row for the weights in memory and for those on disk."""
    rows = []
    with tempfile.TemporaryDirectory(dir=args.work) as kept:
        starts = Starts(args, case, Path(kept))
        for dropped in (False, True):
            found: dict[str, list[dict[str, float]]] = {"llama.cpp": [], "first": [], "later": []}
            for _ in range(args.rounds):
                for what, runs in found.items():
                    runs.append(starts.run(what, dropped))
            medians = {
                what: {phase: statistics.median(run.get(phase, 0.0) for run in runs) for phase in runs[0]}
                for what, runs in found.items()
            }
            rows.append({"case": case, "pages": "dropped" if dropped else "warm", "threads": args.threads,
                         "rounds": args.rounds, "medians": medians, "machine": platform.processor(),
                         "starts": {what: [run["start"] for run in runs] for what, runs in found.items()}})  # fmt: skip
            show(rows[-1])
    return rows


def show(row: dict[str, Any]) -> None:
    """Print a row."""
    peer = row["medians"]["llama.cpp"]["start"]
    print(f"{row['case']}, pages {row['pages']}: llama.cpp {peer:.2f} s")
    for what in ("first", "later"):
        told = dict(row["medians"][what])
        seconds = told.pop("start")
        parts = ", ".join(f"{name} {value:.2f}" for name, value in told.items())
        print(
            f"  quire, {what:5s} start {seconds:6.2f} s = {seconds / peer:.2f} of llama.cpp's   ({parts})", flush=True
        )


def engine(args: argparse.Namespace) -> None:
    """Measure the asked cases, print them, write JSON."""
    args.work = args.work.absolute()
    rows = [row for case in args.case for row in start_rows(args, case)]
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps({"unit": "seconds", "rows": rows}, indent=1) + "\n")


# -------------------------------------------------------------------------------------------------------------- server

CONTEXT = 2048


def commands(args: argparse.Namespace) -> dict[str, list[str]]:
    """Each server's own words; both have a context of as many tokens."""
    made = {"quire": [str(args.quire), "serve", str(args.model), "--max-model-len", str(CONTEXT)]}
    if args.llama_server is not None:
        made["llama-server"] = [str(args.llama_server), "-m", str(args.model), "-c", str(CONTEXT), "-np", "1"]
    return made


class ServerStart(NamedTuple):
    """Seconds until it was ready, of processors until then, and bytes of its processes after a request."""

    ready: float
    processor: float
    held: dict[str, int]


def start_server(words: list[str], folder: Path) -> ServerStart:
    """Start it, and end it."""
    from quire.bench.suite.servers import server

    with server(words, {"PYTHONDONTWRITEBYTECODE": ""}, folder / "log") as one:
        used = one.cpu_seconds()
        with urllib.request.urlopen(f"{one.url}/v1/models") as answer:
            model = json.load(answer)["data"][0]["id"]
        body = json.dumps({"model": model, "prompt": "The", "max_tokens": 1}).encode()
        asked = urllib.request.Request(f"{one.url}/v1/completions", body, {"content-type": "application/json"})
        urllib.request.urlopen(asked).read()
        return ServerStart(one.ready_seconds, used, one.memory())


def serving(args: argparse.Namespace) -> None:
    """Print a row for each server and temperature of the pages."""
    from quire.core.machine import processor

    found: dict[tuple[str, str], list[ServerStart]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for words in commands(args).values():
            start_server(words, Path(folder))
        for _ in range(args.rounds):
            for pages in ("warm", "cold"):
                for name, words in commands(args).items():
                    if pages == "cold":
                        drop(args.model)
                    found.setdefault((name, pages), []).append(start_server(words, Path(folder)))
    print(f"{processor()}, {os.cpu_count()} cores, Python {platform.python_version()}, {args.model.name}")
    for (name, pages), runs in found.items():
        seconds = sorted(run.ready for run in runs)
        used = statistics.median(run.processor for run in runs)
        held = statistics.median(sum(run.held.values()) for run in runs)
        each = ", ".join(f"{who.split()[0]} {nbytes / 1e6:.0f}" for who, nbytes in runs[-1].held.items())
        spread = f"{seconds[0]:.2f} to {seconds[-1]:.2f}, processors {used:.2f}"
        print(f"{name:13} {pages}: {statistics.median(seconds):.2f} s ({spread}), {held / 1e6:.0f} MB ({each})")


# ------------------------------------------------------------------------------------------------------------ template

SOURCE = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
VALUES = {"messages": [{"role": "user", "content": "What does itertools.chain do?"}] * 4}


def median_ms(work: Callable[[], object], times: int) -> float:
    """Of `times` calls."""
    seconds = []
    for _ in range(times):
        begin = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - begin)
    return 1e3 * statistics.median(seconds)


def template(args: argparse.Namespace) -> None:
    """Print the three."""
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    from quire.text.template_renderer import Renderer

    def start() -> None:
        renderer = Renderer()
        renderer.render(SOURCE, VALUES, 1000)
        renderer.close()

    warm, here = Renderer(), ImmutableSandboxedEnvironment().from_string(SOURCE)
    warm.render(SOURCE, VALUES, 1000)
    print(f"start {median_ms(start, args.rounds):8.1f} ms")
    print(f"warm  {median_ms(lambda: warm.render(SOURCE, VALUES, 1000), 50 * args.rounds):8.3f} ms")
    print(f"here  {median_ms(lambda: here.render(VALUES), 50 * args.rounds):8.3f} ms")


def main() -> None:
    """Measure what was asked for."""
    if sys.argv[1:2] == ["--start"]:
        phases(sys.argv[2], json.loads(sys.argv[3]))
        return
    parser = parser_of(__doc__)
    parts = parser.add_subparsers(required=True, metavar="{engine,server,template}")
    one = parts.add_parser("engine", help="until the first token, beside llama.cpp")
    one.add_argument("--case", choices=CASES, nargs="+", default=list(CASES))
    one.add_argument("--threads", type=int, default=2)
    one.add_argument("--work", type=Path, default=Path.home() / ".cache" / "quire-peers")
    one.add_argument("--output", type=Path, default=RESULTS / "starts.json")
    one.set_defaults(run=engine)
    two = parts.add_parser("server", help="until it answers, and the memory it takes then")
    two.add_argument("model", type=Path)
    two.add_argument("--quire", type=Path, default=Path(".venv/bin/quire"))
    two.add_argument("--llama-server", type=Path)
    two.set_defaults(run=serving)
    three = parts.add_parser("template", help="a process that renders chat templates")
    three.set_defaults(run=template)
    for each in (one, two, three):
        each.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
