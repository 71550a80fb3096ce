"""Compile every GPU kernel for devices that are not here, and record registers, shared memory and spills.

    python benchmarks/compile_kernels.py [--target sm_90 sm_80 gfx942] [--only attention] [--output FILE]

Kernels are those that modules of quire.ops.triton list as `VARIANTS`. A kernel that does not compile is a row with the
error, and the exit code is 1; so it is when one spills on sm_90, which its sizes in ops/triton/configs can prevent.
Rows of other kernels that the file holds stay.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "gpu_kernels.json"
SHARED_LIMIT = {"sm_90": 227 << 10, "sm_80": 163 << 10, "gfx942": 64 << 10}
"""Bytes of shared memory that a program may take."""
SPILLED = 96
"""Bytes per thread that a kernel may spill: a dozen words each way, next to tiles of 64 and more numbers a thread."""


def variants() -> list[tuple[str, Any]]:
    """(module, variant) of every kernel that is listed."""
    package = importlib.import_module("quire.ops.triton")
    found = []
    for info in pkgutil.iter_modules(package.__path__):
        module = importlib.import_module(f"quire.ops.triton.{info.name}")
        listed = getattr(module, "VARIANTS", ())
        found += [(info.name, variant) for variant in (listed() if callable(listed) else listed)]
    return found


def compiled(variant: Any, target: str) -> Any:
    """The kernel as Triton compiles it for `target`, without a device."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    where = GPUTarget("hip", target, 64) if target.startswith("gfx") else GPUTarget("cuda", int(target[3:]), 32)
    names = variant.kernel.arg_names
    signature = {n: "constexpr" if n in variant.constants else variant.signature[n] for n in names}
    constants = {(names.index(n),): value for n, value in variant.constants.items()}
    attributes = {(names.index(n),): [["tt.divisibility", 16]] for n in variant.aligned}
    source = ASTSource(variant.kernel, signature, constants, attributes)
    options = {"num_warps": variant.num_warps, "num_stages": variant.num_stages}
    return triton.compile(source, target=where, options=options)


def resources(kernel: Any, target: str) -> dict[str, int]:
    """Registers per thread, bytes of shared memory and bytes spilled to memory per thread."""
    found = {"shared": int(kernel.metadata.shared)}
    if target.startswith("gfx"):
        text = kernel.asm["amdgcn"]
        for name, field in (("registers", "vgpr_count"), ("spills", "private_segment_fixed_size")):
            found[name] = max((int(n) for n in re.findall(rf"\.{field}:\s+(\d+)", text)), default=0)
        return found
    report = _assembled(kernel.asm["ptx"], "sm_90a" if target == "sm_90" else target)
    found["registers"] = max(int(n) for n in re.findall(r"Used (\d+) registers", report))
    found["spills"] = sum(int(n) for n in re.findall(r"(\d+) bytes spill (?:stores|loads)", report))
    return found


def _assembled(ptx: str, arch: str) -> str:
    """What ptxas, which comes with Triton, says of a program."""
    import triton.backends.nvidia as nvidia

    ptxas = Path(nvidia.__file__).parent / "bin" / "ptxas"
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [ptxas, "-v", f"--gpu-name={arch}", file.name, "-o", os.devnull]
        return subprocess.run(command, check=True, capture_output=True, text=True).stderr


def row(module: str, variant: Any, target: str) -> dict[str, Any]:
    """One measurement, or the reason why there is none."""
    facts = {"module": module, "kernel": variant.name, "target": target, "warps": variant.num_warps,
             "stages": variant.num_stages}  # fmt: skip
    try:
        facts |= resources(compiled(variant, target), target)
    except subprocess.CalledProcessError as error:
        return facts | {"error": str(error.stderr).strip()[-400:]}
    except Exception as error:  # whatever a compiler throws is what there is to report
        return facts | {"error": f"{type(error).__name__}: {str(error).strip()[-400:]}"}
    if facts["shared"] > SHARED_LIMIT[target]:
        facts["error"] = f"takes {facts['shared']:,} bytes of shared memory, {target} has {SHARED_LIMIT[target]:,}"
    return facts


def said(facts: dict[str, Any]) -> str:
    """A row as text."""
    if "error" in facts:
        return f"FAILED: {facts['error']}"
    return f"{facts['registers']:4} registers {facts['shared']:7,} B shared {facts['spills']:5} B spilled"


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    """Put rows in place of those of the same kernels and targets, so that a file can be made piece by piece."""
    import triton

    path.parent.mkdir(parents=True, exist_ok=True)
    old = json.loads(path.read_text())["kernels"] if path.exists() else []
    found = {(r["module"], r["kernel"], r["target"]): r for r in [*old, *rows]}
    lines = ",\n".join("  " + json.dumps(found[key]) for key in sorted(found))
    path.write_text(f'{{"triton": "{triton.__version__}", "kernels": [\n{lines}\n]}}\n')


def main() -> None:
    """Compile, print, write."""
    if os.environ.setdefault("TRITON_INTERPRET", "0") != "0":
        sys.exit("TRITON_INTERPRET is set: kernels would be Python functions, which cannot be compiled; unset it")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", nargs="+", default=["sm_90", "sm_80", "gfx942"], choices=list(SHARED_LIMIT))
    parser.add_argument("--only", default="", help="kernels whose module or name contains this")
    parser.add_argument("--output", type=Path, default=RESULTS)
    args = parser.parse_args()
    rows = []
    for module, variant in variants():
        if args.only not in f"{module}.{variant.name}":
            continue
        for target in args.target:
            if variant.targets and target not in variant.targets:
                continue
            rows.append(row(module, variant, target))
            print(f"{target:7} {variant.name:44} {said(rows[-1])}", flush=True)
    write(args.output, rows)
    wrong = [r for r in rows if "error" in r and not r["target"].startswith("gfx")]
    spilling = [r for r in rows if r["target"] == "sm_90" and r.get("spills", 0) > SPILLED]
    print(f"{len(rows)} compiled, {len(wrong)} failed on NVIDIA, {len(spilling)} spill on sm_90")
    sys.exit(bool(wrong or spilling))


if __name__ == "__main__":
    main()
