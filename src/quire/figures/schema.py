"""A row: one configuration of one engine on one machine under one load, and what was found. The schema of every figure.

`FIELDS` says what each field is; the documentation's table is made from it. Rows lie in files as JSON lines or as
Parquet (`quire.figures.files`), and read back equal.
"""

from __future__ import annotations

import hashlib
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

SCHEMA = 1
Kind = Literal["measured", "predicted", "simulated", "imported"]


class RowMachine(msgspec.Struct, frozen=True, kw_only=True):
    """Where it ran.

    `limits`: names of `quire.figures.metric_definitions.LIMITS`, measured in the same rounds where possible.
    """

    name: Annotated[str, Meta(description="Processor or device, as it names itself.")]
    devices: Annotated[int, Meta(description="Processors or GPUs used, over all ranks and replicas.")] = 1
    cores: Annotated[int, Meta(description="Physical cores used by one process; 0 unknown.")] = 0
    memory_bytes: Annotated[int, Meta(description="Of the machine, or of one GPU; 0 unknown.")] = 0
    system: Annotated[str, Meta(description="Operating system.")] = ""
    limits: Annotated[dict[str, float], Meta(description="What it can do at most, by name.")] = {}


class RowEngine(msgspec.Struct, frozen=True, kw_only=True):
    """What ran."""

    name: Annotated[str, Meta(description="quire, llama.cpp, openvino, vllm, transformers, ...")]
    version: Annotated[str, Meta(description="As it names itself.")] = ""
    commit: Annotated[str, Meta(description="Of quire's sources, where they are a checkout.")] = ""
    versions: Annotated[dict[str, str], Meta(description="Of what it stands on: torch, Python, ...")] = {}


class RowModel(msgspec.Struct, frozen=True, kw_only=True):
    """Model that a row is of."""

    name: Annotated[str, Meta(description="A name or a shape.")]
    parameters: Annotated[int, Meta(description="0 unknown.")] = 0
    format: Annotated[str, Meta(description="Of the weights: bfloat16, int8, int4, q4_0, ...")] = ""
    kv_format: Annotated[str, Meta(description="Of keys and values.")] = ""


class RowLoad(msgspec.Struct, frozen=True, kw_only=True):
    """What was asked of it. Lengths in tokens."""

    requests: Annotated[int, Meta(description="In all.")] = 1
    batch: Annotated[int, Meta(description="Requests at one time: the batch, or the bound of concurrency; 0 open.")] = 1
    input_len: Annotated[float, Meta(description="Mean tokens of a prompt.")] = 0
    output_len: Annotated[float, Meta(description="Mean tokens of an answer.")] = 0
    arrivals: Annotated[str, Meta(description="at-once, constant, poisson, gamma, ramp, closed, trace.")] = "at-once"
    rate: Annotated[float, Meta(description="Requests per second offered; 0 where arrivals have none.")] = 0
    shared_prefix: Annotated[float, Meta(description="Tokens that prompts have in common.")] = 0
    name: Annotated[str, Meta(description="Of a trace or a workload.")] = ""


class Interval(msgspec.Struct, frozen=True, array_like=True):
    """A confidence interval of 95 % of the median."""

    low: float
    high: float


class FigureRow(msgspec.Struct, frozen=True, kw_only=True):
    """One figure of everything that was found in one configuration."""

    schema: Annotated[int, Meta(description="Version of this schema.")] = SCHEMA
    kind: Annotated[Kind, Meta(description="Where the numbers come from.")]
    benchmark: Annotated[str, Meta(description="What was done: latency, serve, kernels, quality, plan, ...")]
    suite: Annotated[str, Meta(description="Name of the suite it is part of.")] = ""
    time: Annotated[str, Meta(description="ISO 8601, UTC.")] = ""
    command: Annotated[str, Meta(description="Makes the row again.")] = ""
    machine: Annotated[RowMachine, Meta(description="Where it ran.")]
    engine: Annotated[RowEngine, Meta(description="What ran.")]
    model: Annotated[RowModel, Meta(description="Of what.")]
    load: Annotated[RowLoad, Meta(description="What was asked of it.")]
    technique: Annotated[str, Meta(description="The technique that is switched in this row; empty: none.")] = ""
    on: Annotated[bool, Meta(description="Whether `technique` is on.")] = True
    improves: Annotated[str, Meta(description="Name of the metric that `technique` is for.")] = ""
    claim: Annotated[str, Meta(description="What those who found `technique` say that it buys.")] = ""
    options: Annotated[dict[str, str | int | float | bool], Meta(description="The engine's, by flag name.")] = {}
    metrics: Annotated[dict[str, float], Meta(description="Medians, by names of METRICS.")]
    intervals: Annotated[dict[str, Interval], Meta(description="Of medians, where there are rounds.")] = {}
    samples: Annotated[dict[str, list[float]], Meta(description="What each round found.")] = {}
    dialect: Annotated[dict[str, str], Meta(description="How a metric was computed where METRICS says otherwise.")] = {}
    notes: Annotated[list[str], Meta(description="What a reader must know; also why a row has no metrics.")] = []

    @property
    def key(self) -> str:
        """Names the configuration: equal for two rows that differ only in when they were made and what was found."""
        read = msgspec.json.decode(msgspec.json.encode(self), type=FigureRow)  # 8 and 8.0 lie in a file as the same
        told = {name: msgspec.to_builtins(getattr(read, name)) for name in KEY}
        told["machine"] = {"name": self.machine.name, "devices": self.machine.devices, "cores": self.machine.cores}
        told["engine"] = self.engine.name
        text = msgspec.json.encode(told, order="deterministic")
        return hashlib.blake2b(text, digest_size=8).hexdigest()


KEY = ("kind", "benchmark", "suite", "model", "load", "technique", "on", "options")
"""Fields of which all count for what makes a row one row; of machine and engine the name does."""


def fields() -> list[tuple[str, str, str]]:
    """(name, type, meaning) of every field, parts with dots: what the documentation's table says."""
    return list(_fields(FigureRow, ""))


def _fields(struct: type[msgspec.Struct], before: str) -> list[tuple[str, str, str]]:
    found = []
    for field in msgspec.structs.fields(struct):
        inner, meta = field.type.__origin__, field.type.__metadata__[0]
        found.append((before + field.name, _named(inner), str(meta.description)))
        if isinstance(inner, type) and issubclass(inner, msgspec.Struct):
            found += _fields(inner, f"{before}{field.name}.")
    return found


def _named(kind: Any) -> str:
    return (
        kind.__name__ if isinstance(kind, type) and not hasattr(kind, "__args__") else str(kind).replace("typing.", "")
    )
