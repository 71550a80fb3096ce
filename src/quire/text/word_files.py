"""Tokenizers of folders with a vocabulary alone: vocab.json and merges.txt (byte-level BPE), or vocab.txt (WordPiece).

So GPT-2, GPT-J, OPT, Cerebras-GPT and BART were published (Radford et al. 2019), and BERT (Devlin et al. 2019). What is
not in the files is what transformers' class of that name has.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from quire.core.errors import ModelError
from quire.core.files import read_json, read_text
from quire.text.special_tokens import Token, put_around

VOCAB, MERGES, WORDS = "vocab.json", "merges.txt", "vocab.txt"
_SPACE = "\u0120"
"""A space, as byte-level BPE writes it."""
_WORD_ENDS = ("</w>", "@@")
"""What tokens end with in vocabularies of other kinds of BPE: GPT-1's and CLIP's, and CTRL's."""
_WHOLE_TEXTS = frozenset({"roberta", "bart", "longformer", "led", "mvp", "blenderbot"})
"""Kinds whose texts stand between a token for their beginning and one for their end."""
_GPT2 = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>")
_ROBERTA = {"bos_token": "<s>", "eos_token": "</s>", "sep_token": "</s>", "cls_token": "<s>", "unk_token": "<unk>",
            "pad_token": "<pad>", "mask_token": "<mask>"}  # fmt: skip
_BERT = {"unk_token": "[UNK]", "sep_token": "[SEP]", "pad_token": "[PAD]", "cls_token": "[CLS]", "mask_token": "[MASK]"}
Found = tuple[tokenizers.Tokenizer, dict[str, str]]


def find_word_file(folder: Path) -> Path | None:
    """The vocabulary of a folder that a tokenizer can be made from."""
    if (folder / VOCAB).is_file() and (folder / MERGES).is_file():
        return folder / VOCAB
    return folder / WORDS if (folder / WORDS).is_file() else None


def read_word_file(path: Path, config: Mapping[str, Any]) -> Found:
    """The tokenizer, and its named special tokens ("bos_token" -> text) where `config` does not name them.

    `config`: that of tokenizer_config.json. `ModelError` for files that cannot be read.
    """
    try:
        return _byte_level(path, config) if path.name == VOCAB else _word_piece(path, config)
    except ModelError:
        raise
    except BaseException as error:  # the Rust library panics on some malformed files, which is no Exception
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            raise
        raise ModelError(f"{path}: {error}") from None


def _byte_level(path: Path, config: Mapping[str, Any]) -> Found:
    table: dict[str, Any] = read_json(path)
    if not all(isinstance(i, int) and 0 <= i < 1 << 32 for i in table.values()):
        raise ModelError(f"{path}: must map tokens to their ids")
    if _SPACE not in table or any(token.endswith(_WORD_ENDS) for token in table):
        raise ModelError(
            f"{path}: is no vocabulary of byte-level BPE; save the tokenizer in the fast format (tokenizer.json) with "
            "transformers: AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
        )
    merges = [_pair(path.parent / MERGES, line) for line in _lines(path.parent / MERGES)]
    backend = tokenizers.Tokenizer(models.BPE(table, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=bool(config.get("add_prefix_space", False)))
    backend.decoder = decoders.ByteLevel()
    whole = _kind(path.parent, config) in _WHOLE_TEXTS
    named = _named(backend, config, _ROBERTA if whole else _GPT2)
    if whole:
        _enclose(backend, config, named, words=False)
    return backend, named


def _word_piece(path: Path, config: Mapping[str, Any]) -> Found:
    table = {token.rstrip("\r"): i for i, token in enumerate(read_text(path).rstrip("\n").split("\n"))}
    backend = tokenizers.Tokenizer(models.WordPiece(table, unk_token=_text(config.get("unk_token")) or "[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(
        handle_chinese_chars=bool(config.get("tokenize_chinese_chars", True)),
        strip_accents=config.get("strip_accents"),
        lowercase=bool(config.get("do_lower_case", True)),
    )
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    named = _named(backend, config, _BERT)
    _enclose(backend, config, named, words=True)
    return backend, named


def _lines(path: Path) -> list[str]:
    """The merges, without the line that says of which version they are."""
    return [line for line in read_text(path).split("\n") if line.strip() and not line.startswith("#version")]


def _pair(path: Path, line: str) -> tuple[str, str]:
    left, _, right = line.rstrip("\r").partition(" ")
    if not left or not right or " " in right:
        raise ModelError(f"{path}: {line!r:.80} is not two tokens with a space between them; the file is damaged")
    return left, right


def _kind(folder: Path, config: Mapping[str, Any]) -> str:
    """The model's, by the name of its tokenizer's class, else of its own type."""
    name = str(config.get("tokenizer_class") or "").removesuffix("Fast").removesuffix("Tokenizer").lower()
    return name or str(read_json(folder / "config.json").get("model_type", ""))


def _named(backend: tokenizers.Tokenizer, config: Mapping[str, Any], usual: dict[str, str]) -> dict[str, str]:
    """The usual special tokens that are in the vocabulary and that `config` has no other for."""
    named = {r: t for r, t in usual.items() if r not in config and backend.token_to_id(t) is not None}
    backend.add_special_tokens([AddedToken(t, normalized=False) for t in dict.fromkeys(named.values())])
    return named


def _enclose(backend: tokenizers.Tokenizer, config: Mapping[str, Any], named: Mapping[str, str], words: bool) -> None:
    """Have every text stand between its first token and its last; of a pair, of `words` and their pieces, the second is
    of another kind, else the last token stands twice between them."""
    around = [list[Token](), list[Token]()]
    for place, role in zip(around, ("cls_token", "sep_token"), strict=True):
        text = _text(config.get(role)) or named.get(role)
        number = None if text is None else backend.token_to_id(text)
        if text is not None and number is not None:
            place.append((number, text))
    first, last = around
    backend.post_processor = put_around(first, last, between=() if words else last, kinds=words)


def _text(value: Any) -> str | None:
    """The string of a token that is given as one or as {"content": ...}."""
    found = value.get("content") if isinstance(value, Mapping) else value
    return found if isinstance(found, str) else None
