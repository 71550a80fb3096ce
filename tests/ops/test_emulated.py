"""Units that this machine cannot run, in a program of their own under an emulator: every op case, by the same tests."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from paths import CSRC, ROOT, SUPPORT, TESTS

FILES = (
    "emulated_bits", "test_ops", "test_linked_units", "test_moe_ops", "test_code_weights", "test_bf12",
    "test_kv_formats",
    "test_tree_attention", "test_fused", "test_four_bit_formats", "test_mla", "test_sampler_ops",
    "test_packed_tables", "test_super_blocks", "test_matrix_kinds",
)  # fmt: skip


@dataclass(frozen=True)
class Target:
    """How the program is built (tools, arguments of CMake) and run, and the units it must have."""

    name: str
    needs: tuple[str, ...]
    cmake: tuple[str, ...]
    runner: tuple[str, ...]
    units: tuple[str, ...]

    @property
    def folder(self) -> Path:
        return ROOT / "build" / "emulate" / self.name

    @property
    def command(self) -> str:
        return " ".join([*self.runner, str(self.folder / "quire-emulate")])


EMULATE = CSRC / "emulate"
ARM = Target(
    "aarch64",
    ("aarch64-linux-gnu-g++", "qemu-aarch64"),
    (f"-DCMAKE_TOOLCHAIN_FILE={EMULATE / 'aarch64.cmake'}",),
    ("qemu-aarch64", "-cpu", "max"),
    ("neon_i8mm", "neon", "portable"),
)
CLIENT = Target("avxvnni", (), (f"-DCMAKE_PROJECT_INCLUDE={EMULATE / 'avxvnni.cmake'}",), (), ("avxvnni", "portable"))
TILES = Target("amx", (), (f"-DCMAKE_PROJECT_INCLUDE={EMULATE / 'amx.cmake'}",), (), ("amx", "avx512", "portable"))
WIDE = Target(
    "avx512",
    (),
    (f"-DCMAKE_PROJECT_INCLUDE={EMULATE / 'avx512.cmake'}",),
    (),
    ("amx", "avx512", "avx512vnni", "portable"),
)


def build(target: Target) -> None:
    """Build the program, or skip the test with what is missing."""
    missing = [tool for tool in (*target.needs, "cmake", "ninja") if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)} (Debian: apt-get install qemu-user g++-aarch64-linux-gnu)")
    units = f"-DQUIRE_UNITS={';'.join(target.units)}"
    make = ["cmake", "-S", str(EMULATE), "-B", str(target.folder), "-G", "Ninja", units, *target.cmake]
    for command in (make, ["cmake", "--build", str(target.folder)]):
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


def run_pytest(target: Target, file: str, *args: str) -> str:
    """One file's tests of ops with the program in the place of the extension; what pytest printed."""
    path = os.pathsep.join([str(SUPPORT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    env = os.environ | {"QUIRE_EMULATE": target.command, "PYTHONPATH": path}
    # A model of 16-bit floats took 187 s under qemu alone, more than a test may beside other work.
    plain = ("-q", "-p", "emulated", "-p", "no:cacheprovider", "-n", "2", "--durations", "3", "--timeout", "1200")
    command = [sys.executable, "-m", "pytest", *plain, *args, str(next(TESTS.rglob(f"{file}.py")))]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True)
    if done.returncode == pytest.ExitCode.NO_TESTS_COLLECTED:
        pytest.skip("no case of this file names the unit")
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    return done.stdout


def units_of(target: Target, *runner: str) -> list[str]:
    """What the program says it can run, as the extension does at load."""
    from emulated import Emulated

    program = Emulated(" ".join([*(runner or target.runner), str(target.folder / "quire-emulate")]))
    program.close()
    return program.units()


@pytest.fixture(scope="module")
def arm() -> Target:
    build(ARM)
    return ARM


@pytest.fixture(scope="module")
def client() -> Target:
    """The same source and registers as the unit that ships, save for the prefix of one instruction."""
    build(CLIENT)
    if "avxvnni" not in units_of(CLIENT, "env"):
        pytest.skip("this processor has no dot products of bytes in 256 bits (AVX-512VL with VNNI)")
    return CLIENT


@pytest.fixture(scope="module")
def tiles() -> Target:
    """The object code that ships; what its tile instructions do is in csrc/emulate/tiles.cpp."""
    build(TILES)
    if "amx" not in units_of(TILES, "env"):
        pytest.skip("this processor has no AVX-512 with VNNI and BF16")
    return TILES


@pytest.fixture(scope="module")
def wide() -> Target:
    """The same source with two halves for each vector: csrc/emulate/avx512.h has what the instructions do."""
    build(WIDE)
    if not set(WIDE.units) <= set(units_of(WIDE, "env")):
        pytest.skip("this processor has no AVX2")
    return WIDE


@pytest.mark.slow
def test_the_units_of_aarch64_processors(arm: Target) -> None:
    assert units_of(arm) == list(arm.units)
    assert units_of(arm, "qemu-aarch64", "-cpu", "neoverse-n1") == ["neon", "portable"]  # no I8MM
    assert units_of(arm, "qemu-aarch64", "-cpu", "cortex-a72") == ["portable"]  # no dot products


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES)
def test_every_op_case_on_aarch64(arm: Target, file: str) -> None:
    print(run_pytest(arm, file))


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES)
def test_every_op_case_on_avx_vnni(client: Target, file: str) -> None:
    print(run_pytest(client, file, "-k", "avxvnni"))


@pytest.mark.slow
@pytest.mark.parametrize("file", (*FILES, "test_amx", "test_experts"))
def test_every_op_case_on_tile_registers(tiles: Target, file: str) -> None:
    print(run_pytest(tiles, file, "-k", "not avx and not portable"))


@pytest.mark.slow
@pytest.mark.parametrize("file", (*FILES, "test_amx", "test_experts"))
def test_every_op_case_on_avx_512(wide: Target, file: str) -> None:
    print(run_pytest(wide, file, "-k", "not avx2 and not avxvnni and not portable"))
