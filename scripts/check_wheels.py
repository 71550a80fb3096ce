"""The wheels of dist/ run where they promise to: `make wheel-check`, after `make wheels`. Slow: minutes, and a network.

    python scripts/check_wheels.py              both
    python scripts/check_wheels.py x86_64       one

x86_64: `quire doctor` and `quire demo` in an unpacked Debian 11 (glibc 2.31) that has no compiler. Its own Python
is too old, so CPython's sources, as Debian has them, are compiled in a second one that has a compiler.
aarch64: the same commands under qemu-user, with the libraries and the Python of an unpacked Debian 12 for arm64.

Nothing else should be running: quire bounds how long its processes take to start, and an emulator starts them slowly.
What is unpacked stays in build/wheel-check. Root is needed, for chroot. Debian: apt install mmdebstrap qemu-user
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
HERE = ROOT / "build" / "wheel-check"
BUILDS_PYTHON = ("gcc", "make", "dpkg-dev", "libc6-dev", "libffi-dev", "libssl-dev", "zlib1g-dev")
RUNS_PYTHON = ("libffi7", "libssl1.1", "zlib1g", "ca-certificates")
COMMANDS = (("doctor",), ("demo",))


def need(*programs: str) -> None:
    """End with what to install."""
    missing = [name for name in programs if shutil.which(name) is None]
    if missing:
        sys.exit(f"check_wheels.py: {', '.join(missing)} missing (Debian: apt install mmdebstrap qemu-user)")


def unpacked(name: str, suite: str, packages: tuple[str, ...], *options: str) -> Path:
    """A folder with a Debian and these packages, made once."""
    folder = HERE / name
    if not folder.exists():
        print(f"unpacking {name}", flush=True)
        HERE.mkdir(parents=True, exist_ok=True)
        half = HERE / f"{name}.half"
        shutil.rmtree(half, ignore_errors=True)
        subprocess.run(
            ["mmdebstrap", "--quiet", f"--include={','.join(packages)}", *options, suite, str(half)], check=True
        )
        half.rename(folder)
    return folder


def inside(root: Path, script: str) -> list[str]:
    """Words that run a shell's script in the root, with devices and processes of this machine."""
    enter = (
        f'cd "{root}" && mount --rbind /dev dev && mount --rbind /proc proc && mount --rbind /sys sys'
        f' && cp /etc/resolv.conf etc/resolv.conf && exec chroot . /bin/sh -ec "$1"'
    )
    return ["unshare", "--mount", "/bin/sh", "-c", enter, "sh", script]


def python_311() -> Path:
    """/opt/python of a Debian 11 with a compiler: Python 3.11 from the sources of Debian 12, made once."""
    builder = unpacked("builder", "bullseye", BUILDS_PYTHON, "--variant=minbase")
    if not (builder / "opt/python/bin/python3.11").exists():
        print("compiling Python 3.11 for glibc 2.31", flush=True)
        script = """
            cd /tmp && rm -rf python3.11*
            sources=/etc/apt/sources.list
            sed -n 's/^deb \\(\\S*\\) bullseye main.*/deb-src \\1 bookworm main/p' $sources > $sources.d/python.list
            apt-get -qq update && apt-get -qq source --download-only python3.11
            mkdir -p python && tar -xf python3.11*.orig.tar.* -C python --strip-components 1 && cd python
            ./configure --quiet --prefix=/opt/python --disable-test-modules --with-ensurepip=no
            make -s -j"$(nproc)" && make -s install
        """
        log = HERE / "python.log"
        with log.open("w") as out:
            done = subprocess.run(inside(builder, script), stdout=out, stderr=out)
        if done.returncode:
            sys.exit(f"check_wheels.py: Python was not built; {log} ends with:\n{log.read_text()[-3000:]}")
    return builder / "opt/python"


def install(wheel: Path, folder: Path, glibc: int, architecture: str) -> None:
    """The wheel and what it needs, as pip would install them on such a system with Python 3.11."""
    shutil.rmtree(folder, ignore_errors=True)
    platforms = [f"--platform=manylinux_2_{minor}_{architecture}" for minor in range(glibc, 16, -1)]
    platforms += [f"--platform=manylinux2014_{architecture}"]
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile"]
    pip += [
        "--only-binary=:all:",
        "--python-version=3.11",
        "--implementation=cp",
        "--abi=cp311",
        "--abi=abi3",
        "--abi=none",
    ]
    said([*pip, *platforms, f"--target={folder}", str(wheel)])


def check_x86_64(wheel: Path) -> None:
    """Run the commands in a Debian 11 without a compiler. `SystemExit` where one fails."""
    need("mmdebstrap", "unshare")
    python = python_311()
    root = unpacked("debian11", "bullseye", RUNS_PYTHON, "--variant=minbase")
    if not (root / "opt/python").exists():
        shutil.copytree(python, root / "opt/python", symlinks=True)
    install(wheel, root / "opt/quire", 31, "x86_64")
    there = "for name in cc gcc c++ g++ clang; do if command -v $name; then echo a compiler is there; exit 1; fi; done"
    print(said(inside(root, f"{there}; /lib/x86_64-linux-gnu/libc.so.6 | head -n 1")).strip())
    for words in COMMANDS:
        script = f"HOME=/root PYTHONPATH=/opt/quire /opt/python/bin/python3.11 -m quire {' '.join(words)}"
        report(wheel, words, inside(root, script), dict(os.environ))


def check_aarch64(wheel: Path) -> None:
    """Run the commands under qemu-user. `SystemExit` where one fails."""
    need("mmdebstrap", "qemu-aarch64")
    root = unpacked("arm64", "bookworm", ("python3.11", "libstdc++6"), "--variant=extract", "--arch=arm64")
    install(wheel, HERE / "quire-arm64", 36, "aarch64")
    # quire starts its server and engines by sys.executable, which is this: the kernel would not run the program itself.
    start = HERE / "python-arm64"
    start.write_text(f'#!/bin/sh\nexec qemu-aarch64 -0 "{start}" -L "{root}" "{root}/usr/bin/python3.11" "$@"\n')
    start.chmod(0o755)
    with tempfile.TemporaryDirectory() as home:
        variables = {"PYTHONHOME": "/usr", "PYTHONPATH": str(HERE / "quire-arm64"), "HOME": home, "LC_ALL": "C.UTF-8"}
        for words in COMMANDS:
            report(wheel, words, [str(start), "-m", "quire", *words], os.environ | variables)


def said(command: list[str], environment: dict[str, str] | None = None) -> str:
    """What the command printed. `SystemExit` with that where it fails."""
    run = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if run.returncode:
        sys.exit(f"check_wheels.py: exit code {run.returncode} of {' '.join(command)}:\n{run.stdout[-6000:]}")
    return run.stdout


def report(wheel: Path, words: tuple[str, ...], command: list[str], environment: dict[str, str]) -> None:
    """Run it, and print its last lines."""
    began = time.monotonic()
    text = said(command, environment).rstrip()
    print(f"{wheel.name}: quire {' '.join(words)} in {time.monotonic() - began:.1f} s")
    print("    " + "\n    ".join(text.splitlines()[-12:]), flush=True)


CHECKS = {"x86_64": check_x86_64, "aarch64": check_aarch64}


def main() -> None:
    """Check the wheels that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("architectures", nargs="*", metavar="|".join(CHECKS))
    parser.add_argument("--wheels", type=Path, default=ROOT / "dist")
    args = parser.parse_args()
    if os.geteuid():
        sys.exit("check_wheels.py: run it as root, which chroot needs")
    for architecture in args.architectures or CHECKS:
        found = [
            path
            for path in args.wheels.glob("quire-*.whl")
            if re.search(rf"manylinux\S*_{architecture}\.whl", path.name)
        ]
        if len(found) != 1:
            sys.exit(
                f"check_wheels.py: {args.wheels} has {len(found)} wheels for {architecture}: make wheels makes one"
            )
        CHECKS[architecture](found[0])


if __name__ == "__main__":
    main()
