"""Rows of encoders: models whose tokens all see each other, and that make vectors (Devlin et al. 2019)."""

from __future__ import annotations

from quire.model.disk.hf_config import HfConfig
from quire.model.families.edges import Edges
from quire.model.families.names import BIAS_FLAGS, GPT2_SPELLING, LLAMA, POST_NORMS, without
from quire.model.families.readers import no_rope
from quire.model.families.rope import Rope, read_rope
from quire.model.families.row import Family, HeadStep, MlmHead, layer_kinds
from quire.model.spec import EncoderStack

ENCODES = {"norm": "layer", "join": "post_ln", "bidirectional": True, "tied_head": True}
"""Norms behind the additions; every token sees all. Heads over the vocabulary are read for sparse
vectors alone: else the token table stands in their place."""
BERT = {
    "embed": "bert.embeddings.word_embeddings",
    "positions": "bert.embeddings.position_embeddings",
    "token_types": "bert.embeddings.token_type_embeddings",
    "embed_norm": "bert.embeddings.LayerNorm",
    "layer": "bert.encoder.layer.{}.",
    "q": "attention.self.query",
    "k": "attention.self.key",
    "v": "attention.self.value",
    "o": "attention.output.dense",
    "attn_post_norm": "attention.output.LayerNorm",
    "up": "intermediate.dense",
    "down": "output.dense",
    "mlp_post_norm": "output.LayerNorm",
}
BERT_SIZES = {
    "vocab_size": 30522,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "hidden_act": "gelu",
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
}


def _tanh(prefix: str, dense: str, out: str) -> tuple[HeadStep, ...]:
    """A dense layer with tanh, then the classes."""
    return HeadStep(prefix + dense, "tanh"), HeadStep(out)


def gte(prefix: str) -> Family:
    """GTE (Zhang et al. 2024): rope, a gated MLP, and perhaps types of tokens."""
    return Family(
        {role: prefix + name if role in OUTER else name for role, name in GTE.items()},
        BERT_SIZES | {"max_position_embeddings": 8192, "type_vocab_size": 1, "rope_theta": 1.6e5},
        {"token_types": types_of},
        ("qkv.bias", "o.bias", "down.bias", *NORMED),
        facts=ENCODES,
        spelling=EPS,
        prefix=prefix,
        skipped=(*POOLED, f"{prefix}pooler."),
        classifier=_tanh(prefix, "pooler.dense", "classifier"),
        mlm=_mlm("lm_head", "norm"),
    )


def _mlm(below: str, norm: str, activation: str = "") -> MlmHead:
    """A head whose parts lie below one name; its bias is the head's own, or the decoder's."""
    biases = f"{below.removesuffix('.transform')}.bias", f"{below.removesuffix('.transform')}.decoder.bias"
    return MlmHead(f"{below}.dense", f"{below}.{norm}", biases[1].removesuffix(".bias"), biases, activation)


NORMED = ("embed_norm", "embed_norm.bias", *POST_NORMS, *(f"{name}.bias" for name in POST_NORMS))
EPS = (("rms_norm_eps", "layer_norm_eps"),)
BIASES = ("q.bias", "k.bias", "v.bias", "o.bias", "up.bias", "down.bias")
POOLED = ("pooler.", "cls.", "lm_head.", "classifier.", "bert.pooler.", "roberta.pooler.")
"""Heads of other tasks, which make no vector."""


HEAD = _tanh("", "classifier.dense", "classifier.out_proj")
MLM = _mlm("lm_head", "layer_norm", "gelu")


def types_of(config: HfConfig, layers: int) -> int:
    """Kinds of tokens: of the first text and of the second."""
    return config.integer("type_vocab_size", 0, low=0, high=1 << 10)


def padded(config: HfConfig, layers: int) -> int:
    """Positions begin behind that of padding, whose row and those before it nobody has."""
    return config.integer("pad_token_id", 1, low=0) + 1


def fewer(config: HfConfig, layers: int) -> int:
    """Positions of a prompt, of those that the table has."""
    return config.integer("max_position_embeddings", low=3, high=1 << 27) - padded(config, layers)


def roberta(prefix: str) -> Family:
    """RoBERTa (Liu et al. 2019) and XLM-R (Conneau et al. 2020): BERT whose positions begin behind padding."""
    return Family(
        {role: name.replace("bert.", prefix, 1) for role, name in BERT.items()},
        BERT_SIZES | {"pad_token_id": 1, "layer_norm_eps": 1e-5, "type_vocab_size": 1},
        {"rope": no_rope, "token_types": types_of, "position_offset": padded, "max_position": fewer},
        ("positions", "token_types", *BIASES, *NORMED),
        facts=ENCODES,
        spelling=EPS,
        prefix=prefix,
        skipped=POOLED,
        buffers=("position_ids",),
        classifier=HEAD,
        mlm=MLM,
    )


def modernbert_rope(config: HfConfig, layers: int) -> tuple[Rope, ...]:
    """Layers with windows turn by `local_rope_theta`; newer files give `rope_parameters` per kind."""
    head_dim = config.integer("hidden_size") // config.integer("num_attention_heads")
    if config.has("rope_parameters"):
        by_kind = {kind: read_rope(config, head_dim, 1, kind) for kind in set(layer_kinds(config, layers))}
    else:
        by_kind = {
            kind: read_rope(HfConfig({"rope_theta": config.number(name, usual)}, config.where), head_dim, 1, kind)
            for kind, name, usual in (
                ("sliding_attention", "local_rope_theta", 1e4),
                ("full_attention", "global_rope_theta", 1.6e5),
            )
        }
    return tuple(by_kind[kind] for kind in layer_kinds(config, layers))


def modernbert_windows(config: HfConfig, layers: int) -> tuple[int, ...]:
    """Half of `local_attention` before a token and behind it, and the token itself, in layers with windows."""
    size = config.integer("local_attention", 128, low=2) // 2 + 1
    return tuple(size if kind == "sliding_attention" else 0 for kind in layer_kinds(config, layers))


def every_third(config: HfConfig) -> list[str]:
    """Kinds of layers of files that say which of them see everything."""
    step = config.integer("global_attn_every_n_layers", 3)
    layers = config.integer("num_hidden_layers", high=1024)
    return ["sliding_attention" if i % step else "full_attention" for i in range(layers)]


def mpnet_bias(config: HfConfig, layers: int) -> EncoderStack:
    """Buckets of distances; those beyond 128 tokens are one (fixed in its code)."""
    return EncoderStack(0, config.integer("relative_attention_num_buckets", 32, low=8, high=1 << 12), 128)


TURNED = {
    "embed": "embeddings.word_embeddings",
    "token_types": "embeddings.token_type_embeddings",
    "embed_norm": "emb_ln",
    "layer": "encoder.layers.{}.",
    "qkv": "attn.Wqkv",
    "o": "attn.out_proj",
    "attn_post_norm": "norm1",
    "up": "mlp.fc11",
    "gate": "mlp.fc12",
    "down": "mlp.fc2",
    "mlp_post_norm": "norm2",
}
"""Nomic BERT (Nussbaum et al. 2024): rope in the place of learned positions, and a gated MLP."""
GTE = {
    **{role: TURNED[role] for role in ("embed", "token_types")},
    "embed_norm": "embeddings.LayerNorm",
    "layer": "encoder.layer.{}.",
    "qkv": "attention.qkv_proj",
    "o": "attention.o_proj",
    "attn_post_norm": "attn_ln",
    "up_gate": "mlp.up_gate_proj",
    "down": "mlp.down_proj",
    "mlp_post_norm": "mlp_ln",
}
"""GTE (Zhang et al. 2024), called "new" in its files."""
JINA = {
    **{role: TURNED[role] for role in ("embed", "token_types", "embed_norm", "layer", "down")},
    "qkv": "mixer.Wqkv",
    "o": "mixer.out_proj",
    "attn_post_norm": "norm1",
    "up": "mlp.fc1",
    "mlp_post_norm": "norm2",
}
MODERN = {
    "embed": "model.embeddings.tok_embeddings",
    "embed_norm": "model.embeddings.norm",
    "layer": "model.layers.{}.",
    "attn_norm": "attn_norm",
    "qkv": "attn.Wqkv",
    "o": "attn.Wo",
    "mlp_norm": "mlp_norm",
    "gate_up": "mlp.Wi",
    "down": "mlp.Wo",
    "final_norm": "model.final_norm",
}
DISTIL = BERT | {
    **{role: name.replace("bert.", "distilbert.", 1) for role, name in BERT.items() if name.startswith("bert.")},
    "layer": "distilbert.transformer.layer.{}.",
    "q": "attention.q_lin",
    "k": "attention.k_lin",
    "v": "attention.v_lin",
    "o": "attention.out_lin",
    "attn_post_norm": "sa_layer_norm",
    "up": "ffn.lin1",
    "down": "ffn.lin2",
    "mlp_post_norm": "output_layer_norm",
}
MPNET = BERT | {
    **{role: name.replace("bert.", "mpnet.", 1) for role, name in BERT.items() if name.startswith("bert.")},
    "relative_bias": "mpnet.encoder.relative_attention_bias",
    **{role: f"attention.attn.{role}" for role in "qkvo"},
    "attn_post_norm": "attention.LayerNorm",
}
NOMIC_SPELLING = (
    *EPS,
    ("rms_norm_eps", "layer_norm_epsilon"),
    *((ours, own) for ours, own in GPT2_SPELLING if own.startswith("n_")),
    ("rope_theta", "rotary_emb_base"),
)

OUTER = ("embed", "token_types", "embed_norm", "layer")
ENCODERS: dict[str, Family] = {
    "bert": Family(
        BERT,
        BERT_SIZES,
        {"rope": no_rope, "token_types": types_of},
        ("positions", "token_types", *BIASES, *NORMED),
        facts=ENCODES,
        spelling=EPS,
        prefix="bert.",
        skipped=POOLED,
        buffers=("position_ids",),
        classifier=_tanh("bert.", "pooler.dense", "classifier"),
        mlm=_mlm("cls.predictions.transform", "LayerNorm"),
    ),
    "roberta": roberta("roberta."),
    "camembert": roberta("roberta."),
    "xlm-roberta": roberta("roberta."),
    "distilbert": Family(
        without(DISTIL, "token_types"),
        {name: size for name, size in BERT_SIZES.items() if name != "type_vocab_size"} | {"num_hidden_layers": 6},
        {"rope": no_rope},
        ("positions", *BIASES, *NORMED),
        facts=ENCODES,
        spelling=(*EPS, ("hidden_size", "dim"), ("intermediate_size", "hidden_dim"), ("num_hidden_layers", "n_layers"),
                  ("num_attention_heads", "n_heads"), ("hidden_act", "activation")),
        prefix="distilbert.",
        skipped=("vocab_", "pre_classifier.", "classifier."),
        classifier=(HeadStep("pre_classifier", "relu"), HeadStep("classifier")),
        mlm=MlmHead("vocab_transform", "vocab_layer_norm", "vocab_projector", ("vocab_projector.bias",)),
    ),
    "mpnet": Family(
        without(MPNET, "token_types"),
        {name: size for name, size in BERT_SIZES.items() if name != "type_vocab_size"} | {"pad_token_id": 1},
        {"rope": no_rope, "position_offset": padded, "max_position": fewer, "encoder": mpnet_bias},
        ("positions", "relative_bias", *BIASES, *NORMED),
        facts=ENCODES,
        spelling=EPS,
        prefix="mpnet.",
        skipped=(*POOLED, "mpnet.pooler."),
        buffers=("position_ids",),
        classifier=HEAD,
        mlm=MLM,
    ),
    "modernbert": Family(
        MODERN,
        {"hidden_activation": "gelu", "intermediate_size": 1152, "max_position_embeddings": 8192, "norm_eps": 1e-5,
         "layer_types": every_third},
        {"rope": modernbert_rope, "windows": modernbert_windows},
        ("embed_norm",),
        {"attention_bias": ("qkv.bias", "o.bias"), "mlp_bias": ("gate_up.bias", "down.bias")},
        {"norm": "layer", "bidirectional": True, "tied_head": True, "edges": Edges(bare=True)},
        (("hidden_act", "hidden_activation"), ("rms_norm_eps", "norm_eps")),
        skipped=("head.", "decoder.", "classifier."),
        classifier=(HeadStep("head.dense", "gelu", "classifier_activation", "head.norm"), HeadStep("classifier")),
        mlm=MlmHead("head.dense", "head.norm", "decoder", ("decoder.bias",), "gelu", "classifier_activation"),
    ),
    "eurobert": Family(
        LLAMA,
        {"rms_norm_eps": 1e-5, "max_position_embeddings": 8192, "rope_theta": 2.5e5},
        flags=BIAS_FLAGS,
        facts={"bidirectional": True},
        skipped=("dense.", "classifier."),
        classifier=(HeadStep("dense", "gelu"), HeadStep("classifier")),
        mlm=MlmHead("", "", "lm_head"),
    ),
    "nomic_bert": Family(
        {role: f"nomic_bert.{name}" if role in OUTER else name for role, name in TURNED.items()},
        BERT_SIZES | {"vocab_size": 30528, "hidden_act": "silu", "max_position_embeddings": 2048, "rope_theta": 1e3},
        {"token_types": types_of},
        ("token_types", *NORMED),
        facts=ENCODES,
        spelling=NOMIC_SPELLING,
        prefix="nomic_bert.",
        skipped=(*POOLED, "nomic_bert.pooler."),
        classifier=_tanh("nomic_bert.", "pooler.dense", "classifier"),
        mlm=_mlm("cls.predictions.transform", "layer_norm"),
    ),
    "gte": gte("gte."),
    "new": gte("new."),
    "jina_embeddings_v3": Family(
        {role: f"roberta.{name}" if role in OUTER else name for role, name in JINA.items()},
        BERT_SIZES | {"layer_norm_eps": 1e-5, "max_position_embeddings": 8194, "type_vocab_size": 1, "rope_theta": 2e4},
        {"token_types": types_of},
        ("token_types", "qkv.bias", "o.bias", "up.bias", "down.bias", *NORMED),
        facts=ENCODES,
        spelling=EPS,
        prefix="roberta.",
        skipped=POOLED,
        classifier=HEAD,
        mlm=MLM,
    ),
}  # fmt: skip
