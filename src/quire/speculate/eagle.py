"""One decoder layer that continues the target's own hidden rows: EAGLE and EAGLE-3.

Li et al. 2024, "EAGLE: speculative sampling requires rethinking feature uncertainty"; Li et al. 2025, "EAGLE-3: scaling
up inference acceleration of large language models via training-time test". The row of position p reads the target's
hidden row of p and the token after it, and says the token after that; further rows read the layer's own output instead.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from quire.core.config import EngineConfig
from quire.core.errors import ModelError
from quire.core.speculation import UNBRANCHED, TreeForm
from quire.features.images.run_image_features import ImageFeatures
from quire.model.build import Model
from quire.model.families.find import layer_spec
from quire.model.families.rope import shared_tables
from quire.model.mixers.mixer import WIDE
from quire.model.net.decoder import Decoder
from quire.model.net.hidden_taps import Taps
from quire.model.net.parts import Embedding, Linear, NoNorm
from quire.model.spec import ModelSpec
from quire.ops.arrays import Array
from quire.ops.backend import Ops
from quire.run.step import ModelStep
from quire.speculate.eagle_decoder import Eagle1Input, Eagle3Input, EagleDecoder, EagleInput
from quire.speculate.eagle_drafter import EagleDrafter
from quire.speculate.head_file import HeadFile
from quire.speculate.head_layers import HeadLayers, beside, row_buffers


def usual_layers(layers: int) -> tuple[int, int, int]:
    """Before which layers of the target EAGLE-3 reads its stream, where the file does not say: early, middle, late."""
    early, middle, late = (min(max(i, 1), layers - 1) for i in (2, layers // 2, layers - 3))
    return early, middle, late


@dataclass(frozen=True)
class Eagle:
    """The layer as a `model` of its own. `fuse`: from the tapped rows to a hidden row, or None: they are it.

    `ids` [tokens that it knows] int64: the target's id of each, or None: the same.
    """

    model: Model
    taps: Taps
    fuse: Linear | None
    ids: Array | None

    @property
    def weight_bytes(self) -> int:
        """Memory of the weights."""
        return self.model.weight_bytes

    def proposer(
        self, target: ModelStep, step: ModelStep | None, form: TreeForm | None, features: ImageFeatures | None = None
    ) -> EagleDrafter:
        """The proposer that drafts with it for `target`; `step` runs `model`. `features`: of images, whose rows it
        takes as the target does."""
        assert step is not None and isinstance(self.model.decoder, EagleDecoder)
        return EagleDrafter(step, self.model.decoder, target, (self.fuse, self.ids), form, features)


def load_eagle(config: EngineConfig, folder: str, method: str, target: Model, ops: Ops) -> Eagle:
    """The public layouts of both: method "eagle" has layers.0.* and fc.*, "eagle3" midlayer.*, fc.weight, norm.weight,
    lm_head.weight over `draft_vocab_size` tokens with d2t (the target's id less its own) and t2d. The table of tokens
    is the target's where there is none.

    `ModelError` naming what does not fit `target`.
    """
    assert isinstance(target.decoder, Decoder)
    file = HeadFile(folder, ops, WIDE[target.dtype], lambda name: name.removeprefix("model."))
    for other in UNBRANCHED:
        if any(other in name.lower() for name in file.config.texts("architectures")):
            raise ModelError(f"{file.folder}: is of the method {other!r}; ask for that method")
    spec = layer_spec(file.config, target.spec, target.name)
    ids = _ids(file, spec, target.spec.vocab_size) if method == "eagle3" else None
    spec = replace(spec, vocab_size=target.spec.vocab_size if ids is None else len(ids))
    read = HeadLayers(file, spec, target, ops)
    (rope,) = shared_tables(spec.rope, target.max_model_len).values()
    layers = file.config.child("eagle_config").integers("eagle_aux_hidden_state_layer_ids")
    if method == "eagle3":
        count = target.spec.file_layer(target.spec.layers - 1) + 1
        before = layers or usual_layers(count)
        if not all(0 < i < count for i in before):
            raise ModelError(f"{file.folder}: layers {before} of {target.name}, which has {count}")
        taps = Taps(tuple(target.spec.behind(i - 1) for i in before), every=True)
        fuse = file.linear({"fc": spec.hidden}, taps.width(spec.hidden))
        entry: EagleInput = Eagle3Input(read.norm("midlayer.input_layernorm"), read.norm("midlayer.hidden_norm"))
        layer, norm = read.layer("midlayer", 2 * spec.hidden, ops.put(rope)), read.norm("norm")
        head = file.linear({"lm_head": spec.vocab_size}, spec.hidden) if "lm_head.weight" in file else None
    else:
        taps, fuse, norm, head = Taps(every=True), None, NoNorm(), None
        entry = Eagle1Input(file.linear({"fc": spec.hidden}, 2 * spec.hidden))
        layer = read.layer("layers.0", spec.hidden, ops.put(rope))
        if "lm_head.weight" in file:
            head = file.linear({"lm_head": spec.vocab_size}, spec.hidden)
    own = "embed_tokens.weight" in file
    table = file.table("embed_tokens.weight", target.spec.vocab_size, spec.hidden) if own else None
    embed = target.decoder.embed if table is None else Embedding(table)
    if head is None and ids is not None:
        raise ModelError(f"{file.folder}: lm_head.weight is missing, and d2t names tokens of its own")
    file.finish()
    given, kept = row_buffers(config, target, embed, ops)
    decoder = EagleDecoder(ops, embed, entry, layer, norm, head or target.decoder.head, given, kept)
    made = beside(config, target, spec, decoder)
    model = replace(made, name=file.folder.name, weight_bytes=file.nbytes, folder=file.folder)
    return Eagle(model, taps, fuse, None if ids is None else ops.put(ids))


def _ids(file: HeadFile, spec: ModelSpec, vocab: int) -> NDArray[np.int64] | None:
    """The target's id of each token that the head knows; d2t holds how far it lies from its own."""
    known = file.config.integer("draft_vocab_size", vocab)
    if "d2t" not in file:
        if known != vocab:
            raise ModelError(f"{file.folder}: d2t is missing, and draft_vocab_size {known} is not the target's {vocab}")
        return None
    ids = np.arange(known) + np.asarray(file.tensor("d2t", known), np.int64)
    if not 0 <= int(ids.min()) <= int(ids.max()) < vocab or len(set(ids.tolist())) != known:
        raise ModelError(f"{file.folder}: d2t names tokens that the target does not have, or one of them twice")
    if "t2d" in file and not np.array_equal(np.flatnonzero(file.tensor("t2d", vocab)), np.sort(ids)):
        raise ModelError(f"{file.folder}: t2d does not say the tokens that d2t says")
    return ids
