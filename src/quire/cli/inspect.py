"""`quire inspect`: what a model is and needs, and what would run it, before anything is loaded.

Nothing here imports torch, unless there is a GPU to ask for or transformers' code for the model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from quire.cli.flags import ENGINE, option_command, to_engine
from quire.cli.model_names import with_default
from quire.cli.params import option
from quire.cli.show import Rows, show, size

if TYPE_CHECKING:
    from quire.core.config import EngineConfig
    from quire.core.speculation import Speculation
    from quire.model.describe import ModelFacts
    from quire.model.spec import ModelSpec
    from quire.ops.choice import Choice
    from quire.run.kv_budget import KVPlan


@option_command(
    "inspect",
    ENGINE,
    option("--json", "as_json", is_flag=True, help="Print JSON, with the metadata and tensors of the model's files."),
)
def inspect(options: dict[str, Any], as_json: bool) -> None:
    """Facts of a model and what would be decided for it, from its headers alone: no weight is read."""
    config = to_engine(with_default(options))
    from quire.cli.inspect_refused import check_type_on_hub, show_refused
    from quire.core.errors import ModelError
    from quire.core.exclusions.table import check_known
    from quire.model.describe import describe
    from quire.model.known import known_of, known_of_device
    from quire.model.own_drafts import with_own_drafts
    from quire.ops.choice import choose
    from quire.store.hub import hub_of

    try:
        check_type_on_hub(config.model.model, hub_of(config.model))
        found = describe(config.model.model, config.model.load_format, hub_of(config.model))
    except ModelError as error:
        show_refused(config, error, as_json)
        raise
    choice, config = choose(config.device), with_own_drafts(config, found)
    check_known(config.features, known_of(config, found) | known_of_device(config, choice.backend, choice.chosen))
    tables = _tables(config, found, choice)
    if as_json:
        from quire.cli.inspect_json import inspected

        print(inspected(dict(tables), found.notes, found.folder))
        return
    for title, rows in tables:
        show(title, rows)
    for note in found.notes:
        print(f"note: {note}")


def _tables(config: EngineConfig, found: ModelFacts, choice: Choice) -> Iterator[tuple[str, Rows]]:
    """The tables by their titles; what comes before a refusal is shown."""
    from quire.cli.inspect_pooling import pooling_rows
    from quire.compress.evaluation.passport import passport_rows, read_passport
    from quire.plan.needs import drafting_model

    yield "model", _model_rows(found)
    if vectors := pooling_rows(found):
        yield "vectors", vectors
    found = replace(found, vision=None) if config.model.language_model_only else found
    if (passport := read_passport(found.folder)) is not None:
        yield "measured", passport_rows(passport)
    drafts = drafting_model(config)
    yield "memory", [*_memory_rows(config, found, choice, drafts), *_draft_memory(config, found, drafts, choice)]
    if (asked := config.speculation.asked) is not None:
        yield "speculation", _speculation_rows(config, asked, found, drafts)
    if config.parallel.pipeline_parallel_size > 1:
        yield "stages", _stage_rows(config, found, choice)
    yield "runs on", [*_backend_rows(config, choice), *_tuning_rows(config, found, choice)]
    yield "ops", [*choice.labels.items()]


def _backend_rows(config: EngineConfig, choice: Choice) -> Rows:
    from quire.run.step_sizes import graph_sizes

    rows = [("backend", choice.backend), ("instruction set", choice.isa), ("threads", str(choice.threads))]
    if choice.backend == "triton":
        limits = config.scheduler
        sizes = graph_sizes(limits.max_num_batched_tokens, limits.max_num_seqs)
        rows.append(("CUDA graphs", "none" if config.device.enforce_eager else f"{', '.join(map(str, sizes))} rows"))
    return rows


def _stage_rows(config: EngineConfig, found: ModelFacts, choice: Choice) -> Rows:
    """Who has what; layers of stages are those asked for, or what would be chosen if nothing were measured."""
    from quire.model.load.pipeline_stages import numbers_of, stages_of
    from quire.plan.needs import weights_of

    parallel, spec = config.parallel, found.spec
    rows = []
    each = [numbers_of(spec, i) for i in range(spec.layers)]
    weights = weights_of(config, found, choice) / parallel.tensor_parallel_size
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
    from quire.run.kernel_tuning import tuning_key

    if choice.backend != "cpu":
        return []
    pinned = parse(config.device.tune)
    kept = recall(tuning_key(config, found.spec, choice.isa, choice.threads))
    later = "measured at the first start" if choice.isa == "amx" else "measured while the first tokens are made"
    chosen = f"{kept}, measured here" if kept else later
    return [("kernel sizes", str(pinned) if pinned else chosen)]


def _model_rows(found: ModelFacts) -> Rows:
    spec = found.spec
    attending = [i for i in range(spec.layers) if spec.attends(i)]
    windows = sorted({spec.windows[i] for i in attending}, key=abs) or [0]
    return [
        ("folder", str(found.folder)),
        ("family", spec.family if found.vision is None else f"{found.vision.kind}, whose decoder is {spec.family}"),
        ("parameters", f"{found.parameters:,} in {found.tensors} tensors"),
        *_expert_rows(found),
        *_encoder_rows(found),
        *_vision_rows(found),
        ("layers", f"{spec.layers}, hidden {spec.hidden}, intermediate {spec.intermediate}, {spec.activation}"),
        *_attention_rows(spec, len(attending)),
        *_recurrent_rows(spec),
        ("window", "none" if windows == [0] else ", ".join(map(window_in_words, windows))),
        ("vocabulary", f"{spec.vocab_size:,}, {'tied' if spec.tied_head else 'separate'} output head"),
        ("positions", f"{spec.max_position:,}"),
        ("end tokens", ", ".join(map(str, found.generation.eos_token_ids)) or "none"),
        ("sampling", ", ".join(f"{k}={v}" for k, v in found.generation.sampling.items()) or "no defaults"),
        ("format", f"{found.scheme}, {found.dtype}"),
    ]


def window_in_words(window: int) -> str:
    """A window's size, as `inspect` says it."""
    return f"chunks of {-window:,}" if window < 0 else str(window)


def seen_in_words(window: int) -> str:
    """Which tokens rows see."""
    return f"chunks of {-window:,}" if window < 0 else f"the last {window:,}" if window else "all"


def _attention_rows(spec: ModelSpec, layers: int) -> Rows:
    if not layers:
        return []
    return [("attention", f"{spec.heads} heads, {spec.kv_heads} key/value heads, head size {spec.head_dim}")]


def _recurrent_rows(spec: ModelSpec) -> Rows:
    """Layers that convolve tokens, and those that keep a recurrent state."""
    from quire.core.dtypes import F32
    from quire.model.mixers.layer_mixers import mixers_of
    from quire.ops.convolution import RowLayout

    mixers, rows = mixers_of(spec), list[tuple[str, str]]()
    convolved = [
        (part.width, spec.windows[i])
        for i, mixer in enumerate(mixers)
        for part in mixer.parts(1, F32)
        if isinstance(part, RowLayout)
    ]
    for (width, taps), layers in Counter(convolved).items():
        rows.append(("convolutions", f"{layers} layers, of {width:,} channels over the last {taps} tokens"))
    states = [mixer.state.nbytes for mixer in mixers if mixer.state is not None]
    if states:
        rows.append(("states", f"{len(states)} layers, {size(sum(states))} of a sequence"))
    return rows


def _rank_rows(config: EngineConfig, found: ModelFacts, choice: Choice) -> Rows:
    """What a rank has; options that do not fit the model are refused as at its load."""
    from quire.model.load.roles import local_spec
    from quire.plan.needs import rank_share, weights_of

    parallel = config.parallel
    if parallel.ranks == 1 or parallel.pipeline_parallel_size > 1 or not found.roles:
        return []
    share = rank_share(config)
    spec = local_spec(found.spec, share)
    rows = [
        ("weights of a rank", f"about {size(weights_of(config, found, choice, share))}, of {parallel.ranks} ranks"),
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
    if not found.spec.encoder_decoder:
        return []
    heard = f"{encoder.rows} rows of {2 * encoder.rows} frames of {encoder.bins} numbers, which are sound"
    buckets = f"in {encoder.buckets} buckets, the last from {encoder.furthest} tokens on"
    return [
        ("encoder", f"{encoder.layers} layers; prompts are read whole and share no prefix"),
        (
            "decoder",
            f"begins with token {found.generation.decoder_start}, attends to the encoder's output in each layer",
        ),
        ("reads", heard) if encoder.rows else ("distances", buckets),
    ]


def _vision_rows(found: ModelFacts) -> Rows:
    """What makes rows of images, and what these change in the decoder."""
    seen = found.vision
    if seen is None:
        return []
    tower, sight = seen.tower, found.spec.sight
    patch, merge = tower.patches.size, tower.patches.merge
    joined = f", {merge} x {merge} of them one row" if merge > 1 else ""
    decoder = [
        *(
            [f"positions of three kinds, {', '.join(map(str, sight.sections))} frequencies each"]
            if sight.sections
            else []
        ),
        *([f"further features behind its first {sight.deep} layers"] if sight.deep else []),
        *(["rows of an image see each other" + " in layers with windows" * sight.windows] if sight.mutual else []),
    ]
    layers = f"one matrix and norms, hidden {tower.hidden}"
    if tower.layers:
        layers = (f"{tower.layers} layers, hidden {tower.hidden}, intermediate {tower.intermediate}, "
                  f"{tower.heads} heads of {tower.head_dim}")  # fmt: skip
    return [
        ("vision tower", f"{tower.family}, {layers}"),
        ("images", f"patches of {patch} x {patch} pixels{joined}"),
        ("vision parameters", f"{seen.parameters:,} in {seen.tensors} of the tensors"),
        *([("decoder with images", "; ".join(decoder))] if decoder else []),
    ]  # fmt: skip


def _speculation_rows(config: EngineConfig, asked: Speculation, found: ModelFacts, drafts: ModelFacts | None) -> Rows:
    from quire.plan.needs import heads_of, mtp_of

    own = "the model's own layer for it"
    who = {
        "ngram": f"prompt look-up by the last {asked.prompt_lookup_min} to {asked.prompt_lookup_max} tokens",
        "suffix": f"the prompt and {asked.suffix_decoding_max_cached_requests:,} earlier outputs of the same tenant",
        "self": f"its first {asked.layers} layers" if asked.layers else f"the same model in {asked.quantization}",
        "mtp": f"{asked.model or own} ({mtp_of(config, found).parameters:,} parameters)"
        if asked.method == "mtp"
        else "",
        "draft_model": "" if drafts is None else f"{drafts.folder} ({drafts.parameters:,} parameters)",
    }.get(asked.method) or f"{asked.method} heads of {asked.model} ({len(heads_of(config, asked).infos)} tensors)"
    when = "as many as pay, by measured step times and acceptance" if asked.adaptive else "always"
    usual = "as many as a block has" if asked.method == "dflash" else "one a head"
    most = f"{asked.tokens} at most" if asked.tokens else usual
    return [("drafts by", who), ("tokens a draft", f"{most}, {when}")]


def _draft_memory(config: EngineConfig, found: ModelFacts, drafts: ModelFacts | None, choice: Choice) -> Rows:
    """What drafting takes beside: weights of its own; keys and values only where it is another model."""
    from quire.plan.needs import drafting_weights

    weights = drafting_weights(config, found, drafts, choice)
    return [("weights that draft", "about " + size(weights))] if weights else []


def _memory_rows(config: EngineConfig, found: ModelFacts, choice: Choice, drafts: ModelFacts | None) -> Rows:
    from quire.core.machine import available_memory
    from quire.plan.needs import drafting_layers, kv_shape, weights_of
    from quire.run.kv_budget import check_asked, plan_kv

    shape, per_token = kv_shape(config, found, choice, drafts)
    drafting = bool(drafting_layers(config, found, drafts))
    each = f" on each of {config.parallel.ranks} ranks" if config.parallel.ranks > 1 else ""
    if choice.backend != "triton":
        check_asked(config, shape.block_bytes, available_memory())
    kv = plan_kv(config, shape)
    return [
        ("weights on disk", size(found.bytes_on_disk)),
        ("weights in memory", "about " + size(weights_of(config, found, choice))),
        *_file_rows(found, choice),
        *_rank_rows(config, found, choice),
        *_offload_rows(config, weights_of(config, found, choice)),
        ("KV cache per token", size(per_token) + (", what drafts included" if drafting else "") + each),
        (
            "KV cache",
            f"{kv.blocks:,} blocks of {config.cache.block_size} tokens, {size(kv.blocks * kv.block_bytes)}{each}",
        ),
        *_window_rows(kv, per_token),
        *_state_rows(kv),
        ("longest sequence", f"{kv.max_model_len:,} tokens"),
        ("memory available", size(available_memory())),
    ]


def _file_rows(found: ModelFacts, choice: Choice) -> Rows:
    """Tables that stay in the model's files, of which no more than rows of tokens are ever in memory."""
    inside = sum(found.in_file.values()) if choice.backend != "triton" else 0
    return [("read from disk row by row", f"{size(inside)} of tables")] if inside else []


def _state_rows(kv: KVPlan) -> Rows:
    """What recurrent states take, and what a step moves of them."""
    states = kv.states
    if not states.slots:
        return []
    apart = f"a snapshot every {states.interval:,} tokens" if states.interval else "no snapshots"
    each = f"{size(states.slot_bytes)} a sequence, read and written in every step"
    return [("recurrent states", each), ("state slots", f"{states.slots:,}, {size(states.nbytes)}; {apart}")]


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
        f"{count} of {layers} layer{'s' * (layers > 1)} ({seen_in_words(window)} tokens)"
        for (window, layers), count in tables.items()
    ]
    length = kv.max_model_len
    held, whole = kv.bytes_held(length), length * per_token
    return [
        ("block tables", "; ".join(groups)),
        ("KV cache of a sequence", f"{size(held)} at {length:,} tokens, {size(whole)} if windows freed nothing"),
    ]
