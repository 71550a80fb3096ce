"""A check of a GPU machine, in at most 8 minutes: build, tests, equality of bits, speed.

    make gpu-check                                 a machine with a network
    WHEELS=folder python -m benchmarks.gpu.check   one without: what is missing is installed from the folder's wheels
    python -m benchmarks.gpu.check --dry           no GPU: every line of this runs on tiny shapes, as Python

Wheels for a machine without a network, with Python 3.12, torch, Triton and the build tools, come from one with:
`python -m benchmarks.gpu.check --wheels folder` downloads `ABSENT`. What else is missing there the build stage names.

Stages run one after the other, each in a process of its own with a time limit of its own; one that fails or takes too
long is reported and the next begins. Results are written as JSON after every stage; the table comes last.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).parents[2]
SITE = ROOT / "build" / "gpu-check" / "site"
NEEDED = ("msgspec", "zmq", "starlette", "uvicorn", "httptools", "prometheus_client", "click", "rich",
          "ml_dtypes", "safetensors", "tokenizers", "jinja2", "transformers", "pytest", "pytest_timeout",
          "hypothesis", "triton")  # fmt: skip
"""Modules that quire or its tests import."""
ABSENT = ("msgspec", "pyzmq", "starlette", "typing-extensions", "uvicorn", "httptools", "pytest-timeout", "ml-dtypes")
"""Packages that a machine set up for torch alone has not, with what they need."""
QUIET = ("-q", "-p", "no:cacheprovider", "--tb=short", "-W", "default")
"""Warnings are no errors here: the machine's packages have other versions than those of constraints.txt."""
MINUTES = 8.0
SLOWER = 20.0
"""How much longer a stage may take without a GPU."""
SHARDS = 12
"""Processes that share the op tests: most of their time goes to compiling kernels, on one core each."""


@dataclass(frozen=True)
class Stage:
    """`run(check)` returns what goes into the results; it is stopped after `limit` seconds."""

    name: str
    limit: float
    command: Callable[[Check], list[list[str]]]


class Check:
    """One run: where things are, how long it has taken, what was found."""

    def __init__(self, dry: bool, output: Path, minutes: float) -> None:
        self.dry, self.output, self.seconds = dry, output, 60 * minutes
        self.started = time.monotonic()
        self.results: dict[str, Any] = {"dry": dry, "stages": {}}
        self.environment = dict(os.environ)
        if dry:
            self.environment |= {"TRITON_INTERPRET": "1"}
            return
        self.environment |= {"TRITON_INTERPRET": "0", "CMAKE_BUILD_PARALLEL_LEVEL": str(os.cpu_count() or 4),
                             "PYTHONPATH": f"{SITE}:{os.environ.get('PYTHONPATH', '')}"}  # fmt: skip

    @property
    def left(self) -> float:
        """Seconds until the run must end."""
        return self.seconds - (time.monotonic() - self.started)

    def _start(self, command: list[str]) -> tuple[subprocess.Popen[str], IO[str]]:
        """A process, and the file that takes what it says: a pipe that nobody reads would stop it."""
        out = tempfile.TemporaryFile("w+")  # noqa: SIM115
        return subprocess.Popen(command, cwd=ROOT, env=self.environment, text=True, stdout=out, stderr=out), out

    def run(self, stage: Stage) -> None:
        """Run a stage, keep its JSON (the last line it prints that begins with a brace) or the end of what it said."""
        limit, started = min(stage.limit * (SLOWER if self.dry else 1), self.left), time.monotonic()
        if limit < 5:
            self.results["stages"][stage.name] = {"status": "not started: no time was left"}
            return
        said, status = "", "ok"
        for process, out in [self._start(command) for command in stage.command(self)]:
            try:
                process.wait(max(0.1, limit - (time.monotonic() - started)))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                status = f"stopped after {limit:.0f} s"
            if process.returncode and status == "ok":
                status = "failed"
            with out:
                out.seek(0)
                text = out.read()
            said += text if process.returncode or not said else ""
        found: dict[str, Any] = {"status": status, "seconds": round(time.monotonic() - started, 1)}
        for line in said.splitlines():
            if line.startswith("{"):
                found["results"] = (found.get("results") or {}) | json.loads(line)
        if status != "ok":
            found["said"] = said[-6000:]
        self.results["stages"][stage.name] = found
        self.output.parent.mkdir(parents=True, exist_ok=True)
        self.output.write_text(json.dumps(self.results, indent=1) + "\n")
        print(f"{stage.name:18} {status:24} {found['seconds']:6.1f} s, {self.left:4.0f} s left", flush=True)
        if status != "ok":
            print("    " + "\n    ".join(line[:300] for line in said.strip().splitlines()[-15:]), flush=True)


def prepare(check: Check) -> list[list[str]]:
    """What is missing from wheels (or the index, when no folder is named), then the extension, into a folder."""
    if check.dry:
        return [[sys.executable, "-c", "import quire, quire._native"]]
    pip = f"{sys.executable} -m pip install --quiet --disable-pip-version-check --target {SITE}"
    wheels = os.environ.get("WHEELS")
    names = "*.whl" if wheels else "'.[dev]'"
    source = f"--no-index --no-deps --no-compile {wheels}/*.whl" if wheels else f"--constraint constraints.txt {names}"
    find = "import importlib.util as u, sys; sys.exit([n for n in sys.argv[1:] if u.find_spec(n) is None] or 0)"
    missing = f"{sys.executable} -c '{find}' {' '.join(NEEDED)}"
    build = f"{pip} --no-build-isolation --no-deps --upgrade ."
    return [["bash", "-c", f"set -e; mkdir -p {SITE}; {missing} || {pip} {source}; {build}; {missing}"]]


def op_tests(check: Check) -> list[list[str]]:
    """The op cases, their tests dealt out to processes."""
    files = [str(p.relative_to(ROOT)) for p in sorted((ROOT / "tests" / "ops" / "triton").glob("test_triton*.py"))]
    listed = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-p", "no:cacheprovider", *files],
        cwd=ROOT, env=check.environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    tests = [line for line in listed.stdout.splitlines() if "::" in line]
    if check.dry:
        tests = [t for t in tests if "norm" in t][:3] or tests[-3:]
    shards = [tests[i::SHARDS] for i in range(SHARDS)] if not check.dry else [tests]
    command = [sys.executable, "-m", "pytest", *QUIET, "--no-header"]
    return [[*command, *shard] for shard in shards if shard] or [["false"]]


def model_tests(check: Check) -> list[list[str]]:
    """Tiny models end to end: graphs, eager steps, chunks, padding, budget."""
    return [[sys.executable, "-m", "pytest", *QUIET, "tests/run/test_gpu_frame.py"]]


def measured(name: str, *more: str) -> Callable[[Check], list[list[str]]]:
    """Make the command of a stage of `stages.py`."""

    def command(check: Check) -> list[list[str]]:
        return [[sys.executable, "-m", "benchmarks.gpu.stages", name, *more, *(["--dry"] if check.dry else [])]]

    return command


STAGES = (
    Stage("build", 150, prepare),
    Stage("ops", 150, op_tests),
    Stage("models", 60, model_tests),
    Stage("tokens", 40, measured("tokens")),
    Stage("bits", 60, measured("bits")),
    Stage("limits", 20, measured("limits")),
    Stage("attention", 40, measured("attention")),
    Stage("8b-bf16", 100, measured("model", "llama-8b", "none")),
    Stage("8b-int4", 90, measured("model", "llama-8b", "int4")),
    Stage("8b-fp8", 90, measured("model", "llama-8b", "fp8")),
    Stage("1b-bf16", 60, measured("model", "llama-1b", "none")),
    Stage("1b-int4", 60, measured("model", "llama-1b", "int4")),
    Stage("1b-fp8", 60, measured("model", "llama-1b", "fp8")),
)


def table(results: dict[str, Any]) -> str:
    """What to read first: a line per stage, a line per figure."""
    lines = ["", f"{'stage':18} {'status':26} figures"]
    for name, stage in results["stages"].items():
        figures = stage.get("results", {})
        lines.append(f"{name:18} {stage['status']:26} {'' if figures else '-'}")
        for key, value in figures.items():
            shown = f"{value:,.4g}" if isinstance(value, float) else json.dumps(value)
            lines.append(f"{'':18} {key:42} {shown}")
    return "\n".join(lines)


def download(folder: Path) -> int:
    """The wheels of `ABSENT` for Python 3.12 on x86-64 Linux; pip's exit code."""
    platforms = [f"--platform=manylinux{version}_x86_64" for version in ("_2_28", "_2_17", "2014")]
    command = ["-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--python-version=3.12", *platforms]
    return subprocess.run([sys.executable, *command, f"--dest={folder}", "-cconstraints.txt", *ABSENT],
                          cwd=ROOT, check=False).returncode  # fmt: skip


def main() -> None:
    """Run the stages and print the table. Exits with 1 when one was not ok."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry", action="store_true", help="no GPU: tiny shapes under the interpreter")
    parser.add_argument("--minutes", type=float, default=MINUTES)
    parser.add_argument("--only", nargs="*", default=[], choices=[s.name for s in STAGES], metavar="STAGE")
    parser.add_argument("--tune", action="store_true", help="instead: measure kernel sizes, write ops/triton/configs")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "gpu_check.json")
    parser.add_argument("--wheels", type=Path, help="instead: download what such a machine may lack into this folder")
    args = parser.parse_args()
    if args.wheels:
        sys.exit(download(args.wheels))
    check = Check(args.dry, args.output, args.minutes)
    stages = (STAGES[0], Stage("tune", 60 * args.minutes, measured("tune"))) if args.tune else STAGES
    for stage in stages:
        if not args.only or stage.name in args.only:
            check.run(stage)
    print(table(check.results))
    sys.exit(any(stage["status"] != "ok" for stage in check.results["stages"].values()))


if __name__ == "__main__":
    main()
