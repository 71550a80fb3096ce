"""Which families load in which formats: found by trying every pair on a tiny checkpoint. `make table` writes
docs/models/pairs.md.

The matrices of a checkpoint hold numbers that most formats keep exactly, so that a pair is right when its logits are
those of the same checkpoint in f32, the rounding of activations and of the other formats apart.
"""

from __future__ import annotations

import ast
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import foreign_weights as foreign
from encoder_models import ENCODERS as ENCODER_MODELS
from encoder_models import write_encoder
from family_tensors import RELATIVES, write_relative
from gguf_families import FAMILIES as GGUF_WRITTEN
from gguf_writing import add_tokenizer, small
from model_variants import ENCODERS, MIXTURES, Encoded
from model_variants import LATENTS as LATENT
from oracle import BACKENDS, OWN_NAMES, backend, edit_config, logits, write
from paged_model import VARIANTS, Paged, load, prompt
from paths import DOCS, SOURCE
from quantized_checkpoints import bits_and_bytes
from quire.compress.layouts.gguf import write_gguf
from quire.core.errors import QuireError
from quire.model.describe import open_model
from quire.model.disk.gguf_architectures import ARCHITECTURES
from quire.model.families.encoders import ENCODERS as ENCODER_ROWS
from quire.model.families.table import FAMILIES
from quire.model.load.roles import DISK_ROLES
from quire.model.mixers.layer_mixers import states_of
from quire.model.spec import CONVOLUTION
from quire.quant.codebook import NF4
from sparse_variants import ENTRIES, SPARSE, WHOLE
from speech_models import HEARING, Heard, frames

PAGE = DOCS / "models" / "pairs.md"
BEGIN, END = "<!-- families x formats: make table -->\n", "<!-- end of families x formats -->\n"
WIDE = {"intermediate_size": 128, "head_dim": 16, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64,
        "shared_intermediate_size": 128, "mamba_head_dim": 16, "time_step_rank": 64, "mamba_dt_rank": 64,
        "adapter_rank": 64, "expert_ffn_hidden_size": 64, "share_expert_dim": 64,
        "ffn_dim": 128, "d_ff": 128, "dff": 128, "intermediate_size_mlp": 128, "hidden_size_per_layer_input": 64,
        "laurel_rank": 64, "d_kv": 16, "q_lora_rank": 64, "kv_lora_rank": 64, "v_head_dim": 16,
        "linear_head_dim": 64, "linear_key_head_dim": 64, "linear_value_head_dim": 64,
        "linear_num_value_heads": 8, "shared_experts_intermediate_size": 64, "swa_q_lora_rank": 64,
        "swa_kv_lora_rank": 64, "swa_v_head_dim": 16, "o_lora_rank": 64, "o_groups": 1,
        "linear_num_heads": 8}  # fmt: skip
"""Sizes that groups of 32 and blocks of 64 divide."""
STEP = 2.0**-5
Parts = dict[str, Tensor]


def on_grid(w: Tensor) -> Tensor:
    """Whole numbers from -6 to 6 without 5, which 4-bit integers, fp8 and mxfp4 all keep."""
    codes = (w.float() / STEP).round().clamp(-6, 6)
    return torch.where(codes.abs() == 5, codes.sign() * 6, codes)


def four_bits(pack: foreign.Packer) -> Callable[[Tensor], Parts]:
    """An integer format in groups of 32, zero point in the middle."""

    def convert(codes: Tensor) -> Parts:
        groups = codes.shape[0], codes.shape[1] // 32
        return pack(codes.long() + 8, torch.full(groups, 8), torch.full(groups, STEP, dtype=torch.float16))

    return convert


def fp8(codes: Tensor) -> Parts:
    """A scale per row."""
    return {"weight": codes.to(torch.float8_e4m3fn), "weight_scale": torch.full((len(codes), 1), STEP)}


def nf4(codes: Tensor) -> Parts:
    """bitsandbytes: blocks of 64, the nearest number of its table."""
    return bits_and_bytes(NF4, codes * STEP)[0]


FILES: dict[str, tuple[dict[str, Any], Callable[[Tensor], Parts], float]] = {
    "GPTQ": ({"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False},
             four_bits(foreign.gptq(4, 32)), 2e-3),
    "AWQ": ({"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True},
            four_bits(foreign.awq), 2e-3),
    "compressed-tensors": (foreign.compressed_config("pack-quantized", num_bits=4, type="int", symmetric=True,
                                                     strategy="group", group_size=32),
                           four_bits(foreign.packed(4, True)), 2e-3),
    "FP8": ({"quant_method": "fbgemm_fp8"}, fp8, 3e-2),
    "bitsandbytes": ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, nf4, 0.05),
}  # fmt: skip
"""Format -> (quantization_config, matrix of whole numbers -> tensors on disk, largest error of logits)."""
MADE = {"int8": 0.05, "int4": 0.5, "nf4": 0.5, "mxfp4": 0.5}
"""`--quantization` -> largest error of logits."""
COLUMNS = ("bf16", *FILES, "GGUF", *(f"to {name}" for name in MADE))


READING = {name: name for name in ENCODER_MODELS if name in ENCODER_ROWS} | {"new": "gte"}
"""Encoders that make vectors -> what writes one."""
WIDE_ENCODER = {"hidden_size": 128, "intermediate_size": 256}


def facts_of(family: str) -> tuple[str, dict[str, Any]]:
    """(transformers' model type, facts) of a small model of `family`."""
    if family in RELATIVES:
        return family, {} if RELATIVES[family].base in OWN_NAMES else {"intermediate_size": 128}
    all_variants = [*VARIANTS.values(), *MIXTURES.values(), *LATENT.values(), *WHOLE.values(), *ENCODERS.values()]
    all_variants += [*SPARSE.values(), *ENTRIES.values()]
    facts = next(f for t, f in all_variants if t == family)
    plain = {} if family in OWN_NAMES else {"intermediate_size": 128}
    # Heads whose values are shorter than keys keep their sizes, of which an even number turns.
    own = {"head_dim", "v_head_dim"} if {"head_dim", "v_head_dim"} <= facts.keys() else set()
    wide = {k: v for k, v in WIDE.items() if k in facts and k not in own}
    if "linear_num_heads" in facts:  # of which files know one number with those of attention
        wide |= {"num_attention_heads": 8, "num_key_value_heads": 8}
    if "compress_rates" in facts:  # of which files know two, and that the first layers choose by tokens
        rates = dict(zip(facts["compress_rates"], (4, 128), strict=True))
        wide |= {"compress_rates": rates, "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"]}
    return family, plain | facts | wide


class Checkpoint:
    """A dense checkpoint of a family whose layers' matrices hold whole numbers times STEP."""

    def __init__(self, family: str, folder: Path) -> None:
        self.folder = folder
        if family in READING:
            wide = {"dim": 128, "hidden_dim": 256} if family == "distilbert" else WIDE_ENCODER
            write_encoder(folder, READING[family], **wide)
            edit_config(folder, model_type=family)
        elif family in HEARING:
            HEARING[family](folder, encoder_ffn_dim=128, decoder_ffn_dim=128)
        else:
            model_type, facts = facts_of(family)
            (write_relative if family in RELATIVES else write)(folder, model_type, **facts)
        self.tensors = load_file(folder / "model.safetensors")
        opened = open_model(str(folder))
        self.transposed = opened.family.transposed
        names = {
            parts["weight"]
            for (role, place), parts in opened.claim.parts.items()
            if DISK_ROLES[role].kind == "linear" and place.layer is not None
        }
        self.codes = {n: on_grid(self.matrix(n)) for n in sorted(names & set(self.tensors))}
        self.save(folder, {n: self.as_disk(c * STEP) for n, c in self.codes.items()})

    def matrix(self, name: str) -> Tensor:
        """[n, k], however the file keeps it."""
        return self.tensors[name].t() if self.transposed else self.tensors[name]

    def as_disk(self, w: Tensor) -> Tensor:
        """The matrix as an unquantized file keeps it."""
        return w.t().contiguous() if self.transposed else w

    def save(self, folder: Path, changes: Parts, dtype: torch.dtype = torch.float32) -> None:
        """Write the checkpoint with `changes` in the place of its matrices, other numbers in `dtype`."""
        if folder != self.folder:
            shutil.copytree(self.folder, folder, ignore=shutil.ignore_patterns("*.safetensors"))
        kept = {n: t.to(dtype) if t.is_floating_point() else t for n, t in self.tensors.items() if n not in self.codes}
        save_file(kept | changes, folder / "model.safetensors", {"format": "pt"})

    def quantized(self, folder: Path, config: dict[str, Any], convert: Callable[[Tensor], Parts]) -> None:
        """Write it with its matrices in another format."""
        changes = {
            f"{name.removesuffix('weight')}{suffix}": part.contiguous()
            for name, codes in self.codes.items()
            for suffix, part in convert(codes).items()
        }
        self.save(folder, changes)
        edit_config(folder, quantization_config=config)


def logits_of(folder: Path, on: str = BACKENDS[-1], **options: Any) -> Tensor:
    """Logits [12, vocabulary] of two sequences, one of them in two steps, of the backend `on`."""
    model, sequences = load(folder, backend(on), **options), [prompt(7, 1), prompt(5, 2)]
    if model.encoder is None:
        paged = Paged(model, sequences)
    elif model.spec.encoder.rows:
        paged = Heard(model, [frames(3), frames(4)], sequences)
    else:
        paged = Encoded(model, [prompt(20, 3), prompt(3, 4)], sequences)
    return torch.cat(paged.run([[4, 5], [3, 0]]))


def outcomes(family: str, folder: Path) -> Iterator[tuple[str, str]]:
    """(format, "yes" or why not) of every format. Wrong logits fail here: they are no reason."""
    made = Checkpoint(family, folder / "dense")
    want = logits_of(made.folder)

    def outcome(what: str, bound: float, where: Path, want: Tensor = want, **options: Any) -> str:
        try:
            got = logits_of(where, **options)
        except QuireError as error:
            return error.message.replace(str(where), "").lstrip("/:. ")
        errors = (got - want).norm(dim=-1) / want.norm(dim=-1)
        assert float(errors.median()) <= bound, f"{family} in {what}: logits differ by {float(errors.median()):.1e}"
        return "yes"

    made.save(folder / "bf16", {n: made.as_disk(c * STEP).bfloat16() for n, c in made.codes.items()}, torch.bfloat16)
    yield "bf16", outcome("bf16", 3e-2, folder / "bf16")
    options: dict[str, Any]
    for name, (config, convert, bound) in FILES.items():
        made.quantized(folder / name, config, convert)
        options = {"dtype": "bfloat16"} if name == "FP8" else {}  # in float32 it would be widened
        if convert is nf4:  # its table has other numbers than the codes
            numbers = {n: made.as_disk(bits_and_bytes(NF4, c * STEP)[1]) for n, c in made.codes.items()}
            made.save(folder / "numbers", numbers)
            options["want"] = logits_of(folder / "numbers")
        yield name, outcome(name, bound, folder / name, **options)
    yield "GGUF", gguf_outcome(made, family, folder / "model.gguf", want)
    spec = open_model(str(made.folder)).spec
    recurrent = any(states_of(spec)) or CONVOLUTION in spec.mixers
    for name, bound in MADE.items():
        if (
            recurrent
        ):  # small results of random heads are normed to one, and errors with them: the same numbers tell more
            want = logits_of(made.folder, "reference", quantization=name)
        yield f"to {name}", outcome(name, bound, made.folder, want, quantization=name)


def gguf_outcome(made: Checkpoint, family: str, path: Path, want: Tensor) -> str:
    """Q8_0 through and through, made by the gguf package, or written here of the checkpoint, also in F32."""
    spec = open_model(str(made.folder)).spec
    if family in {kind for kind, _ in GGUF_WRITTEN.values()}:
        return made_by_gguf(family, path)
    if not any(architecture.writes(spec) for architecture in ARCHITECTURES.values()):
        return "-"
    add_tokenizer(made.folder, small())
    # Numbers are rounded to 8 bits once more, which turns a router's choice now and then; normed queries that are
    # multiplied choose tokens as sharply.
    sharp = any(spec.moe.sparse) or (any(spec.unit_norms) and spec.attention_scale > spec.head_dim**-0.5)
    for kind, bound in (("F32", 1e-4), ("Q8_0", 6e-2 if sharp else 3e-2)):
        try:
            write_gguf(made.folder, path, kind)
            got = logits_of(path, activations="int16", dtype="float32")
        except QuireError as error:
            return error.message.replace(str(made.folder), "").lstrip("/:. ")
        error = float(((got - want).norm(dim=-1) / want.norm(dim=-1)).median())
        assert error <= bound, f"{family} in GGUF {kind}: logits differ by {error:.1e}"
    return "yes"


def made_by_gguf(family: str, path: Path) -> str:
    """Made by the gguf package, against transformers' model of the file's numbers."""
    from gguf import GGMLQuantizationType

    from gguf_models import write_gguf as make

    facts = next(facts for kind, facts in GGUF_WRITTEN.values() if kind == family)
    wide = {k: v for k, v in WIDE.items() if k in facts and k != "linear_num_heads"}  # files know one number of heads
    facts = facts | wide | {"intermediate_size": 128}
    oracle = make(path, family, quantize=lambda name: GGMLQuantizationType.Q8_0, **facts)
    got = load(path, backend(BACKENDS[-1]), activations="int16", dtype="float32")
    (found,) = Paged(got, [prompt(7, 1)]).run([[7]])
    want = logits(oracle, prompt(7, 1))
    error = float(((found - want).norm(dim=-1) / want.norm(dim=-1)).median())
    assert error <= 5e-3, f"{family} in GGUF: logits differ by {error:.1e}"
    return "yes"


def row(family: str, found: dict[str, str]) -> str:
    """The family's line of the table."""
    return (
        f"| {family} | "
        + " | ".join(found[c] if found[c] in ("yes", "-") else f"no: {found[c]:.70}" for c in COLUMNS)
        + " |\n"
    )


def head() -> str:
    """The first lines of the table."""
    return "| family | " + " | ".join(COLUMNS) + " |\n" + "|---" * (len(COLUMNS) + 1) + "|\n"


def lines_of_rows() -> dict[str, int]:
    """Lines of source of each family's row, with the function that makes it or the constant that it is."""
    named: dict[str, int] = {}
    rows: dict[str, tuple[int, str]] = {}
    for path in sorted((SOURCE / "model" / "families").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                named[node.name] = lines_of(node)
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
                named |= {target.id: lines_of(node) for target in node.targets if isinstance(target, ast.Name)}
            for key, value in zip(node.keys, node.values, strict=True) if isinstance(node, ast.Dict) else ():
                name = key.value if isinstance(key, ast.Constant) else None
                if name in FAMILIES and isinstance(value, ast.Call | ast.Name):
                    rows[str(name)] = lines_of(value), value.id if isinstance(value, ast.Name) else ""
    return {name: lines + named.get(called, 0) for name, (lines, called) in sorted(rows.items())}


def lines_of(node: ast.stmt | ast.expr) -> int:
    """Lines from the first to the last of `node`."""
    return (node.end_lineno or 0) - node.lineno + 1


def main() -> None:
    """Try every pair, write the table into the page, print the lines that each family takes."""
    rows = ""
    for family in sorted(FAMILIES):
        with tempfile.TemporaryDirectory() as folder:
            rows += row(family, dict(outcomes(family, Path(folder))))
        print(rows.splitlines()[-1], flush=True)
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(before + BEGIN + head() + rows + END + rest.partition(END)[2])
    lines = lines_of_rows()
    for family, count in lines.items():
        print(f"{count:4} lines  {family}")
    print(f"{sum(lines.values()):4} lines  {len(lines)} families, {sum(lines.values()) / len(lines):.1f} each")


if __name__ == "__main__":
    main()
