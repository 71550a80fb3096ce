"""The file of a suite: read, checked key by key, and put out as loads and variants."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from quire.bench.suite.techniques import TECHNIQUES, Technique
from quire.bench.workload import Length
from quire.core.errors import ConfigError
from quire.core.options.values import Place, check_names, did_you_mean, read_table, read_toml
from quire.engine.engine_options import KNOWN
from quire.figures.metrics import METRICS

NUMBERS = {"at-once": 0, "closed": 0, "constant": 1, "poisson": 1, "gamma": 2, "ramp": 2}
"""How many numbers follow each name: rates per second, of gamma its burstiness too (1 = Poisson, less = bursts)."""


@dataclass(frozen=True)
class Arrivals:
    """`kind` of `NUMBERS` and its numbers."""

    kind: str
    numbers: tuple[float, ...]

    @property
    def rate(self) -> float:
        """Requests per second offered on average; 0 where arrivals have none."""
        if self.kind == "ramp":
            return sum(self.numbers) / 2
        return self.numbers[0] if self.numbers else 0.0

    def due(self, count: int, seed: int) -> list[float]:
        """Due times of `count` requests; the first comes at once. A ramp's rate rises evenly from request to
        request."""
        rng = random.Random(seed)
        if not self.numbers:
            return [0.0] * count
        rate = self.numbers[0]
        if self.kind == "ramp":
            last = self.numbers[1]
            gaps = [1 / (rate + (last - rate) * i / max(1, count - 2)) for i in range(count - 1)]
        elif self.kind == "constant":
            gaps = [1 / rate] * (count - 1)
        else:
            shape = self.numbers[1] if self.kind == "gamma" else 1.0
            gaps = [rng.gammavariate(shape, 1 / (rate * shape)) for _ in range(count - 1)]
        return list(itertools.accumulate(gaps, initial=0.0))


def parse_arrivals(text: str, where: str) -> Arrivals:
    """Parse "at-once" or "gamma:2:0.5"; `ConfigError` says what is wrong and `where`."""
    kind, *given = text.split(":")
    if kind not in NUMBERS:
        raise ConfigError(f"{where}: arrivals {text!r}: known are {', '.join(NUMBERS)}")
    try:
        numbers = tuple(float(part) for part in given)
    except ValueError:
        numbers = ()
    if len(numbers) != NUMBERS[kind] or not all(0 < n < float("inf") for n in numbers):
        wanted = {0: "takes no number", 1: "is followed by a rate, as in :2", 2: "by two numbers, as in :1:4"}
        raise ConfigError(f"{where}: arrivals {text!r}: {kind} {wanted[NUMBERS[kind]]}")
    return Arrivals(kind, numbers)


ENGINES = ("quire", "llama.cpp", "openvino", "vllm", "transformers")
FORMATS: dict[str, dict[str, Any]] = {
    "auto": {},
    "bfloat16": {"dtype": "bfloat16"},
    "bf12": {"dtype": "bfloat16", "bf16_bits": 12},
    "float32": {"dtype": "float32"},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
    "nf4": {"quantization": "nf4"},
    "mxfp4": {"quantization": "mxfp4"},
    "fp8": {"quantization": "fp8"},
}
"""What a format is as options of quire; what it is for a peer says its adapter."""
Options = dict[str, str | int | float | bool]
Whole = int | str
Several = str | int | list[str | int]


class Grid(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Lists whose product is measured."""

    models: tuple[str, ...] = ("pydoc",)
    formats: tuple[str, ...] = ("auto",)
    techniques: tuple[str, ...] = ("none",)
    engines: tuple[str, ...] = ("quire",)
    batch: tuple[Annotated[int, Meta(ge=1, le=1024)], ...] = (1,)
    input: tuple[Whole, ...] = (128,)
    output: tuple[Whole, ...] = (32,)
    shared_prefix: tuple[Annotated[int, Meta(ge=0)], ...] = (0,)
    arrivals: tuple[str, ...] = ("at-once",)
    requests: Annotated[int, Meta(ge=0, le=100_000)] = 0
    prompts: str = "random"
    serve: bool = False
    options: Options = {}


class OwnTechnique(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A technique that the file itself defines: flags of quire with it on and off, and the metric that it is for.

    `compress`: on is the model as `quire compress` makes it with these words, off the model itself.
    """

    on: Options = {}
    off: Options = {}
    compress: tuple[str, ...] = ()
    improves: str = "output_tokens_per_s"

    def technique(self) -> Technique:
        """Make the technique that the suite switches."""
        return Technique(self.on, self.off, improves=self.improves, compress=self.compress)


class Suite(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A whole file. `perplexity_bytes`: of text that perplexity is measured on, 0 none; `texts`: files of it."""

    name: str
    grid: tuple[Grid, ...]
    rounds: Annotated[int, Meta(ge=1, le=1000)] = 6
    seed: int = 0
    max_model_len: Annotated[int, Meta(ge=16)] = 2048
    limit_s: Annotated[float, Meta(gt=0)] = 900.0
    perplexity_bytes: Annotated[int, Meta(ge=0)] = 32768
    texts: tuple[str, ...] = ()
    options: Options = {}
    exclude: tuple[dict[str, Several], ...] = ()
    speculation: dict[str, dict[str, Any]] = {}
    technique: dict[str, OwnTechnique] = {}

    def technique_of(self, name: str) -> Technique | None:
        """Find a technique by name among the file's own and those that every suite has; None for "none"."""
        return self.technique[name].technique() if name in self.technique else TECHNIQUES.get(name)


RULES = ("model", "format", "technique", "engine", "batch", "input", "output", "shared_prefix", "arrivals", "prompts")


def read_suite(path: Path) -> Suite:
    """The suite in a file; `ConfigError` names what is wrong with it, and the key that was meant."""
    place = Place(str(path))
    given = read_toml(path, place)
    check_names(given, Suite.__struct_fields__, place, "key")
    grids = given.get("grid")
    if not isinstance(grids, list) or not grids or not all(isinstance(grid, dict) for grid in grids):
        raise place.error(": there is no [[grid]]; a suite has one at least (see `quire bench suite --help`)")
    own = given.pop("technique", {})  # each is read by itself, so that an error names its key
    if not isinstance(own, dict) or not all(isinstance(table, dict) for table in own.values()):
        raise place.error(": technique: techniques of a suite are tables, as in [technique.NAME]")
    made = {name: read_table(OwnTechnique, table, place.key(f"technique {name!r}")) for name, table in own.items()}
    suite = msgspec.structs.replace(read_table(Suite, given, place), technique=made)
    _check(suite, path)
    return suite


def _check(suite: Suite, path: Path) -> None:
    """What the types do not say."""
    own = [options for technique in suite.technique.values() for options in (technique.on, technique.off)]
    for options in (suite.options, *(grid.options for grid in suite.grid), *own):
        check_names(options, KNOWN, Place(f"{path}: options"), "option")
        for name in ("model", "load_format"):
            if name in options:
                raise ConfigError(f"{path}: options: {name}: what is loaded is said by `models`")
    for name, technique in suite.technique.items():
        if name == "none" or name in TECHNIQUES:
            raise ConfigError(f"{path}: technique {name!r}: every suite has a technique of this name; choose another")
        _named((technique.improves,), tuple(METRICS), f"{path}: technique {name!r}: improves")
    for rule in suite.exclude:
        check_names(rule, RULES, Place(f"{path}: exclude"), "key")
    for number, grid in enumerate(suite.grid, 1):
        where = f"{path}: grid {number}"
        for field in msgspec.structs.fields(Grid):
            if getattr(grid, field.name) == () or "" in _listed(getattr(grid, field.name)):
                raise ConfigError(f"{where}: {field.name} is empty")
        _named(grid.formats, (*FORMATS, *PEER_FORMATS), f"{where}: formats")
        _named(grid.techniques, ("none", *suite.technique, *TECHNIQUES), f"{where}: techniques")
        _named(tuple(e for e in grid.engines if "=" not in e and "://" not in e), ENGINES, f"{where}: engines")
        for name in grid.techniques if grid.serve else ():
            if (found := suite.technique_of(name)) is not None and found.off_mode:
                raise ConfigError(f"{where}: {name}: a server cannot be driven as this technique's baseline needs it")
        if grid.prompts not in ("random", "text"):
            raise ConfigError(f"{where}: prompts {grid.prompts!r} is neither random nor text")
        if "quire" not in grid.engines and "none" not in grid.techniques:
            raise ConfigError(f"{where}: techniques are switched in quire alone; add it to the engines")
        for name in ("input", "output"):
            for text in getattr(grid, name):
                try:
                    Length.parse(str(text), name)
                except ConfigError as error:
                    raise ConfigError(f"{where}: {error.message.removeprefix('--')}") from None
        for text in grid.arrivals:
            parse_arrivals(text, where)
        for model in grid.models if "draft" in grid.techniques else ():
            if model not in suite.speculation:
                raise ConfigError(f"{where}: draft: say what drafts for {model!r} by [speculation.{model!r}]")


PEER_FORMATS = ("q4_0", "q8_0", "q3_k_m", "q4_k_m", "q5_k_m", "q6_k", "iq4_xs")
"""Of GGUF files that llama.cpp makes; quire reads the same file."""


def _listed(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else ()


def _named(given: tuple[str, ...], names: tuple[str, ...], where: str) -> None:
    for name in given:
        if name not in names:
            raise ConfigError(f"{where}: {name!r} is not known{did_you_mean(name, names)}")


class LoadCase(msgspec.Struct, frozen=True, kw_only=True):
    """One load: lengths as they were written, and all else that is asked of an engine at a time."""

    requests: int
    batch: int
    input: str
    output: str
    shared_prefix: int
    arrivals: str
    prompts: str

    @property
    def inputs(self) -> Length:
        """Tokens of a prompt of its own."""
        return Length.parse(self.input, "input")

    @property
    def outputs(self) -> Length:
        """Tokens of an answer."""
        return Length.parse(self.output, "output")

    @property
    def pattern(self) -> Arrivals:
        """When requests are due."""
        return parse_arrivals(self.arrivals, "arrivals")

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return self.shared_prefix + self.inputs.high + self.outputs.high

    @property
    def mean(self) -> float:
        """Tokens of a sequence at its end."""
        return self.shared_prefix + (self.inputs.low + self.inputs.high + self.outputs.low + self.outputs.high) / 2
