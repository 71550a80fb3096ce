"""A model beside the target that drafts by the target's own keys, values and hidden rows: Gemma 4's assistants.

Team Gemma 2026. A row is made of the target's embedding of the last token and its hidden row before it, and says the
next token and a row that stands for the target's hidden row of it; with both it goes on. Its layers read what the
target's last layers of the same kind keep of all tokens but the last, and keep nothing themselves: nothing is to be
computed for prompts, forks, prefix hits or what was preempted. All rows of a draft turn as the last token does.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from dataclasses import replace as changed

import numpy as np
from msgspec.structs import replace

from quire.core.config import EngineConfig
from quire.core.dtypes import F32
from quire.core.errors import ModelError
from quire.core.speculation import TreeForm
from quire.features.images.run_image_features import ImageFeatures
from quire.model.build import Model, check_groups, form_of
from quire.model.disk.assistant_headers import open_assistant, read_clusters
from quire.model.disk.headers import ModelHeaders
from quire.model.families.rope import shared_tables
from quire.model.load.builders import BLOCKS, load_head, load_layer
from quire.model.load.parallel_decoder import parallel_decoder, share_of, step_of
from quire.model.load.parts import load_final_norm
from quire.model.load.reader import WeightReader
from quire.model.load.roles import Share
from quire.model.mixers.mixer import WIDE
from quire.model.net.decoder import Decoder
from quire.model.net.hidden_taps import Taps
from quire.model.net.parts import Embedding
from quire.model.spec import ModelSpec
from quire.ops.backend import Ops
from quire.parallel.rank_place import RankPlace
from quire.quant.registry import quantizer
from quire.run.step import ModelStep
from quire.speculate.assistant_decoder import AssistantDecoder, TokenClusters, unscored
from quire.speculate.assistant_drafter import AssistantDrafter
from quire.speculate.head_layers import beside, row_buffers
from quire.store.hub import hub_beside


@dataclass(frozen=True)
class Assistant:
    """The assistant as a `model` of its own. `sources`: the target's layer that each of its layers reads.

    `clusters`: of tokens, where not all of them have logits.
    """

    model: Model
    sources: tuple[int, ...]
    clusters: TokenClusters | None

    @property
    def taps(self) -> Taps:
        """What the target's own head reads, of rows that want logits."""
        return Taps()

    @property
    def weight_bytes(self) -> int:
        """Memory of the weights."""
        return self.model.weight_bytes

    def proposer(
        self, target: ModelStep, step: ModelStep | None, form: TreeForm | None, features: ImageFeatures | None = None
    ) -> AssistantDrafter:
        """The proposer that drafts with it for `target`; rows of images are read as the target kept them."""
        assert step is not None and isinstance(self.model.decoder, AssistantDecoder)
        return AssistantDrafter(step, self.model.decoder, target, self.clusters, form)


def load_assistant(config: EngineConfig, folder: str, target: Model, ops: Ops, place: RankPlace) -> Assistant:
    """The assistant in `folder`, whose matrices are quantized as the target's are, and split over ranks by heads.

    `ModelError` naming what does not fit `target`, `ConfigError` where it cannot be split.
    """
    assert isinstance(target.decoder, Decoder)
    options, opened = config.model, open_assistant(folder, hub_beside(config.model))
    kind = quantizer(options.quantization, opened.stored)
    check_groups(opened, kind, options.group_size)
    sources = layers_read(opened, target.spec, target.name)
    spec = changed(opened.spec, windows=tuple(map(_behind, opened.spec.windows)), sight=target.spec.sight)
    opened = changed(opened, spec=spec)
    share = share_of(place, (), step_of(opened, kind, options.group_size))
    form = changed(form_of(config, WIDE[target.dtype], kind), runs=False)
    reader = WeightReader(opened, ops, form, share, None)
    tables = shared_tables(spec.rope, target.max_model_len)
    reader.count("rope", "f32", sum(table.nbytes for table in tables.values()))
    ropes = dict(zip(tables, reader.place(tuple(tables.values())), strict=True))
    layers = tuple(reader.place(load_layer(reader, i, ropes[spec.rope[i]], None)) for i in range(spec.layers))
    clusters = _clusters(reader) if spec.assistant.clusters else None
    head = unscored if clusters is not None else reader.place(load_head(reader, np.empty(0, F32)))
    norm = reader.place(load_final_norm(reader))
    bare = Embedding(np.empty(0, F32))
    own = Decoder(ops, bare, (), layers, norm, head, block=BLOCKS[spec.join], narrows=False)
    parallel = replace(config.parallel, enable_sequence_parallel=False, rank_invariant=False)
    made = parallel_decoder(own, spec, place, share, parallel)
    made = changed(made, embed=target.decoder.embed, embed_changes=target.decoder.embed_changes)
    if clusters is not None:
        made = changed(made, head=unscored)
    given, kept = row_buffers(config, target, target.decoder.embed, ops)
    decoder = AssistantDecoder(
        **{each.name: getattr(made, each.name) for each in fields(Decoder)},
        join=reader.place(reader.linear(("assistant_in",), None)),
        back=reader.place(reader.linear(("assistant_out",), None)),
        given=given,
        kept=kept,
    )
    opened.source.give_back()
    weights = sum(size for _, size in reader.report.values())
    model = changed(beside(config, target, spec, decoder), name=opened.name, folder=opened.folder,
                    report=reader.report, weight_bytes=weights)  # fmt: skip
    return Assistant(model, sources, clusters)


def _behind(window: int) -> int:
    """What a row sees that stands behind the last key of the window of the token it is of."""
    return window - 1 if window > 1 else window


def layers_read(opened: ModelHeaders, target: ModelSpec, name: str) -> tuple[int, ...]:
    """The layer of `target`, called `name`, that each layer reads: the last with keys of its own and the same window.

    `ModelError` where there is none, or widths are not the target's.
    """
    spec, found = opened.spec, list[int]()
    for what, own, its in (
        ("backbone_hidden_size", spec.assistant.width, target.hidden),
        ("vocab_size", spec.vocab_size, target.vocab_size),
    ):
        if own != its:
            raise ModelError(f"{opened.folder}: {what} is {own}, that of {name} is {its}")
    for layer, window in enumerate(spec.windows):
        kind = f"a window of {window}" if window else "no window"
        source = max((i for i in target.own_layers if target.attends(i) and target.windows[i] == window), default=-1)
        if source < 0 or window == 1:
            raise ModelError(f"{opened.folder}: layer {layer} has {kind}, and {name} has no such layer to read")
        own_heads, heads = spec.at(layer), target.at(source)
        if (own_heads.kv_heads, own_heads.head_dim) != (heads.kv_heads, heads.head_dim):
            raise ModelError(
                f"{opened.folder}: layer {layer} reads {own_heads.kv_heads} heads of {own_heads.head_dim} numbers, and "
                f"layer {source} of {name} keeps {heads.kv_heads} of {heads.head_dim}"
            )
        found.append(source)
    return tuple(found)


def _clusters(reader: WeightReader) -> TokenClusters:
    """What scores tokens, whole on every rank: the first alone draws."""
    whole, sizes = reader.of(Share()), reader.opened.spec.assistant
    table, centroids = whole.table("embed"), whole.dense("centroids", None)
    return TokenClusters(*reader.place((centroids, table)), read_clusters(reader.opened), sizes.chosen)
