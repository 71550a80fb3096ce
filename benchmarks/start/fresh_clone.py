"""A fresh clone until its first answer: the phases of `make demo`, and of `pip install WHEEL`.

    python -m benchmarks.start.fresh_clone                              a clone of this repository's last commit
    python -m benchmarks.start.fresh_clone --wheel dist/quire-….whl     a wheel in an empty environment
    python -m benchmarks.start.fresh_clone --wheel dist/quire-….whl --run smollm2    to the first token of `quire run`

Packages are downloaded before, into a folder that pip then installs from without a network: that time is the registry's
and is said apart (--network leaves it in the phases). The clone, the environment and the cache of packed weights are
new, in a folder that is deleted at the end (--keep keeps it). Phases are as scripts/set_up.py tells them: the native
kernels and the libraries run side by side, so that the longer one counts for the whole. Seconds are the clock's;
processor time is that of all processes of a row: where others work beside, it says more.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from quire.core.machine import processor

ROOT = Path(__file__).parents[2]


class Row(NamedTuple):
    """A phase: seconds of the clock, and of processors where they are known. A part lies within the row before it."""

    name: str
    seconds: float
    processor: float | None = None
    part: bool = False


def used() -> float:
    """Seconds of processors of all programs that ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


class Bench:
    """A folder that everything happens in, and the rows so far."""

    def __init__(self, folder: Path, network: bool) -> None:
        self.folder, self.network = folder, network
        self.packages = folder / "packages"
        self.packages.mkdir()
        self.rows: list[Row] = []
        # What earlier runs left, packed weights or packages, is of no help.
        self.variables = {
            name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")
        }
        self.variables |= {"XDG_CACHE_HOME": str(folder / "cache"), "PIP_NO_CACHE_DIR": "1"}
        if not network:
            self.variables |= {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(self.packages)}

    @contextmanager
    def row(self, name: str) -> Iterator[None]:
        """Time what is done within."""
        clock, processors = time.monotonic(), used()
        yield
        self.rows.append(Row(name, time.monotonic() - clock, used() - processors))

    def call(self, *words: str | Path, where: Path | None = None) -> None:
        """Run a program, without what it says. `SystemExit` with that when it fails."""
        run = subprocess.run(
            [str(word) for word in words], cwd=where, env=self.variables, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        if run.returncode:
            raise SystemExit(
                f"{' '.join(map(str, words))} ended with exit code {run.returncode}:\n{run.stdout[-4000:]}"
            )

    def download(self, *wanted: str | Path) -> None:
        """Ask the registry for packages, once and apart."""
        if self.network:
            return
        pip = (sys.executable, "-m", "pip", "download", "--quiet", "--dest", self.packages, "--prefer-binary")
        asked = dict(self.variables)
        for name in ("PIP_NO_INDEX", "PIP_FIND_LINKS"):
            asked.pop(name, None)
        if "PIP_FIND_LINKS" in os.environ:
            asked["PIP_FIND_LINKS"] = os.environ["PIP_FIND_LINKS"]
        began = time.monotonic()
        run = subprocess.run([*map(str, (*pip, *wanted))], env=asked, capture_output=True, text=True)
        if run.returncode:
            raise SystemExit(f"the packages were not downloaded:\n{run.stderr[-4000:]}")
        sizes = [path.stat().st_size for path in self.packages.iterdir()]
        took = time.monotonic() - began
        print(f"registry, apart: {len(sizes)} packages, {sum(sizes) / 1e6:.0f} MB, {took:.1f} s")

    def demo(self, quire: Path, where: Path) -> None:
        """Run `quire demo`, and note when the server was up and when the answers were there."""
        began, marks = time.monotonic(), []
        with subprocess.Popen(
            [quire, "demo"], cwd=where, env=self.variables, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        ) as run:
            assert run.stdout is not None
            said = []
            for line in run.stdout:
                said.append(line)
                if " is up after " in line or len(marks) == 1:
                    marks.append(time.monotonic() - began)
        if run.returncode or len(marks) != 2:
            raise SystemExit(f"quire demo ended with exit code {run.returncode}:\n{''.join(said)[-4000:]}")
        self.rows += [Row("server up", marks[0]), Row("first answers", marks[1] - marks[0])]

    def pull(self, quire: Path, model: str) -> None:
        """Download a model, apart."""
        asked = {name: value for name, value in self.variables.items() if not name.startswith("PIP_")}
        asked |= {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
        began = time.monotonic()
        subprocess.run([quire, "pull", model], env=asked, check=True, stdout=subprocess.DEVNULL)
        print(f"model, apart: quire pull {model}, {time.monotonic() - began:.1f} s")

    def first_token(self, quire: Path, model: str) -> None:
        """Run `quire run MODEL Hello`, and note when the first text was there and when all of it."""
        began, first, text = time.monotonic(), 0.0, b""
        words = [quire, "run", model, "Hello"]
        with subprocess.Popen(words, env=self.variables, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as run:
            assert run.stdout is not None
            while piece := os.read(run.stdout.fileno(), 1 << 16):
                first = first or time.monotonic() - began
                text += piece
        if run.returncode or not text.strip():
            raise SystemExit(f"quire run ended with exit code {run.returncode} and said {text!r}")
        print(f"Hello -> {text.decode().strip()}")
        self.rows.append(Row("first token", first))

    def table(self, title: str) -> None:
        """Print the rows, and the sum of those that follow one another."""
        print(f"{processor()}, {os.cpu_count()} cores, Python {platform.python_version()}: {title}")
        print(f"  {'':30}{'seconds':>10}{'of processors':>16}")
        for row in self.rows:
            name = f"  {row.name}" if row.part else row.name
            print(f"  {name:30}{row.seconds:10.1f}{'' if row.processor is None else f'{row.processor:16.1f}'}")
        print(f"  {'in all':30}{sum(row.seconds for row in self.rows if not row.part):10.1f}")


def clone(bench: Bench) -> None:
    """A clone, what `make demo` sets up there, and the demo."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wanted = [*project["build-system"]["requires"], "ninja", "cmake", *project["project"]["dependencies"]]
    bench.download("--constraint", ROOT / "constraints.txt", *wanted)
    there = bench.folder / "clone"
    with bench.row("git clone"):
        bench.call("git", "clone", "--quiet", ROOT, there)
    with bench.row("set up"):
        bench.call("make", "quire", f"PYTHON={sys.executable}", where=there)
    steps = json.loads((there / ".venv" / "set-up.json").read_text())
    bench.rows += [Row(name, step["seconds"], part=True) for name, step in steps.items()]
    bench.demo(there / ".venv" / "bin" / "quire", there)
    bench.table("make demo of a fresh clone")


def wheel(bench: Bench, path: Path, model: str) -> None:
    """The wheel in an empty environment, and `model`'s first token, or the demo."""
    bench.download(path)
    there = bench.folder / "environment"
    with bench.row("python -m venv"):
        bench.call(sys.executable, "-m", "venv", there)
    with bench.row("pip install"):
        bench.call(there / "bin" / "pip", "install", "--quiet", path)
    quire = there / "bin" / "quire"
    if model:
        bench.pull(quire, model)
        bench.first_token(quire, model)
    else:
        bench.demo(quire, bench.folder)
    bench.table(f"pip install {path.name}")


def main() -> None:
    """Print a row for each phase."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheel", type=Path)
    parser.add_argument("--run", metavar="MODEL", default="", help="With --wheel: ask this model instead of the demo.")
    parser.add_argument("--network", action="store_true", help="Download within the phases.")
    parser.add_argument("--keep", action="store_true", help="Keep the folder, and say where it is.")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="quire-first-start-"))
    try:
        bench = Bench(folder, args.network)
        if args.wheel is None:
            clone(bench)
        else:
            wheel(bench, args.wheel.resolve(), args.run)
    finally:
        if args.keep:
            print(folder)
        else:
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()
