"""Headers of the native kernels: each compiles alone, as an editor reads it, without a warning."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest

from paths import CSRC

UNITS = CSRC / "units"
COMPILER = shutil.which("g++") or shutil.which("c++")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")

FLAGS = {
    "portable": ("vec_portable.h", ""),
    "avx2": ("vec_avx2.h", "-march=x86-64-v3"),
    "amx": (
        "vec_avx512.h",
        "-march=x86-64-v4 -mavx512vnni -mavx512bf16 -mamx-tile -mamx-int8 -mamx-bf16 -Wno-uninitialized",
    ),
}


def problems(header: str, unit: str) -> str:
    """What the compiler says of a file that includes that header and nothing else."""
    vectors, flags = FLAGS[unit]
    command = [
        str(COMPILER), "-fsyntax-only", "-x", "c++", "-std=gnu++20", "-Wall", "-Wextra", "-Wno-maybe-uninitialized",
        "-DQUIRE_X86", f"-DQUIRE_UNIT={unit}", f'-DQUIRE_UNIT_VEC="{vectors}"',
        f"-I{CSRC}", f"-I{UNITS}", *flags.split(), "-",
    ]  # fmt: skip
    return subprocess.run(command, input=f'#include "{header}"\n', capture_output=True, text=True).stderr


def headers_of(unit: str) -> list[str]:
    """Those that the unit has a use for: its own vectors, and what is of tile registers only where it has some."""
    vectors = FLAGS[unit][0]
    names = sorted(path.name for path in UNITS.glob("*.h"))
    return [n for n in names if (not n.startswith("vec_") or n == vectors) and ("amx" not in n or unit == "amx")]


@pytest.mark.slow
@pytest.mark.parametrize("unit", FLAGS)
def test_every_header_compiles_alone(unit: str) -> None:
    said = {header: text for header in headers_of(unit) if (text := problems(header, unit))}
    assert not said


def test_the_vectors_of_this_architecture_compile_alone() -> None:
    assert not problems("vec_portable.h", "portable") and not problems("linear_tiles.h", "portable")


def test_headers_say_what_they_need() -> None:
    """Guarded, in the namespace of their unit, and in an unnamed one: no function of a unit may be another's."""
    for path in UNITS.glob("*.h"):
        text = path.read_text()
        assert "#pragma once" in text, path.name
        if path.name != "unit.h":
            assert "namespace quire::QUIRE_UNIT {" in text, path.name
        if re.search(r"^(inline|void|template|QUIRE_INLINE)", text, re.MULTILINE) and path.name not in (
            "kind.h",
            "kinds.h",
        ):
            assert re.search(r"^namespace \{$", text, re.MULTILINE), path.name
