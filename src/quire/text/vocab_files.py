"""Tokenizers of folders without tokenizer.json: SentencePiece models (`tokenizer.model`), tiktoken files, vocabularies.

Each becomes a tokenizer of the `tokenizers` library, as everywhere. SentencePiece (Kudo and Richardson 2018): pieces
with scores, merged by score (BPE) or the most probable cut (unigram); its own library, an extra, reads the file.
tiktoken: a line per token, its bytes in base64 and its rank, for which no library is needed (tiktoken's own keeps a
copy of any file by its name, and would not see a changed one). The expression that cuts words is not in such a file.
Vocabularies of words and their parts: `word_files.py`.
"""

from __future__ import annotations

import base64
from itertools import pairwise
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers

from quire.core.errors import ModelError
from quire.core.files import MAX_FILE_BYTES
from quire.gguf.vocab import Vocab
from quire.text.gguf_tokenizer import SPACE, build
from quire.text.gguf_words import PRE
from quire.text.word_files import VOCAB, WORDS, find_word_file, read_word_file


def _byte_table() -> dict[str, int]:
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in plain]
    return {chr(b): b for b in plain} | {chr(0x100 + i): b for i, b in enumerate(others)}


BYTE_OF = _byte_table()
"""Character that byte-level BPE writes a byte as (Radford et al. 2019) -> byte: itself if printable, else from U+0100
on."""
CHARACTER_OF = {b: c for c, b in BYTE_OF.items()}
"""Byte -> character."""


SENTENCEPIECE, TIKTOKEN = "tokenizer.model", "*.tiktoken"
UNIGRAM, BPE = 1, 2
"""`TrainerSpec.ModelType`; models by words and by characters are not read."""
MAX_TOKENS = 1 << 21
CUT = "llama3"
"""The pre-tokenizer of tiktoken files: that of GPT-4 (cl100k), which Llama 3 and Qwen have taken over nearly whole."""
Found = tuple[tokenizers.Tokenizer, dict[str, str]]


def find_vocab_file(folder: Path) -> Path | None:
    """The file of a folder that a tokenizer can be made from."""
    known = (folder / SENTENCEPIECE, *sorted(folder.glob(TIKTOKEN)))
    return next((path for path in known if path.is_file()), None) or find_word_file(folder)


def read_vocab_file(path: Path, config: dict[str, Any]) -> Found:
    """The tokenizer, and its named special tokens ("bos_token" -> text) as far as the file has them.

    `config`: that of tokenizer_config.json. `ModelError` for a file that cannot be read or whose library is missing.
    """
    if path.stat().st_size > MAX_FILE_BYTES:
        raise ModelError(f"{path}: {path.stat().st_size} bytes; the limit is {MAX_FILE_BYTES}")
    if path.name in (VOCAB, WORDS):
        return read_word_file(path, config)
    with path.open("rb") as file:
        first = file.readline(1 << 12)
    return _tiktoken(path) if _is_tiktoken(first) else _sentencepiece(path, config)


def _sentencepiece(path: Path, config: dict[str, Any]) -> Found:
    try:
        from sentencepiece.sentencepiece_model_pb2 import ModelProto
    except ImportError:
        raise ModelError(
            f"{path}: needs the library sentencepiece, which is not installed: pip install 'quire[sentencepiece]', or "
            "convert the model's tokenizer to the fast format (tokenizer.json)"
        ) from None
    proto = ModelProto()
    try:
        proto.ParseFromString(path.read_bytes())
    except Exception as error:  # protobuf's DecodeError, and whatever its implementations raise
        raise ModelError(f"{path}: is neither a SentencePiece model nor a tiktoken file ({error})") from None
    tokens, kind = [p.piece for p in proto.pieces], proto.trainer_spec.model_type
    if not 0 < len(tokens) <= MAX_TOKENS or len(set(tokens)) != len(tokens):
        raise ModelError(f"{path}: has {len(tokens)} pieces, {len(set(tokens))} of them different; it is damaged")
    if kind not in (UNIGRAM, BPE):
        raise ModelError(f"{path}: is a model by words or characters, only BPE and unigram models can be read")
    spec = proto.trainer_spec
    roles = {"unk_token": spec.unk_id, "bos_token": spec.bos_id, "eos_token": spec.eos_id, "pad_token": spec.pad_id}
    prefix = proto.normalizer_spec.add_dummy_prefix
    vocab = Vocab(
        kind="spm",
        pre="",
        tokens=tokens,
        types=[p.type for p in proto.pieces],
        scores=[p.score for p in proto.pieces],
        merges=[],
        named={role: i for role, i in roles.items() if 0 <= i < len(tokens)},
        ends=(),
        add_bos=bool(config.get("add_bos_token", True)),
        add_eos=bool(config.get("add_eos_token", False)),
        add_space_prefix=prefix,
    )
    backend, named = build(vocab, path)
    if kind == UNIGRAM:
        backend.model = _unigram(vocab, bool(spec.byte_fallback))
    backend.normalizer = _normalizer(proto.normalizer_spec)
    return backend, named


def _unigram(vocab: Vocab, byte_fallback: bool) -> models.Unigram:
    pieces = list(zip(vocab.tokens, vocab.scores, strict=True))
    return models.Unigram(pieces, vocab.named.get("unk_token"), byte_fallback)


def _normalizer(spec: Any) -> normalizers.Normalizer:
    """The file's own table of characters, runs of spaces, and the space before a text."""
    steps: list[normalizers.Normalizer] = []
    if spec.precompiled_charsmap:
        steps.append(normalizers.Precompiled(spec.precompiled_charsmap))
    if spec.remove_extra_whitespaces:
        steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    if spec.add_dummy_prefix:
        steps.append(normalizers.Prepend(SPACE))
    return normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])


def _is_tiktoken(line: bytes) -> bool:
    token, _, rank = line.strip().partition(b" ")
    try:
        return bool(base64.b64decode(token, validate=True)) and rank.isdigit()
    except ValueError:
        return False


def _tiktoken(path: Path) -> Found:
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if not _is_tiktoken(line):
            raise ModelError(f"{path}: line {number} is not a token in base64 and its rank; the file is damaged")
        token, rank = line.split()
        ranks[base64.b64decode(token)] = int(rank)
    if sorted(ranks.values()) != list(range(len(ranks))) or len(ranks) > MAX_TOKENS:
        raise ModelError(f"{path}: ranks are not the numbers from 0 to {len(ranks) - 1}; the file is damaged")
    if missing := [b for b in range(256) if bytes([b]) not in ranks]:
        raise ModelError(f"{path}: has no token for the byte {missing[0]}; the file is damaged")
    text = {token: _as_text(token) for token in ranks}
    merges = [pair for token in sorted(ranks, key=ranks.__getitem__) for pair in _merge(token, ranks)]
    backend = tokenizers.Tokenizer(
        models.BPE(
            {text[token]: rank for token, rank in ranks.items()},
            [(text[a], text[b]) for a, b in merges],
            ignore_merges=True,
        )
    )
    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in PRE[CUT]]
    backend.pre_tokenizer = pre_tokenizers.Sequence([*cuts, pre_tokenizers.ByteLevel(False, use_regex=False)])
    backend.decoder = decoders.ByteLevel()
    return backend, {}


def _merge(token: bytes, ranks: dict[bytes, int]) -> list[tuple[bytes, bytes]]:
    """The two tokens that `token` is made of: what is left when its bytes are merged by all tokens of lower rank."""
    parts = [token[i : i + 1] for i in range(len(token))]
    limit = ranks[token]
    while len(parts) > 2:
        pairs = [(ranks.get(a + b, limit), i) for i, (a, b) in enumerate(pairwise(parts))]
        rank, at = min(pairs)
        if rank >= limit:
            return []  # no way leads to it but as a whole word
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return [(parts[0], parts[1])] if len(parts) == 2 else []


def _as_text(token: bytes) -> str:
    """Bytes in the alphabet of byte-level BPE (Radford et al. 2019)."""
    return "".join(CHARACTER_OF[b] for b in token)
