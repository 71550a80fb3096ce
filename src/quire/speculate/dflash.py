"""Layers that draft a whole block in one pass, from the target's hidden rows: DFlash.

Chen, Liang and Liu 2026, "DFlash: block diffusion for flash speculative decoding" (arXiv 2602.06036). Every layer
reads, as keys and values of the tokens so far, the target's hidden rows of several depths, joined and normed. The rows
of a block are the last token and as many masks as tokens are drafted; a mask's row says the token of its own place.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from quire.core.config import EngineConfig
from quire.core.errors import ModelError
from quire.core.speculation import TreeForm
from quire.features.images.run_image_features import ImageFeatures
from quire.model.build import Model
from quire.model.disk.hf_config import HfConfig
from quire.model.families.dflash import BlockFacts, read_blocks
from quire.model.families.rope import shared_tables
from quire.model.mixers.mixer import WIDE
from quire.model.net.decoder import Decoder, Layer, own_attention
from quire.model.net.hidden_taps import Taps
from quire.model.net.parts import Embedding, Linear, RowChange, Scale, SoftCap
from quire.ops.arrays import Array
from quire.ops.attention_spec import AttentionSpec
from quire.ops.backend import Ops
from quire.run.step import ModelStep
from quire.speculate.dflash_decoder import BlockAttention, DFlashDecoder
from quire.speculate.dflash_drafter import DFlashDrafter
from quire.speculate.head_file import HeadFile
from quire.speculate.head_layers import HeadLayers, beside

NAMES = {"encoder.output_norm_enc.": "hidden_norm.", "encoder.fc.": "fc.", "midlayer.": "layers.0.", "model.": ""}
"""How some folders begin the names of tensors, and what these are called here."""


@dataclass(frozen=True)
class DFlash:
    """The layers as a `model` of their own. `fuse`: from the tapped rows to what the layers read."""

    model: Model
    taps: Taps
    fuse: Linear
    facts: BlockFacts

    @property
    def weight_bytes(self) -> int:
        """Memory of the weights."""
        return self.model.weight_bytes

    def proposer(
        self, target: ModelStep, step: ModelStep | None, form: TreeForm | None, features: ImageFeatures | None = None
    ) -> DFlashDrafter:
        """The proposer that drafts with them for `target`; `step` runs `model`."""
        assert step is not None and isinstance(self.model.decoder, DFlashDecoder)
        return DFlashDrafter(step, self.model.decoder, target, self.fuse, self.facts.mask_token)


def load_dflash(config: EngineConfig, folder: str, tokens: int, target: Model, ops: Ops) -> DFlash:
    """Read the layout of the method's authors, for drafts of at most `tokens` (0: the block's size less one).

    `layers.N.*` as of Qwen3, `fc.weight` [hidden, hidden x layers read], `hidden_norm.weight`, `norm.weight`; the table
    of tokens and the output matrix are the target's where the folder has none. `ModelError` naming what does not fit.
    """
    assert isinstance(target.decoder, Decoder)
    file = HeadFile(folder, ops, WIDE[target.dtype], _named)
    if file.find(r"candidate_selector\..*|layers\.\d+\.(attention|mlp)_conv\..*"):
        raise ModelError(
            f"{file.folder}: its blocks choose tokens by a selector and convolve rows (DFlash 2), which is not "
            "supported; use a folder of the first DFlash"
        )
    spec, facts = read_blocks(file.config, target.spec, target.name, tokens)
    read = HeadLayers(file, spec, target, ops)
    (rope,) = shared_tables(spec.rope, target.max_model_len).values()
    rows = config.scheduler.rows(target.max_model_len) + config.scheduler.max_num_seqs * facts.size
    reach = ops.put(np.ones(rows, np.int32))
    turns = ops.put(rope)
    layers = tuple(_layer(read, i, turns, facts, reach) for i in range(spec.layers))
    taps = Taps(facts.target_layers, every=True)
    fuse = file.linear({"fc": spec.hidden}, taps.width(spec.hidden))
    embed = target.decoder.embed
    if "embed_tokens.weight" in file:
        embed = Embedding(file.table("embed_tokens.weight", target.spec.vocab_size, spec.hidden))
    head = target.decoder.head
    if "lm_head.weight" in file:
        head = file.linear({"lm_head": spec.vocab_size}, spec.hidden)
    own = file.config.child("dflash_config").over(file.config)
    decoder = DFlashDecoder(
        ops, embed, _scaled(own, "input_embedding_scale"), layers, read.norm("norm"), head, _head_changes(own),
        narrows=False, context_norm=read.norm("hidden_norm"), reach=reach,
    )  # fmt: skip
    file.finish()
    made = beside(config, target, spec, decoder)
    model = replace(made, name=file.folder.name, weight_bytes=file.nbytes, folder=file.folder)
    return DFlash(model, taps, fuse, facts)


def _named(name: str) -> str:
    """A tensor's name without what some folders begin it with."""
    for start, own in NAMES.items():
        if name.startswith(start):
            return own + name.removeprefix(start)
    return name


def _layer(read: HeadLayers, i: int, rope: Array, facts: BlockFacts, reach: Array) -> Layer:
    base, spec = f"layers.{i}", read.spec
    norms = [read.file.vector(f"{base}.self_attn.{name}_norm.weight", spec.head_dim) for name in ("q", "k")]
    return replace(
        read.layer(base, spec.hidden, rope),
        attn_norm=read.norm(f"{base}.input_layernorm"),
        qk_norms=(norms[0], norms[1]),
        attend=AttentionSpec(spec.attention_scale, facts.windows[i]),
        attention=own_attention if facts.causal[i] else BlockAttention(reach),
    )


def _scaled(own: HfConfig, field: str) -> tuple[RowChange, ...]:
    factor = own.number(field, 1.0)
    return () if factor == 1.0 else (Scale(factor),)


def _head_changes(own: HfConfig) -> tuple[RowChange, ...]:
    """What is made of logits: a multiplier, then a cap."""
    cap = own.number("final_logit_softcapping", 0.0)
    return (*_scaled(own, "output_multiplier"), *((SoftCap(cap),) if cap else ()))
