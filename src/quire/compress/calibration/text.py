"""Calibration text: rows of tokens from files or from the text that is shipped.

Text is cut into pieces, which are shuffled, put one after the other and cut into rows; each row begins as the tokenizer
begins a text. The same files, tokenizer and options give the same rows.
"""

from __future__ import annotations

import hashlib
import os
import random
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from quire.bench.quality import shipped
from quire.compress.recipes.parser import Calibration
from quire.core.errors import BadRequest, ConfigError, ModelError
from quire.core.files import read_bounded
from quire.core.progress import stage
from quire.model.disk.checkpoint import EMBEDDED
from quire.text.template import ChatTemplate
from quire.text.tokenizer import Tokenizer

MAX_BYTES = 256 << 20
"""Of a file; its text is held in memory."""
PIECE = 8
"""Characters of a piece for each token of a row: two rows or so, so that even few rows are of many documents."""
SKIPPED = {"site-packages", "test", "tests", "idle_test", "__pycache__", "encodings", "pydoc_data", "turtledemo"}
"""Folders of the standard library with tests and tables."""
SHIPPED = {
    "general": "quire's general text (novel, science, code, 28 languages)",
    "python": "the standard library of Python and questions about it",
}
"""Names of `Calibration.text` -> what they are, for people."""
KEYS = "text, prompt and completion, or messages"


@dataclass(frozen=True)
class Document:
    """A text, or the messages of a conversation; `place` names it where it cannot be used."""

    place: str
    text: str = ""
    messages: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True)
class CalibrationRows:
    """Rows of tokens. `tokens`: samples x length token ids; `digest`: of these; `origin`: where they are from, for
    people."""

    tokens: tuple[tuple[int, ...], ...]
    digest: str
    origin: str

    def __str__(self) -> str:
        count = sum(map(len, self.tokens))
        return f"{self.origin}: {len(self.tokens):,} rows, {count:,} tokens, digest {self.digest[:8]}"


def calibration_rows(asked: Calibration, tokenizer: Tokenizer, template: ChatTemplate | None) -> CalibrationRows:
    """Return the rows that a recipe's `asked` describes, seeded and the same every time.

    Without files they are of the shipped text, in turns of its domains, or of the standard library's sources and of the
    embedded model's questions. `ConfigError` names the file and the line that cannot be used, or says how many rows the
    text holds.
    """
    if asked.files:
        groups = [[d for name in asked.files for d in read_documents(Path(name), asked.chat)]]
    elif asked.text == "python":
        groups = [library_texts(), _questions(template is not None)]
    else:
        groups = general_texts()
    opening = _special_prefix(tokenizer)
    streams = [_token_stream(documents, asked, tokenizer, template, opening) for documents in groups]
    tokens: list[tuple[int, ...]] = []
    with stage("calibration text: tokens", asked.samples) as at:
        while streams and len(tokens) < asked.samples:
            stream = streams.pop(0)
            row = _next_tokens(stream, asked.length - len(opening))
            if row is not None:
                tokens.append((*opening, *row))
                streams.append(stream)
            at.update(len(tokens))
    origin = ", ".join(asked.files) or SHIPPED[asked.text]
    if len(tokens) < asked.samples:
        raise ConfigError(
            f"calibration: {origin}: {len(tokens)} rows of {asked.length} tokens are there, samples = {asked.samples} "
            "are asked for; give more text, or fewer or shorter samples",
            param="samples",
        )
    found = hashlib.blake2b(digest_size=16)
    for row in tokens:
        found.update(b"".join(t.to_bytes(4, "little") for t in row))
    return CalibrationRows(tuple(tokens), found.hexdigest(), origin)


def read_documents(path: Path, chat: bool = False) -> list[Document]:
    """Read the documents of a file: a line of .jsonl is one of {text}, {prompt, completion} and {messages}.

    Any other file is one text. `chat`: prompt and completion are messages of a user and an assistant. `ConfigError` for
    what is no text.
    """
    try:
        text = read_bounded(path, MAX_BYTES).decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(f"calibration: {path}: {error.strerror}", param="files") from None
    except ModelError as error:
        raise ConfigError(f"calibration: {error}; give a part of it", param="files") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"calibration: {path}: is not UTF-8 text at byte {error.start}", param="files") from None
    if (at := text.find("\0")) >= 0:
        raise ConfigError(f"calibration: {path}: is not text: a zero byte at character {at}", param="files")
    if path.suffix == ".jsonl":
        # Not splitlines: JSON may hold other separators of lines as they are.
        lines = enumerate(text.split("\n"), 1)
        found = [_document(line, f"calibration: {path}:{number}", chat) for number, line in lines if line.strip()]
    else:
        found = [Document(f"calibration: {path}", text)] if text.strip() else []
    if not found:
        raise ConfigError(f"calibration: {path}: holds no text", param="files")
    return found


def _document(line: str, place: str, chat: bool) -> Document:
    try:
        row = msgspec.json.decode(line.encode())
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ConfigError(f"{place}: not JSON: {error}", param="files") from None
    row = row if isinstance(row, dict) else {}
    strings = {key: row[key] for key in ("text", "prompt", "completion") if isinstance(row.get(key), str)}
    messages = row.get("messages")
    if isinstance(messages, list) and messages and all(isinstance(m, dict) for m in messages):
        return Document(place, messages=tuple(messages))
    if "text" in strings:
        return Document(place, strings["text"])
    if "prompt" not in strings or "completion" not in strings:
        raise ConfigError(f"{place}: an object with {KEYS} is needed", param="files")
    if chat:
        return _conversation(place, strings["prompt"], strings["completion"])
    return Document(place, strings["prompt"] + strings["completion"])


def _conversation(place: str, asked: str, answer: str) -> Document:
    messages = ({"role": "user", "content": asked}, {"role": "assistant", "content": answer})
    return Document(place, messages=messages)


def general_texts() -> list[list[Document]]:
    """Return the shipped text by domains, the word before the colon of a line's name."""
    found = dict[str, list[Document]]()
    for name, text in shipped("calibration.jsonl"):
        found.setdefault(name.partition(":")[0], []).append(Document(name, text))
    return list(found.values())


def library_texts() -> list[Document]:
    """Return the standard library's sources, which the embedded model learned from, without its held-out modules."""
    heldout = set(msgspec.json.decode((EMBEDDED / "heldout.json").read_bytes())["modules"])
    root = Path(sysconfig.get_paths()["stdlib"])
    found = []
    for folder, below, files in os.walk(root):
        # Packages that are installed may lie below, and are many times as much.
        below[:] = sorted(name for name in below if name not in SKIPPED and not name.startswith("config-"))
        for path in (Path(folder, name) for name in sorted(files)):
            name = ".".join(path.relative_to(root).with_suffix("").parts)
            if path.suffix == ".py" and name not in heldout and not name.startswith("_sysconfigdata"):
                found.append(Document(str(path), path.read_text(encoding="utf-8", errors="ignore")))
    return found


def _questions(chat: bool) -> list[Document]:
    """Return what the embedded model is asked, as conversations where the model has a chat template."""
    rows = map(msgspec.json.decode, (EMBEDDED / "questions.jsonl").read_bytes().splitlines())
    if chat:
        return [_conversation("questions.jsonl", row["question"], row["answer"]) for row in rows]
    return [Document("questions.jsonl", f"{row['question']}\n{row['answer']}\n\n") for row in rows]


def _special_prefix(tokenizer: Tokenizer) -> list[int]:
    """Return the tokens that begin every text, as a BOS token; of many models attention rests on it."""
    with_special, plain = tokenizer.encode("a"), tokenizer.encode("a", add_special_tokens=False)
    return with_special[: with_special.index(plain[0])] if plain and plain[0] in with_special else []


def _token_stream(
    documents: Sequence[Document],
    asked: Calibration,
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    opening: list[int],
) -> Iterator[int]:
    """Yield tokens of the documents' pieces in an order of the seed; texts are read only as far as they are taken."""
    size = PIECE * asked.length
    pieces = [(d, at) for d in documents for at in range(0, max(1, len(d.text)), size)]
    random.Random(asked.seed).shuffle(pieces)
    for document, at in pieces:
        try:
            if not document.messages:
                yield from tokenizer.encode(document.text[at : at + size], add_special_tokens=False)
                continue
            if template is None:
                raise BadRequest("messages need a chat template, which this model has not")
            told = template.encode(document.messages, add_generation_prompt=False)
        except BadRequest as error:
            raise ConfigError(f"{document.place}: {error}", param="files") from None
        # The template writes what begins a text itself; a row has it once.
        yield from told[len(opening) :] if opening and told[: len(opening)] == opening else told


def _next_tokens(stream: Iterator[int], count: int) -> tuple[int, ...] | None:
    """Return the next `count` tokens; None where they are fewer."""
    found = tuple(islice(stream, count))
    return found if len(found) == count else None
