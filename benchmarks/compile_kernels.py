"""Compile every launch of the GPU's kernels for devices that are not here; record registers, shared memory and spills.

    python benchmarks/compile_kernels.py [--target sm_90 sm_80 gfx942] [--only attention] [--again] [--seconds 500]

Launches are those of `gpu_launches.py`. Rows are written one by one, and what the file has of the same source is not
compiled again: the whole may be made in parts (`--seconds`), and after a change only what it touched is. All of it from
nothing takes some 25 minutes of one core.

A row with an error fails the run; so does one that spills more than `SPILLED` bytes without a reason in `EXPLAINED`.
`matrix` is the matrix instruction: version, warps of a tile, shape. Rows of one family must agree in it where bits
depend on it; tests/ops/triton/test_gpu_kernels.py looks.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("TRITON_INTERPRET", "0")

from gpu_launches import all_launches
from gpu_variants import CHIPS, Variant, variants

RESULTS = Path(__file__).parent / "results" / "gpu_kernels.json"
SPILLED = 0
"""Bytes per thread that a kernel may spill."""
FULL = (
    "all 255 registers are in use, or as many as leave room for a second program: at most 26 words of a few hundred go "
    "to memory; tiles of half the keys would need none, and twice the steps. To be timed on a device."
)
EXPLAINED = {
    ("sm_90", "split: "): (56, FULL), ("sm_90", "chunk: "): (88, FULL),
    ("sm_80", "split: "): (40, FULL), ("sm_80", "chunk: "): (88, FULL),
    ("sm_80", "grouped: int4 g128, f32 rows"): (16, "float32 products use plain arithmetic: few words, once a tile"),
    ("gfx942", "chunk: latents of 512, 16 heads, f32"): (44, "float32 latents are for tests"),
}  # fmt: skip
"""(target, beginning of a name) -> most bytes, and why they are borne."""
Row = dict[str, Any]


def compiled(variant: Variant, target: str) -> Any:
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


def resources(kernel: Any, target: str) -> Row:
    """Registers per thread, bytes of shared memory and bytes spilled to memory per thread; the matrix instruction."""
    found: Row = {"shared": int(kernel.metadata.shared), "matrix": matrix(kernel.asm["ttgir"])}
    if target.startswith("gfx"):
        text = kernel.asm["amdgcn"]
        for name, field in (("registers", "vgpr_count"), ("spills", "private_segment_fixed_size")):
            found[name] = max((int(n) for n in re.findall(rf"\.{field}:\s+(\d+)", text)), default=0)
        return found
    report = _assembled(kernel.asm["ptx"], "sm_90a" if target == "sm_90" else target)
    found["registers"] = max(int(n) for n in re.findall(r"Used (\d+) registers", report))
    found["spills"] = sum(int(n) for n in re.findall(r"(\d+) bytes spill (?:stores|loads)", report))
    return found


def matrix(text: str) -> str:
    """The layouts of products in Triton's GPU code, as "version: warps shape"; none where plain numbers are added."""
    layouts = re.findall(r"(?:nvidia_mma|amd_mfma)<\{([^}]*)\}", text)
    found = set()
    for layout in layouts:
        version = re.search(r"version(?:Major)? = (\d+)", layout)
        warps, shape = (re.search(rf"{name} = \[([\d, ]+)\]", layout) for name in ("warpsPerCTA", "instrShape"))
        assert version and warps and shape, layout
        found.add(f"{version[1]}: {warps[1].replace(', ', 'x')} {shape[1].replace(', ', 'x')}")
    return "; ".join(sorted(found))


def _assembled(ptx: str, arch: str) -> str:
    """What ptxas, which comes with Triton, says of a program."""
    import triton.backends.nvidia as nvidia

    ptxas = Path(nvidia.__file__).parent / "bin" / "ptxas"
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [ptxas, "-v", f"--gpu-name={arch}", file.name, "-o", os.devnull]
        return subprocess.run(command, check=True, capture_output=True, text=True).stderr


def row(variant: Variant, target: str) -> Row:
    """One measurement, or the reason why there is none."""
    facts: Row = {"kernel": variant.name, "target": target, "key": variant.key, "source": variant.kernel.cache_key[:10],
                  "warps": variant.num_warps, "stages": variant.num_stages}  # fmt: skip
    try:
        facts |= resources(compiled(variant, target), target)
    except subprocess.CalledProcessError as error:
        return facts | {"error": str(error.stderr).strip()[-400:]}
    except Exception as error:  # whatever a compiler throws is what there is to report
        return facts | {"error": f"{type(error).__name__}: {str(error).strip()[-400:]}"}
    limit = CHIPS[target].shared << 10
    if facts["shared"] > limit:
        facts["error"] = f"takes {facts['shared']:,} bytes of shared memory, {target} has {limit:,}"
    return facts


def bears(facts: Row) -> bool:
    """Whether a row is as it should be."""
    most = max((most for (target, name), (most, _) in EXPLAINED.items()
                if facts["target"] == target and facts["kernel"].startswith(name)), default=SPILLED)  # fmt: skip
    return "error" not in facts and facts["spills"] <= most


def said(facts: Row) -> str:
    """A row as text."""
    if "error" in facts:
        return f"FAILED: {facts['error']}"
    return f"{facts['registers']:4} registers {facts['shared']:7,} B shared {facts['spills']:5} B spilled"


def read(path: Path) -> dict[tuple[str, str], Row]:
    """(target, name) -> row."""
    rows = json.loads(path.read_text())["kernels"] if path.exists() else []
    return {(r["target"], r["kernel"]): r for r in rows}


def write(path: Path, rows: dict[tuple[str, str], Row]) -> None:
    """A line per row."""
    import triton

    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(json.dumps(rows[key]) for key in sorted(rows))
    path.write_text(f'{{"triton": "{triton.__version__}", "kernels": [\n{lines}\n]}}\n')


def main() -> None:
    """Compile what is missing or changed, print it, write it."""
    if os.environ["TRITON_INTERPRET"] != "0":
        sys.exit("TRITON_INTERPRET is set: kernels would be Python functions, which cannot be compiled; unset it")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", nargs="+", default=list(CHIPS), choices=list(CHIPS))
    parser.add_argument("--only", default="", help="launches whose name contains this")
    parser.add_argument("--again", action="store_true", help="also what has not changed")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after so many; a later run goes on")
    parser.add_argument("--output", type=Path, default=RESULTS)
    args = parser.parse_args()
    started, rows, left, wrong = time.monotonic(), read(args.output), 0, 0
    for target in args.target:
        listed = variants(target, all_launches)
        names = {v.name for v in listed}
        rows = {key: r for key, r in rows.items() if key[0] != target or key[1] in names}
        for variant in listed:
            if args.only not in variant.name:
                continue
            found = rows.get((target, variant.name), {})
            fresh = (found.get("key"), found.get("source")) == (variant.key, variant.kernel.cache_key[:10])
            if args.again or not fresh:
                if time.monotonic() - started > args.seconds:
                    left += 1
                    continue
                found = rows[target, variant.name] = row(variant, target)
                write(args.output, rows)
                print(f"{target:7} {variant.name:60} {said(found)}", flush=True)
            if not bears(found):
                wrong += 1
                print(f"{target:7} {variant.name:60} NOT BORNE: {said(found)}", flush=True)
    write(args.output, rows)
    print(f"{len(rows)} rows, {wrong} not borne, {left} still to be compiled")
    sys.exit(bool(wrong or left))


if __name__ == "__main__":
    main()
