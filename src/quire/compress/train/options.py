"""What `quire train` may be told."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec

from quire.core.errors import ConfigError
from quire.core.options.fields import about, flag
from quire.core.options.values import check_values

METHODS = ("lora", "qlora", "qat", "full")
LOSSES = ("kl", "reverse-kl", "js", "text")
BITS = ("4", "8", "fp8")
KEPT = ("auto", "int8", "fp8")
RATES = {"lora": 2e-4, "qlora": 2e-4, "qat": 2e-5, "full": 2e-5}
"""Of Adam at its highest, where none is given: as QLoRA's authors chose for adapters, and a tenth of it for all."""

OF_METHODS = {
    "rank": ("lora", "qlora"), "alpha": ("lora", "qlora"), "bits": ("qat",), "group_size": ("qat",),
    "kv_cache_dtype": ("qat",),
}  # fmt: skip
"""Options that some methods alone read."""
OF_TEACHERS = ("share", "hidden", "top")
"""Options that only a teacher's probabilities give a meaning."""


class TrainOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Names are the command line's."""

    data: Annotated[
        tuple[str, ...],
        about("Text, or .jsonl of texts, prompts and completions, or messages; may be given several times."),
    ] = ()
    method: Annotated[str, about("What is learned: an adapter (qlora: of a base in NF4), or all.", METHODS)] = "lora"
    steps: Annotated[int, about("Steps of training.", ge=1)] = 1000
    batch: Annotated[int, about("Rows of a step.", ge=1)] = 4
    length: Annotated[int, about("Tokens of a row at most.", ge=2)] = 512
    rate: Annotated[float, about("Highest rate of Adam; 0 = 2e-4 for adapters, 2e-5 for all tensors.", ge=0)] = 0.0
    seed: Annotated[int, about("Of the order of rows, and of what begins at random.")] = 0
    paged: Annotated[bool, about("Keep the optimizer's state in a file that the system pages in and out.")] = False
    checkpointing: Annotated[
        bool, about("Compute layers again for their gradients: less memory, a third more time.")
    ] = False
    rank: Annotated[int, about("Rank of adapters.", ge=1)] = 16
    alpha: Annotated[float, about("B A is multiplied by alpha / rank.", gt=0)] = 32.0
    targets: Annotated[
        tuple[str, ...],
        about(
            "Modules that get adapters, or tensors that full training changes, as a glob; may be given several times."
        ),
    ] = ()
    bits: Annotated[str, about("Format of weights that qat trains for.", BITS)] = "4"
    group_size: Annotated[int, about("Columns that share a scale under qat.", ge=1)] = 32
    kv_cache_dtype: Annotated[str, about("Format of keys and values that qat trains for.", KEPT)] = "auto"
    teacher: Annotated[str | None, about("Model to learn from, of the same vocabulary unless it writes text.")] = None
    loss: Annotated[
        str, about("What is learned of the teacher: its probabilities, or text that it writes for prompts.", LOSSES)
    ] = "kl"
    temperature: Annotated[float, about("At which probabilities are compared, or text is written.", gt=0)] = 1.0
    share: Annotated[float, about("Share of the teacher's loss; the rest is the text's.", ge=0, le=1)] = 1.0
    hidden: Annotated[float, about("Weight of the loss of hidden states beside it.", ge=0)] = 0.0
    top: Annotated[
        int, about("Write the teacher's likeliest tokens to disk first, this many; 0 = it runs along.", ge=0)
    ] = 0
    rationales: Annotated[
        float, about("Weight of explanations that data has or the teacher writes (step by step); 0 = none.", ge=0)
    ] = 0.0
    max_tokens: Annotated[int, about("Tokens of a text that the teacher writes, at most.", ge=1)] = 256
    layers: Annotated[int, about("Begin with this many layers of MODEL, evenly spread; 0 = all.", ge=0)] = 0
    student: Annotated[
        tuple[str, ...],
        about("Begin anew with a smaller model: FIELD=VALUE of MODEL's config.json; may be given several times."),
    ] = ()
    merge: Annotated[str | None, about("Do not train: write MODEL with the adapter in this folder merged in.")] = None

    @property
    def highest(self) -> float:
        """The rate, or the method's."""
        return self.rate or RATES[self.method]

    @property
    def new(self) -> bool:
        """Whether what is trained is not MODEL itself."""
        return self.layers > 0 or bool(self.student)

    def validate(self) -> None:
        """Refuse what cannot work, naming the option."""
        check_values(self)
        if self.merge is not None:
            self._only("--merge trains nothing", [n for n in self.__struct_fields__ if n != "merge"])
            return
        if not self.data:
            raise ConfigError("--data FILE is needed: text to learn from; or --merge ADAPTER", param="data")
        for name, methods in OF_METHODS.items():
            if self.method not in methods:
                self._only(f"--method {self.method} has none", [name])
        self._validate_teacher()
        if self.layers and self.student:
            raise ConfigError("--layers and --student are two ways to begin; give one", param="student")
        if self.new and self.method not in ("full", "qat"):
            raise ConfigError(f"--method {self.method} needs MODEL as it is; give --method full", param="method")

    def _validate_teacher(self) -> None:
        if self.teacher is None:
            self._only("there is no --teacher MODEL", [*OF_TEACHERS, "loss", "temperature", "max_tokens"])
        elif self.loss == "text":
            self._only("--loss text learns what the teacher writes", list(OF_TEACHERS))
        else:
            self._only(f"the teacher of --loss {self.loss} writes nothing", ["max_tokens"])
        if self.top and self.hidden:
            raise ConfigError("--top keeps no hidden states; leave out --top or --hidden", param="top")

    def _only(self, why: str, names: Sequence[str]) -> None:
        """Refuse options `names` that were given and would have no effect."""
        for name in names:
            if getattr(self, name) != getattr(PLAIN, name):
                raise ConfigError(f"{flag(name)} has no effect: {why}; leave it out", param=name)


PLAIN = TrainOptions()
"""What they are where nothing is given."""
