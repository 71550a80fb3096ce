"""Stages of a recipe: a struct of options for each method, and the table of them.

A field's type is what a recipe may say: its range and its choices are checked from it, and listed where a value is
refused.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Annotated, Literal

from msgspec import Meta, Struct

Count = Annotated[int, Meta(ge=1)]
Share = Annotated[float, Meta(ge=0.0, lt=1.0)]
"""Of what is there; 0 = none."""
Positive = Annotated[float, Meta(gt=0.0)]
Names = tuple[str, ...]
GroupSize = Literal[-1, 16, 32, 64, 128, 256]
"""Columns that share a scale; -1 = the whole row."""


class Stage(Struct, frozen=True, kw_only=True):
    """A step of a recipe. `targets` and `ignore` are globs of tensor names.

    A tensor is worked on if one of `targets` and none of `ignore` fits.
    """

    kind: str
    method: str
    targets: Names = ("*",)
    ignore: Names = ()

    def covers(self, tensor: str) -> bool:
        """Tell whether the stage works on the tensor of this name."""
        return any(fnmatchcase(tensor, glob) for glob in self.targets) and not any(
            fnmatchcase(tensor, glob) for glob in self.ignore
        )

    @property
    def by_layer(self) -> bool:
        """Whether the stage runs text through one layer at a time, which then may not read what another one made."""
        return False

    @property
    def calibrated(self) -> bool:
        """Whether the stage reads calibration text."""
        return self.by_layer


class MatrixStage(Stage, frozen=True, kw_only=True):
    """A stage over matrices. The head is left out unless asked for: no later layer makes up for its errors."""

    ignore: Names = ("lm_head*",)


class KvCacheStage(MatrixStage, frozen=True, kw_only=True):
    """A stage over matrices that may scale the KV cache. `kv`: the format of keys and values, at a scale for each
    layer."""

    kv: Literal["none", "fp8", "int8"] = "none"

    @property
    def by_layer(self) -> bool:
        """Whether the stage runs text through one layer at a time; see `Stage.by_layer`."""
        return self.kv != "none"


class Rtn(KvCacheStage, frozen=True, kw_only=True):
    """Round-to-nearest."""

    bits: Literal[2, 3, 4, 8] = 4
    group_size: GroupSize = 128
    symmetric: bool = True


class Gptq(Rtn, frozen=True, kw_only=True):
    """GPTQ (Frantar et al. 2022). `damping`: share of the Hessian's mean diagonal that is added to it."""

    damping: Positive = 0.01
    act_order: bool = True
    static_groups: bool = True

    @property
    def ordered(self) -> bool:
        """Whether groups are of columns in the order of activations, which do not lie together."""
        return self.act_order and not self.static_groups and self.group_size != -1

    @property
    def by_layer(self) -> bool:
        """Whether the stage runs text through one layer at a time; see `Stage.by_layer`."""
        return True


class Awq(Rtn, frozen=True, kw_only=True):
    """AWQ (Lin et al. 2023). `grid`: exponents that are tried for the scales; `clip`: whether ranges are searched."""

    symmetric: bool = False
    grid: Count = 20
    clip: bool = True

    @property
    def by_layer(self) -> bool:
        """Whether the stage runs text through one layer at a time; see `Stage.by_layer`."""
        return True


class SmoothQuant(KvCacheStage, frozen=True, kw_only=True):
    """SmoothQuant (Xiao et al. 2022), int8 weights and activations. `alpha`: share of the difficulty that goes to
    weights."""

    alpha: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.5

    @property
    def by_layer(self) -> bool:
        """Whether the stage runs text through one layer at a time; see `Stage.by_layer`."""
        return True


class LlmInt8(MatrixStage, frozen=True, kw_only=True):
    """LLM.int8() (Dettmers et al. 2022). `threshold`: activations from which a column stays in 16 bits."""

    threshold: Positive = 6.0


class Fp8(KvCacheStage, frozen=True, kw_only=True):
    """FP8 (e4m3). `scales`: of activations, static (calibrated), dynamic (a token's) or block.

    With block they are dynamic, and those of weights are of blocks of 128 x 128.
    """

    scales: Literal["static", "dynamic", "block"] = "dynamic"

    @property
    def by_layer(self) -> bool:
        """Whether the stage runs text through one layer at a time; see `Stage.by_layer`."""
        return self.scales == "static" or self.kv != "none"


class Nf4(MatrixStage, frozen=True, kw_only=True):
    """NF4 (Dettmers et al. 2023). `block_size`: numbers that share a scale; the scales may be quantized too."""

    block_size: Literal[32, 64, 128, 256] = 64
    double_quantization: bool = True


class Mxfp4(KvCacheStage, frozen=True, kw_only=True):
    """MXFP4 (OCP microscaling formats 1.0): e2m1 codes, a power of two for 32 of them."""


class Mixed(KvCacheStage, frozen=True, kw_only=True):
    """Mixed precision: layers get those bits of `choices` that cost least KL within `bits_per_weight` on average."""

    bits_per_weight: Positive
    choices: tuple[Literal[2, 3, 4, 8], ...] = (3, 4, 8)
    group_size: GroupSize = 128
    rounding: Literal["rtn", "gptq", "awq"] = "gptq"

    def __post_init__(self) -> None:
        if not self.choices or not min(self.choices) <= self.bits_per_weight <= max(self.choices):
            raise ValueError(f"bits_per_weight = {self.bits_per_weight:g} is not within choices = {list(self.choices)}")

    @property
    def by_layer(self) -> bool:
        """Whether the stage runs text through one layer at a time; see `Stage.by_layer`."""
        return self.rounding != "rtn"

    @property
    def calibrated(self) -> bool:
        """Whether the stage reads calibration text; see `Stage.calibrated`."""
        return True


class Gguf(Stage, frozen=True, kw_only=True):
    """A GGUF file in a `format` of ggml's; the last stage of a recipe."""

    format: Literal["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"] = (
        "Q4_K"
    )


class Prune(MatrixStage, frozen=True, kw_only=True):
    """Zeros in matrices: a share of each, or so many of every few neighbours in a row."""

    sparsity: Share = 0.0
    pattern: Literal["", "2:4", "4:8"] = ""

    def __post_init__(self) -> None:
        if bool(self.pattern) == bool(self.sparsity):
            raise ValueError('give one of sparsity (as 0.5) and pattern ("2:4" or "4:8")')

    @property
    def by_layer(self) -> bool:
        """Whether the stage runs text through one layer at a time; see `Stage.by_layer`."""
        return self.method != "magnitude"


class SparseGpt(Prune, frozen=True, kw_only=True):
    """SparseGPT (Frantar and Alistarh 2023). `damping` as of GPTQ."""

    damping: Positive = 0.01


class Structured(Stage, frozen=True, kw_only=True):
    """Structured pruning, which takes parts out of the model.

    Shares of a layer's `heads` (with their keys and values) and of its MLP's `channels`, and a number of whole
    `layers`. `score`: what says which go; "influence" is ShortGPT's (Men et al. 2024) and of layers alone, "gradient"
    LLM-Pruner's (Ma et al. 2023).
    """

    heads: Share = 0.0
    channels: Share = 0.0
    layers: Annotated[int, Meta(ge=0)] = 0
    score: Literal["magnitude", "activation", "gradient", "influence"] = "activation"

    def __post_init__(self) -> None:
        if not (self.heads or self.channels or self.layers):
            raise ValueError("nothing is taken out: give heads or channels (shares, as 0.25) or layers (a number)")
        if self.score == "influence" and (self.heads or self.channels):
            raise ValueError('score = "influence" is of whole layers; heads and channels need another one')

    @property
    def by_layer(self) -> bool:
        """Whether the stage runs text through one layer at a time; see `Stage.by_layer`."""
        return self.score in ("activation", "influence")

    @property
    def calibrated(self) -> bool:
        """Whether the stage reads calibration text; see `Stage.calibrated`."""
        return True


class Training(Stage, frozen=True, kw_only=True):
    """Training of all weights. `data`: files as calibration takes them, none = those of calibration.

    `batch` rows of `length` tokens a step.
    """

    data: Names = ()
    steps: Count = 1000
    batch: Count = 4
    length: Count = 512
    learning_rate: Positive = 1e-4
    seed: int = 0

    @property
    def by_layer(self) -> bool:
        """Whether the stage runs text through one layer at a time; see `Stage.by_layer`."""
        return True


class Student(Struct, frozen=True, kw_only=True):
    """Sizes of a model from random weights; what is not given is the source's."""

    layers: Count
    hidden: Count | None = None
    intermediate: Count | None = None
    heads: Count | None = None
    kv_heads: Count | None = None


class Distil(Training, frozen=True, kw_only=True):
    """Distillation from the source. The student is what stages before made, or a `student` from random weights."""

    student: Student | None = None


class DistilLogits(Distil, frozen=True, kw_only=True):
    """Distillation of logits (Hinton et al. 2015). `divergence`: forward KL(teacher || student), reverse, or
    Jensen-Shannon."""

    divergence: Literal["forward", "reverse", "js"] = "forward"
    temperature: Positive = 1.0


class DistilText(Distil, frozen=True, kw_only=True):
    """Distillation on text that the teacher writes to the prompts of `data`.

    `rationales`: with the reasons for its answers, as a second task (Hsieh et al. 2023).
    """

    rationales: bool = False
    max_tokens: Count = 256
    temperature: Annotated[float, Meta(ge=0.0)] = 1.0


class Lora(Training, frozen=True, kw_only=True):
    """LoRA (Hu et al. 2021): the weights' change is a product of two matrices of `rank` columns, times `alpha` /
    `rank`."""

    rank: Count = 16
    alpha: Positive = 32.0


class Qlora(Lora, frozen=True, kw_only=True):
    """QLoRA (Dettmers et al. 2023): the base is NF4. `paged`: the optimizer's state lies in a mapped file."""

    paged: bool = False


class Qat(Training, frozen=True, kw_only=True):
    """Quantization-aware training: weights are rounded on the way forward, gradients as if they were not."""

    format: Literal["int8", "int4", "fp8"] = "int4"
    group_size: GroupSize = 128
    kv: Literal["none", "fp8", "int8"] = "none"


class Merge(Stage, frozen=True, kw_only=True):
    """Merging of an adapter into the weights: PEFT's folder `adapter`, or what the train stage before made."""

    adapter: str = ""


METHODS: dict[str, dict[str, type[Stage]]] = {
    "quantize": {
        "rtn": Rtn,
        "gptq": Gptq,
        "awq": Awq,
        "smoothquant": SmoothQuant,
        "llm_int8": LlmInt8,
        "fp8": Fp8,
        "nf4": Nf4,
        "mxfp4": Mxfp4,
        "mixed": Mixed,
        "gguf": Gguf,
    },
    "prune": {"magnitude": Prune, "wanda": Prune, "sparsegpt": SparseGpt, "structured": Structured},
    "distil": {"logits": DistilLogits, "hidden": Distil, "text": DistilText},
    "train": {"full": Training, "lora": Lora, "qlora": Qlora, "qat": Qat},
    "merge": {"lora": Merge},
    "recover": {"full": Training, "lora": Lora},
}
"""Kinds of stages -> their methods -> what a stage of that method says."""
