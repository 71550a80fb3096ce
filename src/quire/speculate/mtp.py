"""Drafts by the layer for multi-token prediction that lies in a model's own files.

DeepSeek-AI 2024, "DeepSeek-V3 technical report", section 2.2; Gloeckle et al. 2024, "Better & faster large language
models via multi-token prediction". The row of position p reads what the head read of p and the token after it, and says
the token after that. Further tokens come of the layer's own rows, normed as the head reads them: the layer was trained
on rows behind a norm.
"""

from __future__ import annotations

from dataclasses import replace

from quire.core.config import EngineConfig
from quire.core.errors import ModelError
from quire.model.build import Model, check_groups, form_of
from quire.model.describe import open_model
from quire.model.families.mtp import keeping_all
from quire.model.families.rope import shared_tables
from quire.model.load.builders import load_layer
from quire.model.load.parts import load_final_norm, load_norm
from quire.model.load.reader import WeightReader
from quire.model.load.roles import Share
from quire.model.mixers.mixer import WIDE
from quire.model.net.decoder import Decoder
from quire.model.net.hidden_taps import Taps
from quire.ops.backend import Ops
from quire.quant.registry import quantizer
from quire.speculate.eagle import Eagle
from quire.speculate.eagle_decoder import EagleDecoder, MtpInput
from quire.speculate.head_layers import beside, row_buffers
from quire.store.hub import hub_of


def load_mtp(config: EngineConfig, target: Model, ops: Ops) -> Eagle:
    """The layer in the files of `target`, its matrices quantized as the target's are. Every rank has all of it.

    `ModelError` where the files have none, or one that cannot be read.
    """
    assert isinstance(target.decoder, Decoder)
    options = config.model
    whole = open_model(options.model, options.load_format, options.seed, hub_of(options))
    opened = whole.mtp
    if opened is None:
        why = next((note for note in whole.notes if "multi-token prediction" in note), "its files have no such layer")
        raise ModelError(f"{target.name}: {why}")
    kind = quantizer(options.quantization, whole.stored)
    check_groups(opened, kind, options.group_size)
    reader = WeightReader(opened, ops, replace(form_of(config, WIDE[target.dtype], kind), runs=False), Share(), None)
    spec, names = replace(opened.spec, sight=target.spec.sight), opened.family.mtp
    (rope,) = shared_tables(spec.rope, target.max_model_len).values()
    reader.count("rope", "f32", rope.nbytes)
    layer = reader.place(load_layer(reader, 0, reader.place(rope), None))
    entry = MtpInput(
        load_norm(reader, "mtp_token_norm"),
        load_norm(reader, "mtp_hidden_norm"),
        reader.linear(("mtp_join",), None),
        layer.attn_norm,
        names is not None and names.hidden_first,
    )
    norm, entry = reader.place((load_final_norm(reader), entry))
    opened.source.give_back()
    decoder = target.decoder
    given, kept = row_buffers(config, target, decoder.embed, ops)
    made = EagleDecoder(ops, decoder.embed, entry, layer, norm, decoder.head, given, kept, keeps_normed=True)
    weights = sum(size for _, size in reader.report.values())
    model = replace(beside(config, target, keeping_all(spec), made), report=reader.report, weight_bytes=weights)
    return Eagle(model, Taps(every=True), None, None)
