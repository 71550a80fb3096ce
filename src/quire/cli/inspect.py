"""`quire inspect`: what a model is and needs, and what would run it, before anything is loaded.

Nothing here imports torch, unless there is a GPU to ask for or transformers' code for the model.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

from quire.cli.flags import ENGINE, to_engine, with_flags
from quire.cli.show import Rows, show, size
from quire.core.speculation import HEADS, LOOK_UPS

if TYPE_CHECKING:
    from quire.core.config import EngineConfig
    from quire.core.dtypes import Dtype
    from quire.core.speculation import Speculation
    from quire.model.describe import ModelFacts
    from quire.model.disk.checkpoint import Checkpoint
    from quire.model.load.roles import Share
    from quire.model.spec import ModelSpec
    from quire.ops.choice import Choice
    from quire.run.budget import KVPlan


@with_flags(ENGINE)
def inspect(options: dict[str, Any]) -> None:
    """Facts of a model and what would be decided for it, from its headers alone: no weight is read."""
    config = to_engine(options)
    from quire.compress.passport import passport_rows, read_passport
    from quire.model.describe import describe
    from quire.model.disk.hub import hub_of
    from quire.ops.choice import choose

    found = describe(config.model.model, config.model.load_format, hub_of(config.model))
    choice = choose(config.device)
    show("model", _model_rows(found))
    if (passport := read_passport(found.folder)) is not None:
        show("measured", passport_rows(passport))
    drafts = _drafting_model(config)
    show("memory", [*_memory_rows(config, found, choice, drafts), *_draft_memory(config, found, drafts, choice)])
    if (asked := config.speculation.asked) is not None:
        show("speculation", _speculation_rows(config, asked, drafts))
    if config.parallel.pipeline_parallel_size > 1:
        show("stages", _stage_rows(config, found, choice))
    show("runs on", [*_backend_rows(config, choice), *_tuning_rows(config, found, choice)])
    show("ops", [*choice.labels.items()])
    for note in found.notes:
        print(f"note: {note}")


def _backend_rows(config: EngineConfig, choice: Choice) -> Rows:
    from quire.run.shapes import graph_sizes

    rows = [("backend", choice.backend), ("instruction set", choice.isa), ("threads", str(choice.threads))]
    if choice.backend == "triton":
        limits = config.scheduler
        sizes = graph_sizes(limits.max_num_batched_tokens, limits.max_num_seqs)
        rows.append(("CUDA graphs", "none" if config.device.enforce_eager else f"{', '.join(map(str, sizes))} rows"))
    return rows


def _stage_rows(config: EngineConfig, found: ModelFacts, choice: Choice) -> Rows:
    """Who has what; layers of stages are those asked for, or what would be chosen if nothing were measured."""
    from quire.model.load.stages import numbers_of, stages_of

    parallel, spec = config.parallel, found.spec
    rows = []
    each = [numbers_of(spec, i) for i in range(spec.layers)]
    weights = _weights(config, found, choice) / parallel.tensor_parallel_size
    head = spec.vocab_size * spec.embed_width / (sum(each) + spec.vocab_size * spec.embed_width)
    for number, part in enumerate(stages_of(parallel, spec)):
        share = (1 - head) * sum(each[i] for i in part) / sum(each)
        rows.append(
            (f"stage {number}", f"layers {part.start} to {part.stop - 1}, about {size(share * weights)} a rank")
        )
    how = "as asked" if parallel.pinned_layers else "by the numbers they hold; a start measures the time of layers"
    return [*rows, ("layers of stages", how), ("steps under way", f"{parallel.steps_under_way} at most")]


def _tuning_rows(config: EngineConfig, found: ModelFacts, choice: Choice) -> Rows:
    from quire.ops.tuning import parse, recall
    from quire.run.tune import tuning_key

    if choice.backend != "cpu":
        return []
    pinned = parse(config.device.tune)
    kept = recall(tuning_key(config, found.spec, choice.isa, choice.threads))
    later = "measured at the first start" if choice.isa == "amx" else "measured while the first tokens are made"
    chosen = f"{kept}, measured here" if kept else later
    return [("kernel sizes", str(pinned) if pinned else chosen)]


def _model_rows(found: ModelFacts) -> Rows:
    spec = found.spec
    windows = sorted(set(spec.windows))
    return [
        ("folder", str(found.folder)),
        ("family", spec.family),
        ("parameters", f"{found.parameters:,} in {found.tensors} tensors"),
        *_expert_rows(found),
        *_encoder_rows(found),
        ("layers", f"{spec.layers}, hidden {spec.hidden}, intermediate {spec.intermediate}, {spec.activation}"),
        ("attention", f"{spec.heads} heads, {spec.kv_heads} key/value heads, head size {spec.head_dim}"),
        ("window", "none" if windows == [0] else ", ".join(map(str, windows))),
        ("vocabulary", f"{spec.vocab_size:,}, {'tied' if spec.tied_head else 'separate'} output head"),
        ("positions", f"{spec.max_position:,}"),
        ("end tokens", ", ".join(map(str, found.generation.eos_token_ids)) or "none"),
        ("sampling", ", ".join(f"{k}={v}" for k, v in found.generation.sampling.items()) or "no defaults"),
        ("format", f"{found.scheme}, {found.dtype}"),
    ]


def _share(config: EngineConfig) -> Share:
    """What the first rank has, of which none has more."""
    from quire.model.load.roles import Share
    from quire.parallel.experts import Division, expert_plan

    parallel = config.parallel
    plan = expert_plan(parallel)
    over = {"expert": parallel.expert_parallel_size, "tensor": parallel.tensor_parallel_size}.get(plan.axis)
    return Share(0, parallel.tensor_parallel_size, None if over is None else Division(0, over, plan))


def _rank_rows(config: EngineConfig, found: ModelFacts, choice: Choice) -> Rows:
    """What a rank has; options that do not fit the model are refused as at its load."""
    from quire.model.load.roles import local_spec

    parallel = config.parallel
    if parallel.ranks == 1 or parallel.pipeline_parallel_size > 1 or not found.roles:
        return []
    share = _share(config)
    spec = local_spec(found.spec, share)
    rows = [
        ("weights of a rank", f"about {size(_weights(config, found, choice, share))}, of {parallel.ranks} ranks"),
        ("heads of a rank", f"{spec.heads}, {spec.kv_heads} of keys and values"),
        ("vocabulary of a rank", f"{spec.vocab_size:,} tokens of the table and of the output head"),
    ]
    if share.experts is not None:
        experts = f"{spec.moe.routing.experts} of {found.spec.moe.routing.experts} in a layer"
        rows.append(("experts of a rank", experts))
    return rows


def _expert_rows(found: ModelFacts) -> Rows:
    moe = found.spec.moe
    if not any(moe.sparse):
        return []
    return [
        ("active parameters", f"{found.active_parameters:,} for a token"),
        ("experts", f"{moe.routing.top_k} of {moe.routing.experts}, intermediate {moe.intermediate}"),
        ("layers with experts", str(sum(moe.sparse))),
    ]


def _encoder_rows(found: ModelFacts) -> Rows:
    encoder = found.spec.encoder
    if not encoder.layers:
        return []
    return [
        ("encoder", f"{encoder.layers} layers; prompts are read whole and share no prefix"),
        (
            "decoder",
            f"begins with token {found.generation.decoder_start}, attends to the encoder's output in each layer",
        ),
        ("distances", f"in {encoder.buckets} buckets, the last from {encoder.furthest} tokens on"),
    ]


def _drafting_model(config: EngineConfig) -> ModelFacts | None:
    """The draft model's facts, where one was asked for."""
    from quire.model.describe import describe
    from quire.model.disk.hub import hub_beside

    asked = config.speculation.asked
    if asked is None or not asked.model or asked.method in HEADS:
        return None
    return describe(asked.model, config.model.load_format, hub_beside(config.model))


def _heads(config: EngineConfig, asked: Speculation) -> Checkpoint:
    """What the folder of heads holds."""
    from quire.model.disk.checkpoint import Checkpoint, resolve
    from quire.model.disk.hub import hub_beside

    return Checkpoint(resolve(asked.model or "", hub_beside(config.model)))


def _drafting_layers(
    config: EngineConfig, found: ModelFacts, drafts: ModelFacts | None
) -> list[tuple[ModelSpec, Dtype]]:
    """What keeps keys and values beside the model: a draft model, or the layer of EAGLE."""
    asked = config.speculation.asked
    if drafts is not None:
        return [(drafts.spec, drafts.dtype)]
    if asked is None or asked.method not in ("eagle", "eagle3"):
        return []
    from quire.model.disk.checkpoint import resolve
    from quire.model.disk.hf_config import HfConfig, read_json
    from quire.model.disk.hub import hub_beside
    from quire.speculate.eagle_spec import layer_spec

    path = resolve(asked.model or "", hub_beside(config.model)) / "config.json"
    return [(layer_spec(HfConfig(read_json(path), str(path)), found.spec, found.name), found.dtype)]


def _speculation_rows(config: EngineConfig, asked: Speculation, drafts: ModelFacts | None) -> Rows:
    who = {
        "ngram": f"prompt look-up by the last {asked.prompt_lookup_min} to {asked.prompt_lookup_max} tokens",
        "suffix": f"the prompt and {asked.suffix_decoding_max_cached_requests:,} earlier outputs of the same tenant",
        "self": f"its first {asked.layers} layers" if asked.layers else f"the same model in {asked.quantization}",
        "draft_model": "" if drafts is None else f"{drafts.folder} ({drafts.parameters:,} parameters)",
    }.get(asked.method) or f"{asked.method} heads of {asked.model} ({len(_heads(config, asked).infos)} tensors)"
    when = "as many as pay, by measured step times and acceptance" if asked.adaptive else "always"
    most = f"{asked.tokens} at most" if asked.tokens else "one a head"
    return [("drafts by", who), ("tokens a draft", f"{most}, {when}")]


def _draft_memory(config: EngineConfig, found: ModelFacts, drafts: ModelFacts | None, choice: Choice) -> Rows:
    """What drafting takes beside: weights of its own; keys and values only where it is another model."""
    from msgspec.structs import replace

    asked = config.speculation.asked
    if asked is None or asked.method in LOOK_UPS or asked.layers:
        return []
    if asked.method in HEADS:
        return [("weights that draft", "about " + size(_heads(config, asked).nbytes))]
    own = replace(config, model=replace(config.model, quantization=asked.quantization))
    share = _share(own) if drafts is None or config.parallel.drafts_everywhere(asked) else None
    return [("weights that draft", "about " + size(_weights(own, drafts or found, choice, share)))]


def needed_bytes(config: EngineConfig) -> int:
    """What one engine's weights and KV cache take, about, from the headers of its model; a draft's not counted."""
    from quire.model.describe import compute_dtype, describe, kv_dtype, max_model_len
    from quire.model.disk.hub import hub_of
    from quire.model.memory import layer_kv_bytes
    from quire.ops.choice import choose
    from quire.run.budget import Bytes, plan_kv, shape_kv

    choice = choose(config.device)
    found = describe(config.model.model, config.model.load_format, hub_of(config.model))
    kept = kv_dtype(config.cache, found.spec, compute_dtype(config.model.dtype, found.dtype, choice.backend)[0])
    layouts = {i: Bytes(layer_kv_bytes(found.spec, kept)) for i in found.spec.own_windows}
    length = max_model_len(config.model.max_model_len, found.spec)
    kv = plan_kv(config, shape_kv(config, found.spec.own_windows, layouts, length))
    return _weights(config, found, choice) + kv.blocks * kv.block_bytes


def _memory_rows(config: EngineConfig, found: ModelFacts, choice: Choice, drafts: ModelFacts | None) -> Rows:
    from quire.core.machine import available_memory
    from quire.model.describe import compute_dtype, kv_dtype, max_model_len
    from quire.model.load.roles import local_spec
    from quire.model.memory import kv_bytes_per_token, layer_kv_bytes
    from quire.run.budget import Bytes, check_asked, plan_kv, shape_kv

    windows: dict[int, int] = {}
    layouts: dict[int, Bytes] = {}
    per_token, asked, share = 0, config.speculation.asked, _share(config)
    models = [(local_spec(found.spec, share), found.dtype), *_drafting_layers(config, found, drafts)]
    if drafts is not None and asked is not None and config.parallel.drafts_everywhere(asked):
        models[1:] = [(local_spec(drafts.spec, share), drafts.dtype)]
    each = f" on each of {config.parallel.ranks} ranks" if config.parallel.ranks > 1 else ""
    for spec, on_disk in models:
        dtype, _ = compute_dtype(config.model.dtype, on_disk, choice.backend)
        kept, first = kv_dtype(config.cache, spec, dtype), len(windows)
        windows |= {first + i: window for i, window in spec.own_windows.items()}
        layouts |= {first + i: Bytes(layer_kv_bytes(spec, kept)) for i in spec.own_windows}
        per_token += kv_bytes_per_token(spec, kept)
    length = max_model_len(config.model.max_model_len, found.spec)
    shape = shape_kv(config, windows, layouts, length)
    if choice.backend != "triton":
        check_asked(config, shape.block_bytes, available_memory())
    kv = plan_kv(config, shape)
    return [
        ("weights on disk", size(found.bytes_on_disk)),
        ("weights in memory", "about " + size(_weights(config, found, choice))),
        *_rank_rows(config, found, choice),
        *_offload_rows(config, _weights(config, found, choice)),
        ("KV cache per token", size(per_token) + (", what drafts included" if len(models) > 1 else "") + each),
        (
            "KV cache",
            f"{kv.blocks:,} blocks of {config.cache.block_size} tokens, {size(kv.blocks * kv.block_bytes)}{each}",
        ),
        *_window_rows(kv, per_token),
        ("longest sequence", f"{kv.max_model_len:,} tokens"),
        ("memory available", size(available_memory())),
    ]


def _offload_rows(config: EngineConfig, weights: int) -> Rows:
    """Where weights are that do not stay in the memory of the one engine that uses them; `weights` bytes in all."""
    from quire.model.offload.budget import allowed, folder

    asked = config.offload
    if asked.fully_shard:
        count = config.parallel.data_parallel_size
        nodes = config.cluster.nnodes
        if nodes > 1:
            return [("weights of layers", f"1/{nodes} in each host's memory, the rest is gathered in every step")]
        return [("weights of layers", f"once in memory for {count} replicas: 1/{count} of them for each")]
    if asked.cpu_offload_gb:
        return [("weights on the host", f"{asked.cpu_offload_gb:g} GiB at most, copied in every step")]
    if not asked.from_file:
        return []
    most = allowed(config)
    if weights <= most:
        return [("weights from a file", f"none: {size(most)} are allowed in memory")]
    when = "in every step" if asked.weight_offload == "disk" else "as experts are chosen"
    rest = f"about {size(weights - most)} more than the {size(most)} that are allowed in memory"
    return [("weights from a file", f"{rest} are read from {folder(config)} {when}")]


def _window_rows(kv: KVPlan, per_token: int) -> Rows:
    """What windows save: layers by what they see, and the cache of the longest sequence."""
    if not any(kv.sizes.windows):
        return []
    tables = Counter((window, len(held)) for window, held in zip(kv.groups.windows, kv.groups.layers, strict=True))
    groups = [
        f"{count} of {layers} layer{'s' * (layers > 1)} ({f'the last {window:,}' if window else 'all'} tokens)"
        for (window, layers), count in tables.items()
    ]
    length = kv.max_model_len
    held, whole = kv.bytes_held(length), length * per_token
    return [
        ("block tables", "; ".join(groups)),
        ("KV cache of a sequence", f"{size(held)} at {length:,} tokens, {size(whole)} if windows freed nothing"),
    ]


def _weights(config: EngineConfig, found: ModelFacts, choice: Choice, share: Share | None = None) -> int:
    """Bytes of the packed weights, of all or of a rank's share."""
    from quire.model.describe import compute_dtype
    from quire.model.memory import BF12_BITS

    dtype, _ = compute_dtype(config.model.dtype, found.dtype, choice.backend)
    on_cpu = choice.backend == "cpu"
    narrow = on_cpu and dtype.name == "bfloat16" and config.device.bf16_bits == 12
    bits = _Bits(8 * dtype.itemsize, BF12_BITS if narrow else 8 * dtype.itemsize, 4 if on_cpu else 8)
    return _packed(config, found, bits, share)


class _Bits(NamedTuple):
    """Of a number that is not quantized: in tables, in matrices; and of a 4-bit code."""

    table: float
    matrix: float
    int4: int


def _packed(config: EngineConfig, found: ModelFacts, of: _Bits, share: Share | None) -> int:
    """Bytes of the packed weights: matrices in the target format with their scales, tables as on disk, norms f32.

    A tied head that is quantized on load is packed a second time, because the embedding table stays as it is for
    look-ups. The torch reference spends a whole byte on a 4-bit code. Where no roles are known, every parameter is
    counted as a matrix's.
    """
    from math import prod

    from quire.model.load.roles import ROLES, Share
    from quire.model.memory import weight_bytes
    from quire.quant.registry import quantizer

    target, spec, total = quantizer(config.model.quantization, found.stored), found.spec, 0
    scales, share = 16 / config.model.group_size, share or Share()
    if not found.roles:
        made = {"int8": 8, "fp8": 8}.get(target.name, of.int4) + scales if target is not None else of.matrix
        return weight_bytes(found.parameters, made)
    for name in found.roles:
        role = ROLES[name]
        if name == "head" and spec.tied_head and target is None:
            continue
        table = of.matrix if spec.tied_head and target is None else of.table
        bits = {"vector": 32.0, "dense": 32.0, "table": table, "linear": of.matrix}[role.kind]
        kept = found.matrix_bits if role.kind == "linear" and role.layer else found.outer_bits.get(name, 0.0)
        if kept:
            bits = kept + (of.int4 - 4 if kept < 8 else 0)
        if role.kind == "linear" and target is not None:
            bits = {"int8": 8, "fp8": 8}.get((target.head if name == "head" else target).name, of.int4) + scales
        total += weight_bytes(prod(share.shape(name, spec)) * share.copies(name, spec), bits)
    return total
