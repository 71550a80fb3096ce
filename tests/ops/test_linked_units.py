"""What the linker may take from one instruction set's unit for all: nothing."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from paths import ROOT

CMAKE = shutil.which("cmake", path=str(Path(sys.executable).parent)) or shutil.which("cmake")
NM, COMPILER = shutil.which("nm"), shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
pytestmark = pytest.mark.skipif(None in (CMAKE, NM, COMPILER), reason="needs what builds the extension")


def checked(*objects: Path) -> subprocess.CompletedProcess[str]:
    """The build's check (csrc/check_units.cmake) of these objects."""
    given = [f"-DNM={NM}", f"-DOBJECTS={';'.join(map(str, objects))}", "-P", str(ROOT / "csrc/check_units.cmake")]
    return subprocess.run([str(CMAKE), *given], capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("text", "shared"),
    [
        ("inline int twice(int x) { return 2 * x; }\nint f(int x) { return twice(x); }", True),
        ("template <class T> T twice(T x) { return 2 * x; }\nint f(int x) { return twice(x); }", True),
        ("namespace { inline int twice(int x) { return 2 * x; } }\nint f(int x) { return twice(x); }", False),
    ],
)
def test_a_unit_that_shares_code_fails_the_build(text: str, shared: bool, tmp_path: Path) -> None:
    source, made = tmp_path / "unit.cpp", tmp_path / "units" / "unit.o"
    made.parent.mkdir()
    source.write_text(text)
    subprocess.run([str(COMPILER), "-O0", "-c", str(source), "-o", str(made)], check=True)
    done = checked(made)
    assert (done.returncode != 0) == shared, done.stderr
    assert not shared or "twice" in done.stderr


def test_the_units_that_were_built_share_nothing() -> None:
    """The build checked them too; objects of other builds here, those of sanitizers aside, are looked at again."""
    built = [
        path
        for path in ROOT.glob("build/*/CMakeFiles/_native.dir/csrc/units/*.o")
        if path.parts[len(ROOT.parts) + 1] != "sanitize"
    ]
    assert checked(*built).returncode == 0
