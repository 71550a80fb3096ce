"""Stages of a recipe: a struct of options for each method, and the table of them.

A field's type is what a recipe may say: its range and its choices are checked from it, and listed where a value is
refused.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Annotated, Literal

from msgspec import Meta, Struct

from quire.compress.recipes.gguf_formats import GgufFormat

Count = Annotated[int, Meta(ge=1)]
Share = Annotated[float, Meta(ge=0.0, lt=1.0)]
"""Of what is there; 0 = none."""
Positive = Annotated[float, Meta(gt=0.0)]
NotNegative = Annotated[float, Meta(ge=0.0)]
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
    """RTN rounds each weight to the nearest value of its group's grid. It reads no calibration text.

    `bits` sets the width of a weight. `group_size` sets how many columns share a scale; -1 means the whole row. With
    `symmetric`, a group has a scale and no zero point.
    """

    bits: Literal[2, 3, 4, 8] = 4
    group_size: GroupSize = 128
    symmetric: bool = True


class Gptq(Rtn, frozen=True, kw_only=True):
    """GPTQ (Frantar et al. 2022) rounds column by column and lets later columns compensate for each error.

    For numerical stability, it adds the mean of the Hessian's diagonal times `damping` to the diagonal. `act_order`
    rounds the columns with the largest activations first. Without `static_groups`, a group
    holds columns that are rounded one after the other. With it, neighbouring columns form a group, whose scale is
    computed before the rounding.
    """

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
    """AWQ (Lin et al. 2023) scales up the columns that matter most to the activations before it rounds.

    `grid` sets how many exponents are tried for the scales. `clip` turns on a search for the best range of each group.
    """

    symmetric: bool = False
    grid: Count = 20
    clip: bool = True

    @property
    def by_layer(self) -> bool:
        """Whether the stage runs text through one layer at a time; see `Stage.by_layer`."""
        return True


class SmoothQuant(KvCacheStage, frozen=True, kw_only=True):
    """SmoothQuant (Xiao et al. 2022) moves outliers from activations to weights and makes both int8.

    `alpha` (0 to 1) sets how much of the outliers the weights take. A larger value moves more to the weights.
    """

    alpha: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.5

    @property
    def by_layer(self) -> bool:
        """Whether the stage runs text through one layer at a time; see `Stage.by_layer`."""
        return True


class LlmInt8(MatrixStage, frozen=True, kw_only=True):
    """LLM.int8() (Dettmers et al. 2022) makes weights int8 and keeps columns with outliers in 16 bits.

    A column has outliers if the magnitude of an activation in it exceeds `threshold`. The checkpoint
    records `threshold` for other engines. quire ignores it, and computes with 16-bit activations in every column.
    """

    threshold: Positive = 6.0


class Fp8(KvCacheStage, frozen=True, kw_only=True):
    """FP8 stores weights as 8-bit floats (e4m3).

    `scales` chooses the scales of activations: `static` scales are calibrated beforehand, and `dynamic` scales are
    computed for each token. `block` uses dynamic scales too, and gives each block of 128 x 128 weights its own scale.
    """

    scales: Literal["static", "dynamic", "block"] = "dynamic"

    @property
    def by_layer(self) -> bool:
        """Whether the stage runs text through one layer at a time; see `Stage.by_layer`."""
        return self.scales == "static" or self.kv != "none"


class Nf4(MatrixStage, frozen=True, kw_only=True):
    """NF4 (Dettmers et al. 2023) stores each weight as one of 16 quantiles of a normal distribution.

    `block_size` sets how many weights share a scale. `double_quantization` quantizes the scales too.
    """

    block_size: Literal[32, 64, 128, 256] = 64
    double_quantization: bool = True


class Mxfp4(KvCacheStage, frozen=True, kw_only=True):
    """MXFP4 (OCP microscaling formats 1.0) stores weights as 4-bit floats (e2m1), 32 of which share a scale."""


class Mixed(KvCacheStage, frozen=True, kw_only=True):
    """Mixed precision gives each layer its own number of bits, so that the KL divergence is as small as possible.

    `choices` lists the numbers of bits that a layer may get. `bits_per_weight` limits their mean. `rounding` names the
    method that rounds the weights.
    """

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
    """The stage writes a GGUF file in the given `format` of ggml. It must be the last stage of a recipe.

    `imatrix` names a file of llama-imatrix (GGUF, or the older .dat). Columns that had large activations then count
    more where a scale is searched for. `split_gb`: write files of at most so many GB (10^9 bytes) of tensors, named
    as llama-gguf-split names them (-00001-of-00003); 0 = one file. A model that takes images gets a second file,
    `mmproj-NAME-F16.gguf`.
    """

    format: GgufFormat = "Q4_K"
    imatrix: str = ""
    split_gb: NotNegative = 0.0


class Prune(MatrixStage, frozen=True, kw_only=True):
    """Pruning sets weights to zero: `magnitude` the smallest ones, `wanda` those that change the result least.

    `wanda` (Sun et al. 2024) multiplies the magnitude of each weight by the norm of its input, and prunes the weights
    with the smallest products. Set `sparsity`, the share of weights to prune in each matrix, or set `pattern`. The
    pattern `2:4` prunes two of every four neighbours.
    """

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
    """SparseGPT (Frantar and Alistarh 2023) prunes weights and lets the remaining ones compensate for the error.

    Set `sparsity` or `pattern`. For numerical stability, the method adds the mean of the Hessian's diagonal times
    `damping` to the diagonal.
    """

    damping: Positive = 0.01


class Structured(Stage, frozen=True, kw_only=True):
    """Structured pruning removes whole parts of the model, so the result is a smaller dense model.

    `heads` sets the share of attention heads to remove from each layer, with their keys and values. `channels` sets the
    share of channels to remove from each MLP. `layers` sets how many whole layers to remove. `score` chooses how the
    parts are ranked. `influence` is the score of ShortGPT (Men et al. 2024) and ranks layers only. `gradient` is the
    score of LLM-Pruner (Ma et al. 2023).
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
    """Full training changes all weights.

    `data` lists text files in the formats of calibration files. By default, the calibration files themselves are used.
    Each of `steps` steps reads `batch` rows of `length` tokens.
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
    """Distillation of hidden states trains the student to match the hidden states and the logits of the source model.

    The student is the model that earlier stages made, or a new model with random weights, whose sizes `student` gives.
    """

    student: Student | None = None


class DistilLogits(Distil, frozen=True, kw_only=True):
    """Distillation of logits (Hinton et al. 2015) trains the student to predict the token probabilities of the teacher.

    `divergence` chooses the loss: `forward` is KL(teacher || student), `reverse` is KL(student || teacher), and `js` is
    the Jensen-Shannon divergence.
    """

    divergence: Literal["forward", "reverse", "js"] = "forward"
    temperature: Positive = 1.0


class DistilText(Distil, frozen=True, kw_only=True):
    """Distillation on text trains the student on answers that the teacher writes to the prompts in `data`.

    With `rationales`, the student also learns the reasons for the answers, as a second task (Hsieh et al. 2023).
    """

    rationales: bool = False
    max_tokens: Count = 256
    temperature: Annotated[float, Meta(ge=0.0)] = 1.0


class Lora(Training, frozen=True, kw_only=True):
    """LoRA (Hu et al. 2021) trains a small change of the weights and leaves the weights themselves as they are.

    The change is the product of two matrices of rank `rank`, multiplied by `alpha` / `rank`.
    """

    rank: Count = 16
    alpha: Positive = 32.0


class Qlora(Lora, frozen=True, kw_only=True):
    """QLoRA (Dettmers et al. 2023) trains LoRA matrices on a base model in NF4.

    `paged` keeps the state of the optimizer in a memory-mapped file.
    """

    paged: bool = False


class Qat(Training, frozen=True, kw_only=True):
    """Quantization-aware training rounds the weights in the forward pass.

    Gradients pass through the rounding unchanged. `format` and `group_size` set the rounding.
    """

    format: Literal["int8", "int4", "fp8"] = "int4"
    group_size: GroupSize = 128
    kv: Literal["none", "fp8", "int8"] = "none"


class Merge(Stage, frozen=True, kw_only=True):
    """The stage merges a LoRA adapter into the weights.

    `adapter` names a PEFT folder. Without it, the stage merges the adapter that the `train` stage before it made.
    """

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
