"""The environment of a clone, .venv: make's targets call it, and it does what is missing there, and only that.

    python scripts/set_up.py demo    quire and what it needs
    python scripts/set_up.py dev     torch and the libraries of development: pytest, ruff, mypy, what tests compare with
    python scripts/set_up.py test    Triton's interpreter, too

The native kernels are built beside the downloads. A step is done again when what it is made of has changed, and tells
one line when it is done; what its programs print is shown only when it fails. `.venv/set-up.json` keeps the seconds.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
BIN = ROOT / ".venv" / "bin"
EXTRAS = ("dev", "clients")
COMPILERS = ("c++", "g++", "clang++")
NO_COMPILER = "quire: no C++ compiler was found to build the native kernels with: install g++ 12 or newer (or clang 16)"


@dataclass(frozen=True)
class Step:
    """A program to run, and what its result depends on."""

    name: str
    command: list[str]
    made_of: tuple[Path, ...] = ()
    names: tuple[str, ...] = ()
    """Files of which only the names matter."""
    larger: Step | None = None
    """One of the same name that does more: where it was done, this one is."""

    def digest(self) -> str:
        """Digest the command and the files: another one means that the step is done again."""
        found = hashlib.sha256(json.dumps([self.command, self.names]).encode())
        for path in self.made_of:
            found.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes())
        return found.hexdigest()


def pip(name: str, *words: str) -> Step:
    """A step of pip; modules are compiled when they are first imported, which most never are."""
    command = [str(BIN / "pip"), "install", "--quiet", "--disable-pip-version-check", "--no-compile"]
    return Step(name, [*command, "--constraint", "constraints.txt", *words], (ROOT / "constraints.txt",))


def native(units: str) -> Step:
    """The editable install, which builds the kernels of these units; it keeps a list of modules: their names count."""
    sources = sorted(path for path in (ROOT / "csrc").rglob("*") if path.is_file())
    made_of = [ROOT / name for name in ("pyproject.toml", "CMakeLists.txt", "src/quire/core/version.py")]
    modules = tuple(sorted(str(path.relative_to(ROOT)) for path in (ROOT / "src").rglob("*.py")))
    step = pip(
        "native kernels",
        f"--config-settings=cmake.define.QUIRE_UNITS={units}",
        "--no-build-isolation",
        "--no-deps",
        "--editable",
        ".",
    )
    return Step(step.name, step.command, (*made_of, *sources), modules)


@dataclass(frozen=True)
class Plan:
    """Steps one after the other, then two lanes side by side."""

    first: list[Step]
    lanes: list[list[Step]]


def plan(what: str, project: dict[str, Any]) -> Plan:
    """The steps for `demo`, `dev` or `test` of this pyproject.toml.

    Torch is installed alone and before what needs it: with it in place nothing pulls another build.
    """
    libraries = pip("libraries", *project["project"]["dependencies"])
    extras = project["project"]["optional-dependencies"]
    downloads = [libraries]
    if what != "demo":
        development = pip("libraries of development", *(word for name in EXTRAS for word in extras[name]))
        downloads = [pip("torch", "torch"), libraries, development]
    if what == "test":
        downloads.append(pip("triton", "--no-deps", "triton"))
    first = [
        Step("environment", [sys.executable, "-m", "venv", str(BIN.parent)]),
        pip("build tools", *project["build-system"]["requires"], "ninja", "cmake"),
    ]
    # Tests compare every unit with the portable one.
    asked = os.environ.get("QUIRE_UNITS", "")
    kernels = native(asked or "native;portable")
    if what == "demo" and not asked:
        kernels = replace(native("native"), larger=kernels)
    return Plan(first, [[kernels], downloads])


@dataclass
class Setting:
    """One run: what was done before and is done now, and the programs that run."""

    done: dict[str, dict[str, Any]]
    left: list[str] = field(default_factory=list)
    running: set[subprocess.Popen[bytes]] = field(default_factory=set)
    total: int = 0
    failed: str = ""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self, steps: list[Step]) -> None:
        """Do the steps in their order, until one of any lane fails."""
        for step in steps:
            began, digest = time.monotonic(), step.digest()
            with tempfile.TemporaryFile() as said:
                with self.lock:
                    if self.failed:
                        return
                    # A session of its own: pip's and ninja's own children end with it.
                    program = subprocess.Popen(
                        step.command, cwd=ROOT, env=environment(), stdout=said, stderr=said, start_new_session=True
                    )
                    self.running.add(program)
                code = program.wait()
                said.seek(0)
                text = said.read().decode(errors="replace").rstrip()
            with self.lock:
                self.running.discard(program)
                if code and not self.failed:
                    self.failed = f"{text}\n\n{step.name} failed (exit code {code}): {' '.join(step.command)}"
                    self.stop()
                if not self.failed:
                    self.finished(step.name, digest, time.monotonic() - began)

    def finished(self, name: str, digest: str, seconds: float) -> None:
        """Note that a step is done, and say what is left."""
        self.left.remove(name)
        self.done[name] = {"digest": digest, "seconds": round(seconds, 2)}
        (BIN.parent / "set-up.json").write_text(json.dumps(self.done, indent=1) + "\n")
        left = f"; left: {', '.join(self.left)}" if self.left else ""
        print(f"{self.total - len(self.left)} of {self.total}: {name}, {seconds:.1f} s{left}", flush=True)

    def stop(self) -> None:
        """End what runs."""
        for program in self.running:
            with suppress(ProcessLookupError):
                os.killpg(program.pid, signal.SIGTERM)


def environment() -> dict[str, str]:
    """What the steps' programs see: ninja and cmake of .venv come first."""
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return variables | {"PATH": f"{BIN}{os.pathsep}{os.environ.get('PATH', os.defpath)}"}


def missing(plan: Plan, done: dict[str, dict[str, Any]]) -> Plan:
    """The steps of a plan that are not done, or were done of something else. An environment that is there stays."""

    def is_done(step: Step) -> bool:
        ways = (step, step.larger) if step.larger else (step,)
        return done.get(step.name, {}).get("digest") in [way.digest() for way in ways]

    def kept(steps: list[Step]) -> list[Step]:
        return [step for step in steps if not is_done(step)]

    environment = [] if (BIN / "pip").exists() else plan.first[:1]
    return Plan([*environment, *kept(plan.first[1:])], [kept(lane) for lane in plan.lanes])


@contextmanager
def alone() -> Iterator[None]:
    """Wait for another run in this clone: `make -j lint test` starts two."""
    (ROOT / "build").mkdir(exist_ok=True)
    with (ROOT / "build" / "set-up.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def has_compiler() -> bool:
    """Whether CMake would find a C++ compiler."""
    return "CXX" in os.environ or any(shutil.which(name) for name in COMPILERS)


def set_up(what: str) -> None:
    """Do what is missing. `SystemExit` with all that a program printed where it fails."""
    kept = BIN.parent / "set-up.json"
    done: dict[str, dict[str, Any]] = json.loads(kept.read_text()) if kept.exists() else {}
    todo = missing(plan(what, tomllib.loads((ROOT / "pyproject.toml").read_text())), done)
    steps = [*todo.first, *(step for lane in todo.lanes for step in lane)]
    if not steps:
        return
    if todo.lanes[0] and not has_compiler():
        sys.exit(NO_COMPILER)
    setting = Setting(done, [step.name for step in steps], total=len(steps))
    print(f"setting up .venv: {', '.join(setting.left)}", flush=True)
    lanes = [threading.Thread(target=setting.run, args=(lane,)) for lane in todo.lanes]
    try:
        setting.run(todo.first)
        for lane in lanes:
            lane.start()
        for lane in lanes:
            lane.join()
    finally:
        with setting.lock:
            setting.failed = setting.failed or ("stopped" if setting.left else "")
            setting.stop()
    if setting.failed:
        sys.exit(setting.failed)


def main() -> None:
    """Set up for what the command line names."""
    what = sys.argv[1] if len(sys.argv) == 2 else ""
    if what not in ("demo", "dev", "test"):
        sys.exit("set_up.py: name one of demo, dev, test")
    with alone():
        set_up(what)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
