"""What a model will take of memory, from the headers of its files: weights as they are packed, drafts, the KV cache.

Nothing here imports torch, unless there is a GPU to ask for or transformers' code for the model.
"""

from __future__ import annotations

from typing import NamedTuple

from msgspec.structs import replace

from quire.core.config import EngineConfig, LoraConfig
from quire.core.dtypes import Dtype
from quire.core.errors import ConfigError
from quire.core.exclusions.table import check_known
from quire.core.speculation import HEADS, LOOK_UPS, Speculation
from quire.model.describe import ModelFacts, compute_dtype, describe, describe_assistant, max_model_len
from quire.model.disk.checkpoint import Checkpoint, resolve
from quire.model.disk.hf_config import HfConfig, read_json
from quire.model.families.dflash import read_blocks
from quire.model.families.find import layer_spec
from quire.model.families.mtp import keeping_all
from quire.model.known import known_of, known_of_device
from quire.model.load.roles import Share, local_spec
from quire.model.mixers.layer_mixers import kept_by_layer, layouts_of, states_of
from quire.model.offload.budget import allowed
from quire.model.own_drafts import with_own_drafts
from quire.model.spec import ModelSpec
from quire.ops.choice import Choice, choose
from quire.ops.layout import CacheLayout
from quire.parallel.experts import Division, expert_plan
from quire.plan.weights import weight_parts
from quire.run.kv_budget import KVPlan, shape_kv
from quire.store.hub import hub_beside, hub_of


class Needs(NamedTuple):
    """Bytes of all weights that serving a model keeps in memory, and the shape of an engine's KV cache."""

    facts: ModelFacts
    weights: int
    shape: KVPlan


def needs(config: EngineConfig) -> Needs:
    """What serving a model takes, from headers, what drafts for it included; each replica has weights of its own."""
    found = describe(config.model.model, config.model.load_format, hub_of(config.model))
    config = with_own_drafts(config, found)
    choice, drafts = choose(config.device), drafting_model(config)
    check_known(config.features, known_of(config, found) | known_of_device(config, choice.backend, choice.chosen))
    weights = weights_of(config, found, choice)
    if config.offload.from_file:
        weights = min(weights, allowed(config))
    weights += drafting_weights(config, found, drafts, choice)
    return Needs(found, weights * config.parallel.data_parallel_size, kv_shape(config, found, choice, drafts)[0])


def rank_share(config: EngineConfig) -> Share:
    """What the first rank has, of which none has more."""
    parallel = config.parallel
    plan = expert_plan(parallel)
    over = {"expert": parallel.expert_parallel_size, "tensor": parallel.tensor_parallel_size}.get(plan.axis)
    return Share(0, parallel.tensor_parallel_size, None if over is None else Division(0, over, plan))


def drafting_model(config: EngineConfig) -> ModelFacts | None:
    """The draft model's facts, where one was asked for."""
    asked = config.speculation.asked
    if asked is None or not asked.model or asked.method in (*HEADS, "mtp"):
        return None
    return describe(asked.model, config.model.load_format, hub_beside(config.model))


def mtp_of(config: EngineConfig, found: ModelFacts) -> ModelFacts:
    """What drafts by the method mtp: the folder that was asked for, or the layer of the model's own files;
    `ConfigError` where they have none."""
    asked = config.speculation.asked
    if asked is not None and asked.model is not None:
        return describe_assistant(asked.model, hub_beside(config.model))
    if found.mtp is None:
        raise ConfigError(
            f"speculative_config: method mtp: {found.name}: its files have no such layer; use ngram, suffix, "
            "draft_model, self",
            param="speculative_config",
        )
    return found.mtp


def heads_of(config: EngineConfig, asked: Speculation) -> Checkpoint:
    """What the folder of heads holds."""
    return Checkpoint(resolve(asked.model or "", hub_beside(config.model)))


def drafting_layers(
    config: EngineConfig, found: ModelFacts, drafts: ModelFacts | None
) -> list[tuple[ModelSpec, Dtype]]:
    """What keeps keys and values beside the model: a draft model, or a layer that drafts."""
    asked = config.speculation.asked
    if drafts is not None:
        return [(drafts.spec, drafts.dtype)]
    if asked is not None and asked.method == "mtp":  # an assistant keeps nothing
        return [] if asked.model else [(keeping_all(mtp_of(config, found).spec), found.dtype)]
    if asked is None or asked.method not in ("eagle", "eagle3", "dflash"):
        return []
    path = resolve(asked.model or "", hub_beside(config.model)) / "config.json"
    raw = HfConfig(read_json(path), str(path))
    if asked.method == "dflash":
        return [(read_blocks(raw, found.spec, found.name, asked.tokens)[0], found.dtype)]
    return [(layer_spec(raw, found.spec, found.name), found.dtype)]


def drafting_weights(config: EngineConfig, found: ModelFacts, drafts: ModelFacts | None, choice: Choice) -> int:
    """Bytes of weights that only draft."""
    asked = config.speculation.asked
    if asked is None or asked.method in LOOK_UPS or asked.layers:
        return 0
    if asked.method == "mtp":
        split = rank_share(config) if asked.model else None
        return weights_of(replace(config, lora=LoraConfig()), mtp_of(config, found), choice, split)
    if asked.method in HEADS:
        return heads_of(config, asked).nbytes
    own = replace(config, model=replace(config.model, quantization=asked.quantization))
    share = rank_share(own) if drafts is None or config.parallel.drafts_everywhere(asked) else None
    return weights_of(own, drafts or found, choice, share)


def kv_shape(config: EngineConfig, found: ModelFacts, choice: Choice, drafts: ModelFacts | None) -> tuple[KVPlan, int]:
    """The KV cache, yet without blocks, and bytes of a token in it."""
    asked, share = config.speculation.asked, rank_share(config)
    models = [(local_spec(found.spec, share), found.dtype), *drafting_layers(config, found, drafts)]
    if drafts is not None and asked is not None and config.parallel.drafts_everywhere(asked):
        models[1:] = [(local_spec(drafts.spec, share), drafts.dtype)]
    layouts = list[tuple[ModelSpec, tuple[CacheLayout, ...]]]()
    for spec, on_disk in models:
        dtype, _ = compute_dtype(config.model.dtype, on_disk)
        layouts.append((spec, layouts_of(spec, config.cache.kv_cache_dtype, dtype, choice.backend)))
    kept, length = kept_by_layer(layouts), max_model_len(config.model.max_model_len, found.spec)
    states = sum(state.nbytes for spec, _ in models for state in states_of(spec) if state is not None)
    return shape_kv(config, kept, length, state_bytes=states), sum(each.bytes_per_token for each in kept.values())


def weights_of(config: EngineConfig, found: ModelFacts, choice: Choice, share: Share | None = None) -> int:
    """Bytes of the packed weights, of all or of a rank's share."""
    return sum(part.nbytes for part in weight_parts(config, found, choice, share))
