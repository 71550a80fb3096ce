"""Tiny random encoders written by transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedModel

from oracle import is_norm

SMALL = {"vocab_size": 99, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 96,
         "max_position_embeddings": 140, "pad_token_id": 0}  # fmt: skip
MARKS = {"bos_token_id": 1, "eos_token_id": 2}
CAUSAL = SMALL | MARKS | {"num_key_value_heads": 2, "head_dim": 16}
BEHIND = SMALL | {"max_position_embeddings": 142, "pad_token_id": 1}
"""Sizes of families whose positions begin behind that of padding."""
ENCODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("Bert", SMALL),
    "roberta": ("Roberta", BEHIND),
    "camembert": ("Camembert", BEHIND),
    "xlm-roberta": ("XLMRoberta", BEHIND | {"type_vocab_size": 1}),
    "distilbert": ("DistilBert", {"vocab_size": 99, "dim": 64, "n_layers": 3, "n_heads": 4, "hidden_dim": 96,
                                  "max_position_embeddings": 140}),
    "mpnet": ("MPNet", BEHIND),
    "modernbert": ("ModernBert", SMALL | MARKS | {"local_attention": 32, "cls_token_id": 1, "sep_token_id": 2}),
    "modernbert with biases": ("ModernBert", SMALL | MARKS | {
        "local_attention": 16, "global_attn_every_n_layers": 2, "cls_token_id": 1, "sep_token_id": 2,
        "attention_bias": True, "mlp_bias": True, "norm_bias": True}),
    "eurobert": ("EuroBert", CAUSAL | {"mask_token_id": 3}),
    "nomic_bert": ("NomicBert", SMALL),
    "gte": ("Gte", SMALL),
    "gte without types": ("Gte", SMALL | {"type_vocab_size": 0}),
    "jina_embeddings_v3": ("JinaEmbeddingsV3", SMALL | {"pad_token_id": 1}),
    "gemma3_text": ("Gemma3Text", CAUSAL | {
        "sliding_window": 32, "use_bidirectional_attention": True,
        "layer_types": ["sliding_attention", "full_attention"] * 2}),
    "llama": ("Llama", CAUSAL | {"is_causal": False}),
}  # fmt: skip
"""Name -> the beginning of transformers' classes, and what its config says."""


def encoder(name: str, kind: str = "Model", **facts: Any) -> PreTrainedModel:
    """A model of random numbers, f32; `kind`: how its class ends."""
    family, own = ENCODERS[name]
    torch.manual_seed(3)
    config = getattr(transformers, f"{family}Config")(**own | facts)
    model: PreTrainedModel = getattr(transformers, f"{family}{kind}")(config).eval().float()
    with torch.no_grad():
        for part, p in model.named_parameters():
            weight = p.ndim == 1 and (is_norm(part) or part.endswith("LayerNorm.weight"))
            p.copy_(torch.randn_like(p) * (0.08 if p.ndim > 1 else 0.3) + float(weight))
    return model


def write_encoder(folder: Path, name: str, kind: str = "Model", **facts: Any) -> PreTrainedModel:
    """Save such a model to `folder`."""
    model = encoder(name, kind, **facts)
    model.save_pretrained(folder)
    return model


def say_splade(folder: Path, kinds: tuple[str, ...] = ("MLMTransformer", "SpladePooling"), **said: Any) -> None:
    """Write sentence-transformers' files of a SparseEncoder."""
    modules = [{"idx": i, "path": f"{i}_{kind}" if i else "", "type": f"sentence_transformers.models.{kind}"}
               for i, kind in enumerate(kinds)]  # fmt: skip
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_SpladePooling").mkdir(exist_ok=True)
    (folder / "1_SpladePooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 99} | said))


def write_splade(folder: Path, name: str, **facts: Any) -> PreTrainedModel:
    """Save a model that makes sparse vectors to `folder`."""
    say_splade(folder)
    return write_encoder(folder, name, "ForMaskedLM", **facts)


def rows(model: PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    """transformers' rows behind the last layer [T, hidden]."""
    ids = torch.tensor([tokens])
    with torch.no_grad():
        found: torch.Tensor = model(ids, attention_mask=torch.ones_like(ids)).last_hidden_state[0]
    return found


WORDS = ("the", "cat", "sat", "on", "a", "mat", "how", "many", "live", "in", "berlin", "?", ".", "query", ":", "##s")


def write_tokenizer(folder: Path) -> None:
    """A tokenizer of a few words and all letters, which joins pairs as BERT's does."""
    letters = [chr(c) for c in range(ord("a"), ord("z") + 1)]
    vocab = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS, *letters, *(f"##{c}" for c in letters)]
    words = {word: i for i, word in enumerate(dict.fromkeys(vocab))}
    made = Tokenizer(models.WordPiece(words, unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer()
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    made.add_special_tokens(["[PAD]", "[UNK]", "[CLS]", "[SEP]"])
    made.save(str(folder / "tokenizer.json"))
    marks = {"cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]", "unk_token": "[UNK]"}
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertTokenizerFast", **marks}))
