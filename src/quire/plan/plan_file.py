"""A plan as a file: `quire plan -o plan.json` writes it, and `quire serve --plan plan.json` keeps to it."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import msgspec

from quire.core.config import SECTIONS, EngineConfig, flat_config
from quire.core.errors import ConfigError
from quire.core.files import read_bounded, write_whole
from quire.core.machine import available_memory, processor
from quire.core.version import VERSION
from quire.model.describe import ModelFacts
from quire.plan.memory import choice_of, facts_of
from quire.plan.planned_load import PlannedLoad, Slo
from quire.plan.predict import Planner, Prediction, memory_of

SCHEMA = 1
MOST_BYTES = 1 << 20
ENFORCED = ("num_blocks", "max_num_seqs", "max_num_batched_tokens", "max_model_len")
"""Options that a plan pins: all that decides how much memory an engine takes beside its weights."""
FREE = ("model", "revision", "download_dir", "load_format", "tokenizer", "served_model_name", "seed", "chat_template",
        "generation_config", "cache_packed", "cache_packed_gib", "max_num_queued_reqs")  # fmt: skip
"""Options that a start may give otherwise: where the same model lies, and what changes neither memory nor speed."""


class PlanTarget(msgspec.Struct, frozen=True, kw_only=True):
    """Where the plan holds: `device` "this" or a named GPU; processor, unit and threads are compared for "this"."""

    device: str
    processor: str = ""
    backend: str
    isa: str
    threads: int


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What was planned. `options`: the engine's that are not their defaults, `ENFORCED` ones among them; `digest`: of
    the model; `memory`: bytes of a rank by parts; `kv_bytes` and `block_bytes` of its cache.
    """

    schema: int = SCHEMA
    quire: str = VERSION
    model: str
    digest: str
    place: PlanTarget
    options: dict[str, Any]
    kv_bytes: int
    block_bytes: int
    memory: dict[str, int]
    load: PlannedLoad
    slo: Slo
    prediction: Prediction


def model_digest(found: ModelFacts) -> str:
    """Names a model by its shape and format: the same for a folder with only a config and for the whole."""
    facts = f"{found.spec!r} {found.scheme} {found.parameters} {found.bias_numbers}"
    return hashlib.blake2b(facts.encode(), digest_size=12).hexdigest()


def plan_of(planner: Planner, load: PlannedLoad, slo: Slo) -> Plan:
    """The plan that `planner` stands for."""
    config, kv = planner.config, planner.kv
    pinned = {
        "num_blocks": kv.blocks, "max_num_seqs": config.scheduler.max_num_seqs,
        "max_num_batched_tokens": planner.limits.tokens, "max_model_len": kv.max_model_len,
    }  # fmt: skip
    options = {name: value for name, value in flat(config).items() if value != DEFAULTS[name]}
    options.pop("kv_cache_memory_bytes", None)  # the blocks say it
    return Plan(
        model=planner.facts.name,
        digest=model_digest(planner.facts),
        place=_place(planner),
        options=options | pinned,
        kv_bytes=planner.account.kv,
        block_bytes=kv.block_bytes,
        memory=memory_of(planner.account),
        load=load,
        slo=slo,
        prediction=planner.predict(load),
    )


def _place(planner: Planner) -> PlanTarget:
    choice, device = planner.choice, planner.machine.device
    name = processor() if device is None else ""
    threads = choice.threads if device is None else 0
    return PlanTarget(device="this" if device is None else device.name, processor=name, backend=choice.backend,
                 isa=choice.isa if device is None else "", threads=threads)  # fmt: skip


def flat(config: EngineConfig) -> dict[str, Any]:
    """Options by their flat names, as JSON has them."""
    return {
        name: value for section in SECTIONS for name, value in msgspec.to_builtins(getattr(config, section)).items()
    }


DEFAULTS = flat(EngineConfig())


def write_plan(plan: Plan, path: Path) -> None:
    """`ConfigError` where it cannot be written."""
    try:
        write_whole(path, msgspec.json.format(msgspec.json.encode(plan)) + b"\n")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from None


def read_plan(path: Path) -> Plan:
    """`ConfigError` for what is no plan, or one of a newer schema."""
    try:
        raw = read_bounded(path, MOST_BYTES)
    except OSError as error:
        raise ConfigError(f"--plan {path}: {error.strerror or error}", param="plan") from None
    try:
        found = msgspec.json.decode(raw, type=Plan)
    except (msgspec.DecodeError, ValueError) as error:
        raise ConfigError(f"--plan {path} is no plan: {error}; write one with quire plan -o", param="plan") from None
    if found.schema != SCHEMA:
        raise ConfigError(
            f"--plan {path} has schema {found.schema}, this quire knows {SCHEMA}; plan anew", param="plan"
        )
    unknown = [name for name in found.options if name not in DEFAULTS] + [n for n in ENFORCED if n not in found.options]
    if unknown:
        raise ConfigError(
            f"--plan {path}: options {', '.join(unknown)} are unknown or lacking; plan anew", param="plan"
        )
    return found


def planned_config(plan: Plan, given: EngineConfig, names: set[str]) -> EngineConfig:
    """The engine's configuration by the plan. `given` says what the command line asks for, `names` which options that
    are: one that is otherwise than planned is refused, unless it is `FREE`.
    """
    asked = flat(given)
    for name in sorted(names - set(FREE)):
        planned = plan.options.get(name, DEFAULTS[name])
        if asked[name] != planned:
            raise ConfigError(
                f"--{name.replace('_', '-')} {asked[name]}: the plan has {planned}; leave it out, or plan anew",
                param=name,
            )
    return flat_config(**plan.options | {name: asked[name] for name in FREE if name in names})


def check_plan(plan: Plan, config: EngineConfig) -> None:
    """Refuse a start that the plan does not hold for: another model, another machine, or memory that is not there."""
    found, _ = facts_of(config)
    if (digest := model_digest(found)) != plan.digest:
        raise ConfigError(
            f"--plan: it is of {plan.model!r} ({plan.digest}), and {found.name!r} ({digest}) has another shape or "
            "format; plan anew",
            param="plan",
        )
    here, place = choice_of(config, None), plan.place
    if place.device != "this":
        wanted = place.device.partition("-")[0]
        if here.backend != "triton" or wanted not in here.isa.lower():
            raise ConfigError(
                f"--plan: it is for the device {place.device}, and {here.backend}/{here.isa} runs here; plan for this "
                "one",
                param="plan",
            )
        return  # what a GPU has left is known, and checked, once the model is loaded
    for what, planned, now in (
        ("backend", place.backend, here.backend), ("processor", place.processor, processor()),
        ("instruction set", place.isa, here.isa), ("threads", place.threads, here.threads),
    ):  # fmt: skip
        if planned != now:
            raise ConfigError(f"--plan: {what} {planned} was planned for, here it is {now}; plan anew", param="plan")
    needed, free = plan.memory["total"] * config.wholes, available_memory()
    if needed > free:
        raise ConfigError(
            f"--plan: {needed:,} bytes are planned for, and {free:,} are free; end other processes, or plan anew",
            param="plan",
        )


def check_started(plan: Plan, num_blocks: int, max_model_len: int) -> None:
    """`ConfigError` where an engine that started has another cache than planned."""
    for what, planned, made in (
        ("KV blocks", plan.options["num_blocks"], num_blocks),
        ("tokens of the longest sequence", plan.options["max_model_len"], max_model_len),
    ):
        if planned != made:
            raise ConfigError(f"--plan: {planned:,} {what} are planned, and the engine has {made:,}; plan anew")
