"""The file of a suite: read, checked key by key, and put out as loads and variants."""

from __future__ import annotations

import difflib
import tomllib
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from quire.bench.suite.arrivals import Arrivals, parse_arrivals
from quire.bench.suite.techniques import TECHNIQUES
from quire.bench.workload import Length
from quire.core.errors import ConfigError
from quire.engine.options import KNOWN

MAX_BYTES = 1 << 20
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
    options: Options = {}


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


RULES = ("model", "format", "technique", "engine", "batch", "input", "output", "shared_prefix", "arrivals", "prompts")


def read_suite(path: Path) -> Suite:
    """The suite in a file; `ConfigError` names what is wrong with it, and the key that was meant."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ConfigError(f"{path} is larger than {MAX_BYTES:,} bytes; is it a suite?")
        given = tomllib.loads(path.read_bytes().decode())
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not TOML: {error}") from None
    _known(given, Suite.__struct_fields__, f"{path}")
    for at, grid in enumerate(_tables(given, "grid", path), 1):
        _known(grid, Grid.__struct_fields__, f"{path}, grid {at}")
    try:
        suite = msgspec.convert(given, Suite)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {error}") from None
    _check(suite, path)
    return suite


def _tables(given: dict[str, Any], name: str, path: Path) -> list[dict[str, Any]]:
    found = given.get(name)
    if not isinstance(found, list) or not found or not all(isinstance(part, dict) for part in found):
        raise ConfigError(f"{path}: there is no [[{name}]]; a suite has one at least (see `quire bench suite --help`)")
    return found


def _known(given: dict[str, Any], names: tuple[str, ...], where: str) -> None:
    for key in given:
        if key not in names:
            raise ConfigError(f"{where}: {key}: there is no such key{_meant(key, names)}")


def _meant(key: str, names: tuple[str, ...]) -> str:
    near = difflib.get_close_matches(key.replace("-", "_"), names, 1, 0.5)
    near = near or difflib.get_close_matches(key, names, 1, 0.5)
    return f"; is it {near[0]}?" if near else f"; known are {', '.join(names)}"


def _check(suite: Suite, path: Path) -> None:
    """What the types do not say."""
    for options in (suite.options, *(grid.options for grid in suite.grid)):
        _known(options, KNOWN, f"{path}, options")
        for name in ("model", "load_format"):
            if name in options:
                raise ConfigError(f"{path}, options: {name}: what is loaded is said by `models`")
    for rule in suite.exclude:
        _known(rule, RULES, f"{path}, exclude")
    for number, grid in enumerate(suite.grid, 1):
        where = f"{path}, grid {number}"
        for field in msgspec.structs.fields(Grid):
            if getattr(grid, field.name) == () or "" in _listed(getattr(grid, field.name)):
                raise ConfigError(f"{where}: {field.name} is empty")
        _named(grid.formats, (*FORMATS, *PEER_FORMATS), f"{where}: formats")
        _named(grid.techniques, ("none", *TECHNIQUES), f"{where}: techniques")
        _named(tuple(e for e in grid.engines if "://" not in e), ENGINES, f"{where}: engines")
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
            raise ConfigError(f"{where}: {name!r} is not known{_meant(name, names)}")


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
