"""Text to token ids and back, over the `tokenizers` library. See docs/design/text.md."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, pre_tokenizers

from quire.core.errors import BadRequest, ModelError, QuireError, is_panic
from quire.core.files import read_json, read_text, why_missing
from quire.text.bounds import most_bytes
from quire.text.gguf_tokenizer import read_tokenizer
from quire.text.sentence_config import set_lower_case
from quire.text.special_tokens import found_around, joined, put_around
from quire.text.tokenizer_process import TokenizerProxy, bounded
from quire.text.vocab_files import BYTE_OF, find_vocab_file, read_vocab_file

CUT = "\ufdd0"
"""A noncharacter (Unicode reserves it for use inside programs) that `escape` puts into text to break special tokens."""

NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
PREFIXING = frozenset({"GPT2Tokenizer", "RobertaTokenizer", "BartTokenizer", "LongformerTokenizer", "LEDTokenizer",
                       "CodeGenTokenizer"})  # fmt: skip
"""Tokenizers whose byte-level cut puts a space before a text if their config says so."""
MAX_REMEMBERED = 1024
"""Texts of which it is remembered whether they have special tokens."""
MANY = 1024
"""Tokens from which they are decoded as a batch, which does not keep the interpreter's lock: 0.1 s for 500,000."""
_LISTS = ("additional_special_tokens", "extra_special_tokens")
_BYTE_FALLBACK = re.compile(r"<0x([0-9A-F]{2})>")


class Tokenizer:
    """A model folder's tokenizer. Immutable after loading and safe to share between threads.

    `special` maps the strings of special tokens to ids; `named` the roles ("bos_token", ...) to strings. `templates`:
    name -> chat template, those of a GGUF file. `size`: one more than the largest id, where that is known.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        named: dict[str, str],
        templates: Mapping[str, str] | None = None,
        size: int | None = None,
    ) -> None:
        self._backend = backend
        self.named, self.templates = named, templates or {}
        added = backend.get_added_tokens_decoder()
        self.special = {t.content: i for i, t in added.items() if t.special}
        self._added = {i: t.content for i, t in added.items()}
        self.vocab_size = size or 1 + max(backend.get_vocab(with_added_tokens=True).values(), default=-1)
        """One more than the largest id; the model's own vocabulary may be padded beyond it."""
        self.byte_level = isinstance(backend.decoder, decoders.ByteLevel)
        """Whether the text of tokens is the text of their concatenated bytes, and nothing else."""
        self._slow = isinstance(backend, TokenizerProxy) and bool(backend.slow)
        self._specials = _any_of(self.special)
        self._normalized = [t.content for t in added.values() if t.special and t.normalized]
        self._cut_id = self._add_cut()
        self._bytes: dict[int, bytes] = {}  # looked up once per generated token
        self._has_special: dict[str, bool] = {}  # looked up once per stop string and choice
        self.bos_id = self._named_id("bos_token")
        self.eos_id = self._named_id("eos_token")

    @classmethod
    def from_folder(cls, folder: str | Path) -> Tokenizer:
        """Read tokenizer.json of a model folder, and what tokenizer_config.json and its like add to it.

        Without it tokenizer.model (SentencePiece), a .tiktoken file, vocab.json with merges.txt or vocab.txt is read.
        `folder` may be a GGUF file, whose vocabulary is read instead.
        """
        folder = Path(folder)
        return _ahead.pop(folder, None) or cls._read(folder)

    @classmethod
    def read_ahead(cls, folder: Path) -> Tokenizer:
        """Read that of `folder`, and keep it for the next `from_folder` that asks for it."""
        found = _ahead[folder] = cls._read(folder)
        return found

    @classmethod
    def _read(cls, folder: Path) -> Tokenizer:
        if folder.is_file():
            return cls._checked(folder, *read_tokenizer(folder))
        config = read_json(folder / "special_tokens_map.json") | read_json(folder / "tokenizer_config.json")
        path, own = folder / "tokenizer.json", dict[str, str]()
        if path.exists():
            backend = _read_backend(path)
        elif (found := find_vocab_file(folder)) is not None:
            path = found
            backend, own = read_vocab_file(path, config)
        else:
            otherwise = (
                "is missing, and so are tokenizer.model, .tiktoken files, vocab.json with merges.txt, and vocab.txt; "
                "give another --tokenizer"
            )
            raise ModelError(why_missing(path, otherwise))
        _add_missing(backend, config, read_json(folder / "added_tokens.json"), folder)
        named = own | {role: content for role in NAMED if (content := _content(config.get(role)))}
        _set_post_processor(backend, config, named)
        _set_prefix_space(backend, config)
        set_lower_case(backend, folder)
        return cls._checked(path, backend, named)

    @classmethod
    def _checked(cls, path: Path, backend: tokenizers.Tokenizer, *more: Any) -> Tokenizer:
        try:
            return cls(bounded(backend), *more)
        except ModelError as error:
            raise ModelError(f"{path}: {error.message}") from None

    def _add_cut(self) -> int:
        """Give the cut mark an id of its own, beyond the vocabulary; `encode` drops that id."""
        if self._backend.token_to_id(CUT) is not None:
            raise ModelError("the vocabulary contains the noncharacter U+FDD0")
        self._backend.add_special_tokens([AddedToken(CUT, normalized=False, special=True)])
        cut_id = self._backend.token_to_id(CUT)
        if cut_id is None or self._backend.model.id_to_token(cut_id) is not None:
            raise ModelError(f"the vocabulary has holes; id {cut_id}, the first beyond its size, is taken")
        return int(cut_id)

    def guard(self, tokens: Iterable[str]) -> None:
        """Have `escape` break these tokens, too: those that only a template is to write though no file calls them
        special. To be called before texts are."""
        self._specials = _any_of({*self.special, *tokens})

    def _named_id(self, role: str) -> int | None:
        content = self.named.get(role)
        return None if content is None else self._backend.token_to_id(content)

    @property
    def table(self) -> dict[str, int]:
        """Every token and its id."""
        return {token: i for token, i in self._backend.get_vocab(with_added_tokens=True).items() if i != self._cut_id}

    def check_vocab(self, vocab_size: int) -> None:
        """Refuse a tokenizer that gives ids the model has no row for."""
        if self.vocab_size > vocab_size:
            raise ModelError(
                f"the tokenizer has ids up to {self.vocab_size - 1}, the model only {vocab_size} embeddings"
            )

    def encode(self, text: str, add_special_tokens: bool = True, special: bool = True) -> list[int]:
        """Token ids of `text`. `add_special_tokens`: with what the model expects around a text (BOS, ...).

        `special=False`: strings like "<|end|>" in `text` become ordinary tokens, so that a user cannot forge them.
        """
        if not special:
            text = self.escape(text)
        with _raising(BadRequest, "the text cannot be encoded"):
            try:  # as a batch of one, in which other threads go on
                ids: list[int] = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
            except TypeError:  # the second is what Python makes of arguments and file names that are not UTF-8
                raise BadRequest("the text is not a string, or half a surrogate pair in it is no character") from None
        if CUT in text:
            ids = [i for i in ids if i != self._cut_id]
        return ids

    def encode_pair(self, one: str, other: str, limit: int = 0, last: bool = False) -> tuple[list[int], int]:
        """Token ids of two texts as the model reads a pair, and where its second type of tokens begins (0: nowhere);
        of more than `limit` tokens, if that is not 0, the longer text is cut at its end, or to its `last` tokens."""
        with _raising(BadRequest, "the texts cannot be encoded"):
            return joined(self._backend, (one, other), limit, last)

    def offsets(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Where in `text` each token of `encode` begins: the characters that the tokens before it cover whole."""
        with _raising(BadRequest, "the text cannot be encoded"):
            found = self._backend.encode(text, add_special_tokens=add_special_tokens)
        places, end = [0], 0
        for i, added, (start, stop) in zip(found.ids, found.special_tokens_mask, found.offsets, strict=True):
            if i != self._cut_id:
                places.append(end if added or start == stop else max(places[-1], min(start, end)))
            end = max(end, stop)
        return places[1:]

    def work(self, size: int) -> int:
        """Bytes of work that encoding a text of so many is; very many where it may take long, and nobody must wait."""
        return size + (1 << 40) * self._slow

    def least_tokens(self, text: str) -> int:
        """Tokens that `text` has at least, by its size alone; 0 where that tells nothing."""
        most = self._most_bytes
        return 0 if most is None else -(-len(text.replace(CUT, "").encode(errors="replace")) // most)

    @cached_property
    def _most_bytes(self) -> int | None:
        return most_bytes(self._backend)

    def escape(self, text: str) -> str:
        """`text` with cut marks inside everything that would become a special token; `encode` ignores the marks.

        A special token of a single character cannot be cut and stays special.
        """
        if CUT in text:
            text = text.replace(CUT, "\ufffd")
        if self._specials is not None:
            text = self._cut(text, self._specials)
        if self._normalized and self._backend.normalizer is not None:
            with _raising(BadRequest, "the text cannot be normalized"):
                normal = self._backend.normalizer.normalize_str(text)
            if any(s in normal for s in self._normalized):
                raise BadRequest("the text contains a special token of the model in a form that cannot be escaped")
        return text

    @staticmethod
    def _cut(text: str, starts: re.Pattern[str]) -> str:
        """Cut after the first character of every occurrence, overlapping ones included."""
        pieces, done = [], 0
        while (match := starts.search(text, done)) is not None:
            pieces.append(text[done : match.start() + 1])
            done = match.start() + 1
        return CUT.join([*pieces, text[done:]])

    def decode(
        self, ids: Sequence[int], skip_special_tokens: bool = True, spaces_between_special_tokens: bool = True
    ) -> str:
        """The text of `ids`; ids beyond the vocabulary (a padded model has such) have none.

        Only tokenizers without a decoder put spaces between tokens; `spaces_between_special_tokens=False` leaves them
        out where an added token stands on either side.
        """
        ids = [i for i in ids if 0 <= i < self.vocab_size]
        if spaces_between_special_tokens or skip_special_tokens or self._backend.decoder is not None:
            with _raising(ModelError, "the tokenizer cannot decode what the model wrote"):
                if len(ids) < MANY:
                    return str(self._backend.decode(ids, skip_special_tokens=skip_special_tokens))
                return str(self._backend.decode_batch([ids], skip_special_tokens=skip_special_tokens)[0])
        parts, run = [], list[int]()
        for i in [*ids, -1]:
            if i >= 0 and i not in self._added:
                run.append(i)
                continue
            parts.append(str(self._backend.decode(run, skip_special_tokens=False)))
            parts.append(self._added.get(i, ""))
            run = []
        return "".join(parts)

    def token_to_id(self, token: str) -> int | None:
        """The id of a token given as it stands in the vocabulary."""
        found = self._backend.token_to_id(token)
        return None if found is None or found >= self.vocab_size else int(found)

    def is_special(self, token: int) -> bool:
        """Whether `skip_special_tokens` leaves this id out."""
        content = self._added.get(token)
        return content is not None and content in self.special

    def has_special(self, text: str) -> bool:
        """Whether the string of a special token is in `text`."""
        found = self._has_special.get(text)
        if found is None:
            if len(self._has_special) >= MAX_REMEMBERED:
                self._has_special.clear()
            found = self._has_special[text] = any(content in text for content in self.special if content)
        return found

    def id_to_bytes(self, token: int) -> bytes:
        """The bytes an id stands for: exactly, if `byte_level`; else those of its text in the middle of a sentence."""
        found = self._bytes.get(token)
        if found is None:
            if not 0 <= token < self.vocab_size:
                return b""
            found = self._bytes[token] = self._piece_bytes(token)
        return found

    def _piece_bytes(self, token: int) -> bytes:
        piece = self._backend.id_to_token(token)
        if piece is None:
            return b""
        if self.byte_level:
            values = [BYTE_OF.get(c, -1) for c in piece]
            return piece.encode() if -1 in values else bytes(values)
        if token in self._added:
            return str(piece).encode()
        if match := _BYTE_FALLBACK.fullmatch(piece):
            return bytes([int(match[1], 16)])
        return str(piece).replace("\u2581", " ").encode()

    def id_to_text(self, token: int) -> str:
        """The text of one token for showing; halves of characters appear as U+FFFD."""
        return self.id_to_bytes(token).decode(errors="replace")


_ahead: dict[Path, Tokenizer] = {}


def _any_of(tokens: Iterable[str]) -> re.Pattern[str] | None:
    """What finds tokens; one of a single character cannot be cut."""
    long = sorted(token for token in tokens if len(token) > 1)
    return re.compile("|".join(map(re.escape, long))) if long else None


@contextmanager
def _raising(kind: type[QuireError], what: str) -> Iterator[None]:
    """Raise the library's own errors and panics as a `kind` that says `what`."""
    try:
        yield
    except QuireError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        raise kind(f"{what}: {error}") from None


def _read_backend(path: Path) -> tokenizers.Tokenizer:
    """The tokenizer of a tokenizer.json, without cutting and padding."""
    text = read_text(path)
    with _raising(ModelError, str(path)):
        backend = tokenizers.Tokenizer.from_str(text)
    backend.no_truncation()
    backend.no_padding()
    return backend


def _content(value: Any) -> str | None:
    """The string of a token that a config gives as a string or as {"content": ...}."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) and value else None


def _added_token(value: dict[str, Any], special: bool) -> AddedToken:
    flags = {k: bool(value[k]) for k in ("single_word", "lstrip", "rstrip", "normalized") if k in value}
    return AddedToken(value["content"], special=special, **flags)


def _add_missing(backend: tokenizers.Tokenizer, config: dict[str, Any], more: dict[str, Any], folder: Path) -> None:
    """Add what tokenizer.json does not know but the other files name; each must get the id they claim for it."""
    known = {t.content: t.special for t in backend.get_added_tokens_decoder().values()}
    listed = config.get("added_tokens_decoder") or {}
    claims: dict[str, int] = {}
    try:
        entries = sorted((int(i), v) for i, v in listed.items())
        for token_id, value in entries:
            content = value["content"]
            claims[content] = token_id
            if known.get(content) is not bool(value.get("special", False)):
                token = _added_token(value, bool(value.get("special", False)))
                backend.add_special_tokens([token]) if token.special else backend.add_tokens([token])
        for content, token_id in sorted(more.items(), key=lambda item: item[1]):
            if content not in known and content not in claims:
                backend.add_tokens([AddedToken(content, normalized=False)])
            claims[content] = int(token_id)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ModelError(f"{folder}: malformed entry of an added token: {error!r}") from None
    specials = [config.get(role) for role in NAMED]
    for name in _LISTS:
        value = config.get(name) or []
        specials += list(value.values()) if isinstance(value, dict) else value
    known = {t.content: t.special for t in backend.get_added_tokens_decoder().values()}
    for value in specials:
        content = _content(value)
        if content is not None and not known.get(content, False):
            flags = value if isinstance(value, dict) else {"content": content, "normalized": False}
            backend.add_special_tokens([_added_token(flags, True)])
    for content, token_id in claims.items():
        if backend.token_to_id(content) != token_id:
            raise ModelError(f"{folder}: added token {content!r} has id {token_id} in one file and "
                             f"{backend.token_to_id(content)} in another")  # fmt: skip


def _set_post_processor(backend: tokenizers.Tokenizer, config: dict[str, Any], named: dict[str, str]) -> None:
    """An explicit `add_bos_token` or `add_eos_token` of the config wins over tokenizer.json; without one it stays."""
    flags = [config.get(name) for name in ("add_bos_token", "add_eos_token")]
    if flags == [None, None]:
        return
    around = found_around(backend.post_processor)
    for flag, place, role in zip(flags, around, ("bos_token", "eos_token"), strict=True):
        number = backend.token_to_id(named[role]) if flag and role in named else None
        if flag is not None:
            place[:] = [] if number is None else [(number, named[role])]
    backend.post_processor = put_around(*around)


def _set_prefix_space(backend: tokenizers.Tokenizer, config: dict[str, Any]) -> None:
    """An explicit `add_prefix_space` of the config wins over tokenizer.json, for the classes that do so."""
    kind, wanted = str(config.get("tokenizer_class")).removesuffix("Fast"), config.get("add_prefix_space")
    cut = backend.pre_tokenizer
    if kind in PREFIXING and isinstance(wanted, bool) and isinstance(cut, pre_tokenizers.ByteLevel):
        cut.add_prefix_space = wanted
        backend.pre_tokenizer = cut
