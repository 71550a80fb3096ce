"""The vocabulary that a GGUF file carries: tokens, scores, merges, special ids, chat templates, all checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from quire.gguf.file import GgufFile

KINDS = {"gpt2": "bpe", "llama": "spm", "t5": "unigram", "gemma4": "bpe", "whitespace": "bpe", "bert": "wordpiece"}
"""`tokenizer.ggml.model` -> BPE with merges, SentencePiece's BPE or unigrams with scores, or words and their pieces.
Those that are written come first."""
SCORED = ("spm", "unigram")
"""Kinds whose tokens need scores."""
USUAL = {
    "spm": {"bos_token": 1, "eos_token": 2, "unk_token": 0},
    "unigram": {"eos_token": 1, "unk_token": 2, "pad_token": 0},
    "wordpiece": {"cls_token": 101, "unk_token": 100, "sep_token": 102, "pad_token": 0, "mask_token": 103},
}
"""Ids of named tokens that files need not name, as llama.cpp has them."""
OWN_PRE = {"gemma4": "gemma4"}
"""Models that say by their name how text is cut."""
ROLES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "sep_token": "seperator",
         "pad_token": "padding", "cls_token": "cls", "mask_token": "mask", "eot_token": "eot",
         "eom_token": "eom"}  # fmt: skip
"""Role of a token -> its part of the key `tokenizer.ggml.{}_token_id`."""
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
MAX_TOKENS = 1 << 21
MAX_TOKEN_BYTES = 1 << 12
BOS_BY_DEFAULT = frozenset({"llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2",
                            "tekken", "chameleon", "jina-v5-nano"})  # fmt: skip
"""Pre-tokenizers whose files add the first token unless they say otherwise, as llama.cpp reads them."""
ENDS = frozenset({
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>",
    "<EOT>", "_<EOT>", "[EOT]", "<|end_of_text|>", "<end_of_utterance>",
})  # fmt: skip
"""Tokens that end an answer although the file need not name them: GGUF has room for one end token of each kind."""
_HARMONY = frozenset({"<|return|>", "<|call|>"})


@dataclass(frozen=True)
class Vocab:
    """`kind`: a value of `KINDS`; `types` and `scores` have an entry per token; `merges` pairs of tokens, bpe only.

    `named`: role ("bos_token", ...) -> id. `ends`: ids that end a sequence. `add_eos`: text ends with a token, of
    wordpiece the one that separates. Of unigrams, `charsmap`: what characters are replaced by before, as SentencePiece
    compiles it; `merge_spaces`: several spaces are one, and none are around the text. Of wordpiece, `lowercase` and
    `strip_accents`: what is done to text before. `add_sep`: of a pair of texts, a token that separates stands behind
    what ends the first.
    """

    kind: str
    pre: str
    tokens: list[str]
    types: list[int]
    scores: list[float]
    merges: list[tuple[str, str]]
    named: dict[str, int]
    ends: tuple[int, ...]
    add_bos: bool
    add_eos: bool
    add_space_prefix: bool
    charsmap: bytes = b""
    merge_spaces: bool = False
    lowercase: bool = True
    strip_accents: bool = True
    add_sep: bool = False


class _Reader:
    """Metadata by type; `ModelError` names file and key."""

    def __init__(self, file: GgufFile) -> None:
        self.file = file

    def get(self, key: str, kind: type, default: Any) -> Any:
        value = self.file.metadata.get(key, default)
        if value is not default and type(value) is not kind:
            raise self.file.fail(key, f"is {type(value).__name__}, needs {kind.__name__}")
        return value

    def token_id(self, key: str, count: int) -> int | None:
        value = self.get(key, int, None)
        if value is not None and not 0 <= value < count:
            raise self.file.fail(key, f"is {value}, the vocabulary has {count} tokens")
        return None if value is None else int(value)

    def numbers(self, key: str, count: int, default: float) -> list[Any]:
        values = self.file.metadata.get(key)
        if values is None:
            return [default] * count
        if not isinstance(values, np.ndarray) or values.dtype.kind not in "if" or len(values) != count:
            raise self.file.fail(key, f"needs one number for each of the {count} tokens")
        if not np.isfinite(values).all():
            raise self.file.fail(key, "has nan or inf")
        return values.tolist()  # type: ignore[no-any-return]


def vocab_size(file: GgufFile) -> int:
    """How many tokens the file lists; `ModelError` when it has no vocabulary."""
    count = file.metadata.count("tokenizer.ggml.tokens")
    if not count:
        raise file.fail("tokenizer.ggml.tokens", "is missing: the file has no vocabulary; give a folder as --tokenizer")
    return count


def special_ids(file: GgufFile) -> dict[str, int]:
    """Role ("bos_token", "eos_token", "eot_token", ...) -> token id, as far as the file names them."""
    read, count = _Reader(file), vocab_size(file)
    found = {role: read.token_id(f"tokenizer.ggml.{name}_token_id", count) for role, name in ROLES.items()}
    return {role: i for role, i in found.items() if i is not None}


def end_ids(file: GgufFile) -> tuple[int, ...]:
    """Ids that end a sequence: the file's end tokens, and control tokens known to end an answer."""
    named = special_ids(file)
    ends = [named[role] for role in ("eos_token", "eot_token", "eom_token") if role in named]
    types = _Reader(file).numbers("tokenizer.ggml.token_type", vocab_size(file), NORMAL)
    control = [i for i, kind in enumerate(types) if kind == CONTROL]
    tokens = file.metadata.texts("tokenizer.ggml.tokens", control)
    extra = {token: i for token, i in zip(tokens, control, strict=True) if token in ENDS}
    if extra.keys() & _HARMONY:  # there <|end|> ends a part of an answer
        extra.pop("<|end|>", None)
    return tuple(dict.fromkeys([*ends, *extra.values()]))


def chat_templates(file: GgufFile) -> dict[str, str]:
    """Name -> template; "default" is the unnamed one."""
    read, key = _Reader(file), "tokenizer.chat_template"
    found = {"default": read.get(key, str, "")}
    for name in file.metadata:
        if name.startswith(f"{key}."):
            found[name.removeprefix(f"{key}.")] = read.get(name, str, "")
    return {name: text for name, text in found.items() if text}


def read_vocab(file: GgufFile) -> Vocab:
    """Everything a tokenizer is made of. `ModelError` for a kind that cannot be built, and for what contradicts."""
    read, count = _Reader(file), vocab_size(file)
    model = read.get("tokenizer.ggml.model", str, "")
    if model not in KINDS:
        raise file.fail(
            "tokenizer.ggml.model",
            f"{model!r} cannot be built, known: {', '.join(KINDS)}; give the original folder as --tokenizer",
        )
    if count > MAX_TOKENS:
        raise file.fail("tokenizer.ggml.tokens", f"has {count} tokens, at most {MAX_TOKENS} are read")
    kind, pre = KINDS[model], OWN_PRE.get(model) or read.get("tokenizer.ggml.pre", str, "default")
    if kind in SCORED and "tokenizer.ggml.scores" not in file.metadata:
        raise file.fail("tokenizer.ggml.scores", "is missing; a SentencePiece vocabulary needs a score per token")
    usual, lowercase = USUAL.get(kind, {}), read.get("tokenizer.ggml.normalizer.lowercase", bool, True)
    named = (usual if count > max(usual.values(), default=0) else {}) | special_ids(file)
    if kind == "wordpiece" and "cls_token" in named:
        named = {"bos_token": named["cls_token"]} | named
    always = kind == "wordpiece"  # whatever the keys say
    return Vocab(
        kind=kind,
        pre=pre,
        tokens=_tokens(file),
        types=read.numbers("tokenizer.ggml.token_type", count, NORMAL),
        scores=read.numbers("tokenizer.ggml.scores", count, 0.0),
        merges=_merges(file) if kind == "bpe" else [],
        named=named,
        ends=end_ids(file),
        add_bos=read.get("tokenizer.ggml.add_bos_token", bool, kind == "spm" or pre in BOS_BY_DEFAULT) or always,
        add_eos=read.get("tokenizer.ggml.add_eos_token", bool, kind == "unigram") or always,
        add_sep=read.get("tokenizer.ggml.add_sep_token", bool, False) and not always,
        add_space_prefix=read.get("tokenizer.ggml.add_space_prefix", bool, kind == "spm"),
        charsmap=_charsmap(file),
        merge_spaces=read.get("tokenizer.ggml.remove_extra_whitespaces", bool, False),
        lowercase=lowercase,
        strip_accents=read.get("tokenizer.ggml.normalizer.strip_accents", bool, lowercase),
    )


def _charsmap(file: GgufFile) -> bytes:
    """What characters are replaced by, as SentencePiece compiles it; empty where there is nothing."""
    key = "tokenizer.ggml.precompiled_charsmap"
    found = file.metadata.get(key)
    if found is None:
        return b""
    if not isinstance(found, np.ndarray) or found.dtype.itemsize != 1:
        raise file.fail(key, "needs an array of bytes")
    return found.tobytes()


def _tokens(file: GgufFile) -> list[str]:
    """The tokens, an empty one named by its number; two of one text are refused."""
    key = "tokenizer.ggml.tokens"
    tokens = [t or f"[EMPTY_{i}]" for i, t in enumerate(file.metadata[key])]
    if len(set(tokens)) < len(tokens):
        first: dict[str, int] = {}
        for i, token in enumerate(tokens):
            if token in first:
                raise file.fail(key, f"tokens {first[token]} and {i} are the same text {token!r:.40}")
            first[token] = i
    longest = max(tokens, key=len)
    if len(longest) > MAX_TOKEN_BYTES:
        raise file.fail(key, f"token {tokens.index(longest)} has {len(longest)} characters, at most {MAX_TOKEN_BYTES}")
    return tokens


def _merges(file: GgufFile) -> list[tuple[str, str]]:
    """Pairs of tokens: an entry is cut at its first space, the one that could be its first character aside."""
    key = "tokenizer.ggml.merges"
    merges = file.metadata.get(key)
    if not isinstance(merges, list):
        raise file.fail(key, "is missing; a byte-level BPE vocabulary needs its merges")
    pairs = []
    for i, entry in enumerate(merges):
        at = entry.find(" ", 1)
        if at < 0 or at == len(entry) - 1:
            raise file.fail(key, f"entry {i} is {entry!r:.40}, needs two tokens with a space between")
        pairs.append((entry[:at], entry[at + 1 :]))
    return pairs
