"""Which configurations there are: values of options, all with all, without those that an engine would refuse."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import asdict, replace

from quire.core.cache_config import KV_DTYPES
from quire.core.config import KV_ALIASES, OWNER, QUANTIZATIONS, SECTIONS, EngineConfig
from quire.core.errors import ConfigError, QuireError
from quire.core.machine import cores
from quire.core.options.fields import fields_of
from quire.core.options.values import (
    Place,
    check_names,
    flag_file,
    from_text,
    read_options,
    read_toml,
    read_value,
    with_underscores,
)
from quire.core.speculation import LOOK_UPS
from quire.plan.planned_load import PlannedLoad, Slo

Value = str | int | float | bool | None
Axes = dict[str, tuple[Value, ...]]
"""Option -> values that are tried; what stands where no axis is, is the default or was given."""
QUALITY = ("quantization", "kv_cache_dtype", "activations")
"""Options that change answers."""
TUNABLE = (
    "max_num_seqs", "max_num_batched_tokens", "block_size", "enable_chunked_prefill", "target_itl_ms",
    "enable_prefix_caching", "threads", "bf16_bits", "sparse", "enforce_eager", "speculative_config",
    "data_parallel_size", "tensor_parallel_size", "pipeline_parallel_size", "group_size", *QUALITY,
)  # fmt: skip
MOST = 20_000
"""Configurations of a space: each takes milliseconds to predict."""
USUAL = EngineConfig()


@dataclass(frozen=True)
class Candidate:
    """A configuration: values of the axes, and the whole."""

    values: tuple[tuple[str, Value], ...]
    config: EngineConfig = field(compare=False, repr=False)

    @property
    def options(self) -> dict[str, Value]:
        """Axis -> value."""
        return dict(self.values)

    @property
    def changes(self) -> int:
        """How many values are not the defaults."""
        return sum(value != usual(name) for name, value in self.values)


@dataclass
class Space:
    """All candidates in a fixed order, and why others are left out: reason -> how many."""

    axes: Axes
    candidates: list[Candidate] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)

    def refuse(self, candidate: Candidate, error: QuireError) -> None:
        """Leave one out that an engine, or the planner, refuses."""
        self.candidates.remove(candidate)
        self.refused[error.message] += 1


def option_of(config: EngineConfig, name: str) -> Value:
    """The value of an option."""
    found: Value = getattr(getattr(config, OWNER[name]), name)
    return found


def usual(name: str) -> Value:
    """Default of an option."""
    return option_of(USUAL, name)


def with_values(config: EngineConfig, values: Mapping[str, Value]) -> EngineConfig:
    """`config` with these options; `ConfigError` where it does not validate."""
    sections: dict[str, dict[str, Value]] = {}
    for name, value in values.items():
        sections.setdefault(OWNER[name], {})[name] = value
    made = replace(
        config,
        **{
            section: read_options(SECTIONS[section], asdict(getattr(config, section)) | own)
            for section, own in sections.items()
        },
    )
    made.validate()
    return made


def make_space(base: EngineConfig, axes: Axes) -> Space:
    """Every combination that validates."""
    count = math.prod(map(len, axes.values()))
    if count > MOST:
        raise ConfigError(f"--space: {count:,} configurations are more than {MOST:,}; try fewer values", param="space")
    space = Space(axes)
    for values in itertools.product(*axes.values()):
        named = tuple(zip(axes, values, strict=True))
        try:
            candidate = Candidate(named, with_values(base, dict(named)))
            check_cores(candidate.config)
            space.candidates.append(candidate)
        except ConfigError as error:
            space.refused[error.message] += 1
    return space


def check_cores(config: EngineConfig) -> None:
    """`ConfigError` for more processes than cores, and for threads of each that they share anyway."""
    if config.device.device == "cuda" or config.processes == 1:
        return
    if config.processes > cores().threads:
        raise ConfigError("more ranks and replicas than cores would take turns on them", param="data_parallel_size")
    if config.device.threads:
        raise ConfigError("ranks and replicas divide the threads among them: --threads 0", param="threads")


def usual_axes(base: EngineConfig, load: PlannedLoad, slo: Slo, bf16: bool, prompts: bool) -> Axes:
    """What is tried where nothing else is said: no answer changes.

    `bf16`: the model has weights that 12 bits may hold; `prompts`: they are texts, not made up.
    """
    asked = load.batch if not load.rate else 1 << 20
    whole = max(1, load.input - load.shared) * load.batch if not load.rate else 1 << 20
    axes: Axes = {
        "max_num_seqs": _until((4, 8, 16, 32, 64, 128, 256), asked),
        "max_num_batched_tokens": _until((128, 256, 512, 1024, 2048), whole + load.batch),
        "block_size": (16, 32, 64),
        "enable_chunked_prefill": (True, False),
    }
    if slo.itl:
        axes["target_itl_ms"] = (0.0, round(0.8 * slo.itl, 3))
    if load.shared:
        axes["enable_prefix_caching"] = (True, False)
    if cores().threads > 1:
        axes |= {"threads": (0, cores().threads // 2), "data_parallel_size": (1, 2), "tensor_parallel_size": (1, 2)}
    if bf16:
        axes["bf16_bits"] = (16, 12)
    if prompts:
        axes["speculative_config"] = (None, *(drafting(method) for method in LOOK_UPS))
    return axes


def _until(values: Sequence[int], enough: int) -> tuple[int, ...]:
    """Values below `enough`, and the first that is not: larger ones change nothing under the load."""
    return tuple(v for i, v in enumerate(values) if not i or values[i - 1] < enough)


def drafting(value: Any) -> str | None:
    """A value of speculative_config: "off", a method's name, or its JSON."""
    if value in (None, "off"):
        return None
    if isinstance(value, str) and not value.startswith("{"):
        value = {"method": value}
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def allowed_axes(text: str) -> Axes:
    """`int8,kv=int8`: formats beside the model's own. `ConfigError` names the word that is none."""
    found: dict[str, list[Value]] = {}
    for word in filter(None, (part.strip() for part in text.split(","))):
        kind, equals, value = word.partition("=")
        name = {"kv": "kv_cache_dtype", "activations": "activations"}.get(kind) if equals else "quantization"
        value = KV_ALIASES.get(value, value) if equals else kind
        known = {"quantization": QUANTIZATIONS[1:], "kv_cache_dtype": KV_DTYPES[1:], "activations": ("int8", "int16")}
        if name is None or value not in known[name]:
            raise ConfigError(
                f"--allow {word}: not one of {', '.join(QUANTIZATIONS[1:])}, kv=FORMAT, activations=int8|int16",
                param="allow",
            )
        found.setdefault(name, [usual(name)]).append(value)
    return {name: tuple(dict.fromkeys(values)) for name, values in found.items()}


def read_space(path: Path) -> Axes:
    """A file of `option = [values]`."""
    place = flag_file("space", path)
    given = read_toml(path, place)
    check_names(given, TUNABLE, place, "option to vary")
    return {name: _values(name, value, place.key(name)) for name, value in with_underscores(given, place).items()}


def varied(words: Sequence[str]) -> Axes:
    """`max-num-seqs=8,16`, each option once."""
    found: Axes = {}
    for word in words:
        key, equals, values = word.partition("=")
        check_names([key.strip()], TUNABLE, Place("--vary", "vary"), "option to vary")
        name = key.strip().replace("-", "_")
        if not equals or name in found:
            raise ConfigError(f"--vary {word}: NAME=VALUE,VALUE is needed, each option once", param="vary")
        found[name] = _values(
            name, [part.strip() for part in values.split(",")], Place(f"--vary {key.strip()}", "vary")
        )
    return found


def _values(name: str, values: Any, place: Place) -> tuple[Value, ...]:
    """Checked by the option's type; text counts as what it says."""
    if not isinstance(values, list) or not values:
        raise place.error(": a list of values is needed")
    if name == "speculative_config":
        return tuple(dict.fromkeys(map(drafting, values)))
    [field] = [field for field in fields_of(SECTIONS[OWNER[name]]) if field.name == name]
    made = [read_value(field.type, from_text(field, v) if isinstance(v, str) else v, place) for v in values]
    none = name == "quantization"
    return tuple(dict.fromkeys(None if none and value == "none" else value for value in made))


def check_quality(axes: Axes, allowed: Axes) -> None:
    """`ConfigError` for values that change answers and were not allowed."""
    for name in set(axes) & set(QUALITY):
        more = [str(v) for v in axes[name] if v != usual(name) and v not in allowed.get(name, ())]
        if more:
            prefix = {"kv_cache_dtype": "kv=", "activations": "activations="}.get(name, "")
            raise ConfigError(
                f"{name.replace('_', '-')} {', '.join(more)} changes answers: add "
                f"--allow {','.join(prefix + value for value in more)}",
                param="allow",
            )
