"""Compilation of every launch of the GPU's kernels for devices that are not here: registers, shared memory, spills.

    python -m benchmarks.gpu.compile_kernels [--target sm_90 sm_80 gfx942] [--only attention] [--again] [--seconds 500]

Launches are those of `launches.py`, made on CPU tensors with a `Gpu` of the chip in question, so that the sizes, the
constants and the types are those of serving; the kernels do not run. Rows are written one by one, and what the file has
of the same source is not compiled again: the whole may be made in parts (`--seconds`), and after a change only what it
touched is. All of it from nothing takes some 25 minutes of one core.

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

import hashlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from triton.runtime.jit import KernelInterface

from benchmarks.gpu.launches import all_launches
from quire.ops.triton.gpu import Chip, Gpu
from quire.ops.triton.runtime import Immediate

RESULTS = Path(__file__).parents[1] / "results" / "gpu_kernels.json"
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


CHIPS = {
    "sm_90": Chip("NVIDIA H200", 132, 227, True, True),
    "sm_80": Chip("NVIDIA A100", 108, 163, False, True),
    "gfx942": Chip("AMD Instinct MI300X", 304, 64, False, False),
}
"""Target of the compiler -> a device of it."""
TYPES = {
    torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.float64: "*fp64",
    torch.float8_e4m3fn: "*fp8e4nv", torch.uint8: "*u8", torch.int8: "*i8", torch.int32: "*i32", torch.int64: "*i64",
}  # fmt: skip


@dataclass(frozen=True)
class Variant:
    """A kernel as one launch compiles it.

    `signature`: argument -> Triton's name of its type ("*bf16", "i32", "fp32"), constants left out. `constants`:
    argument -> value of every `tl.constexpr`, and of every argument that is None or a 1 that is specialized on.
    `aligned`: arguments divisible by 16, as pointers and most sizes are.
    """

    name: str
    kernel: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    num_warps: int
    num_stages: int
    aligned: tuple[str, ...]

    @property
    def key(self) -> str:
        """Digest of everything but the kernel's own source and the name."""
        facts = [self.kernel.__name__, sorted(self.signature.items()), self.num_warps, self.num_stages, self.aligned,
                 sorted((name, str(value)) for name, value in self.constants.items())]  # fmt: skip
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:10]


def stand_in(target: str) -> Gpu:
    """A device of a target, on which nothing runs."""
    return Gpu(torch.device("cpu"), CHIPS[target], False, Immediate())


def variants(target: str, launches: Callable[[Gpu], Iterator[tuple[str, Callable[[], object]]]]) -> list[Variant]:
    """What `launches` compile for a target, each once, under the name of the first launch that needs it."""
    gpu = stand_in(target)
    found: dict[str, Variant] = {}
    names: set[str] = set()
    for label, launch in launches(gpu):
        for made in written_down(label, launch):
            if made.key not in found:
                if made.name in names:
                    raise ValueError(f"two launches named {made.name!r} compile differently: give each its label")
                names.add(made.name)
                found[made.key] = made
    return list(found.values())


def written_down(label: str, launch: Callable[[], object]) -> list[Variant]:
    """The launches that a call makes."""
    made: list[Variant] = []
    with _no_launches(lambda kernel, args, named: made.append(_variant(label, kernel, args, named))):
        launch()
    return made


@contextmanager
def _no_launches(note: Callable[[Any, tuple[Any, ...], dict[str, Any]], None]) -> Iterator[None]:
    """Kernels are noted instead of launched, whether they would be compiled or interpreted."""
    kept = KernelInterface.__getitem__
    KernelInterface.__getitem__ = lambda kernel, grid: lambda *args, **named: note(kernel, args, named)
    try:
        yield
    finally:
        KernelInterface.__getitem__ = kept


def _variant(label: str, kernel: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Variant:
    """As Triton specializes: on None, on 1, on divisibility by 16, except where a kernel forbids it."""
    named = dict(named)
    warps, stages = named.pop("num_warps", 4), named.pop("num_stages", 3)
    values = dict(zip(kernel.arg_names, args, strict=False)) | named
    plain = getattr(kernel, "kwargs", {}).get("do_not_specialize") or getattr(kernel, "do_not_specialize", None) or ()
    signature, constants, aligned = dict[str, str](), dict[str, Any](), []
    for name, parameter in inspect.signature(kernel.fn).parameters.items():
        value = values[name]
        free = type(value) is int and name not in plain
        if "constexpr" in str(parameter.annotation) or value is None or (free and value == 1):
            constants[name] = getattr(value, "value", value)
            continue
        signature[name] = TYPES[value.dtype] if isinstance(value, Tensor) else _scalar(value)
        if isinstance(value, Tensor) or (free and value % 16 == 0):
            aligned.append(name)
    name = f"{kernel.__name__.removesuffix('_kernel')}: {label}"
    return Variant(name, kernel, signature, constants, warps, stages, tuple(aligned))


def _scalar(value: float) -> str:
    if isinstance(value, float):
        return "fp32"
    return "i32" if -(1 << 31) <= value < 1 << 31 else "i64"


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
