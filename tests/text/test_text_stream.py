"""Streams of text: pieces that add up to the whole, no halves of characters, stop strings however they are cut."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from quire.core.params import SamplingParams
from quire.text.detokenizer import StopStrings, TextStream, WindowDetokenizer
from quire.text.tokenizer import Tokenizer
from text_models import PYDOC, sentencepiece_folder

pydoc = Tokenizer.from_folder(PYDOC)
texts = st.text(max_size=40).map(lambda t: t.replace("\ufdd0", ""))


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_folder(sentencepiece_folder(tmp_path_factory.mktemp("sentencepiece")))


def pieces(ids: list[int], seed: int) -> list[list[int]]:
    """`ids` cut into random runs."""
    rng, out = random.Random(seed), []
    while ids:
        n = rng.choice((1, 1, 1, 2, 5))
        out.append(ids[:n])
        ids = ids[n:]
    return out


def stream(tokenizer: Tokenizer, runs: list[list[int]], **options: object) -> tuple[list[str], str | None]:
    """All deltas, and the stop string."""
    text = TextStream(tokenizer, SamplingParams(**options))  # type: ignore[arg-type]
    deltas = [text.push(run)[0] for run in runs]
    last, stopped_by = text.push([], final=True)
    return [*deltas, last], stopped_by


@given(texts, st.integers(0, 999))
def test_deltas_add_up_byte_level(text: str, seed: int) -> None:
    ids = pydoc.encode(text)
    deltas, _ = stream(pydoc, pieces(ids, seed))
    assert "".join(deltas) == pydoc.decode(ids) == text
    window = WindowDetokenizer(pydoc, True, True)
    assert "".join([*map(window.push, pieces(ids, seed)), window.flush()]) == text


@given(st.lists(st.integers(0, 6150), max_size=30), st.booleans(), st.integers(0, 999))
def test_any_ids_at_all_byte_level(ids: list[int], skip: bool, seed: int) -> None:
    deltas, _ = stream(pydoc, pieces(ids, seed), skip_special_tokens=skip)
    assert "".join(deltas) == pydoc.decode(ids, skip_special_tokens=skip)


@given(text=st.text(alphabet="helo wrdé日🙂.\ufffd", max_size=40), seed=st.integers(0, 999), skip=st.booleans())
def test_deltas_add_up_sentencepiece(sentencepiece: Tokenizer, text: str, seed: int, skip: bool) -> None:
    ids = [*sentencepiece.encode(text), 2]
    deltas, _ = stream(sentencepiece, pieces(ids, seed), skip_special_tokens=skip)
    assert "".join(deltas) == sentencepiece.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("kind", ["byte", "sentencepiece"])
def test_no_half_characters(kind: str, sentencepiece: Tokenizer) -> None:
    tokenizer = pydoc if kind == "byte" else sentencepiece
    text = "a日本🙂é👩‍👩‍👧b"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert len(ids) > len(text)
    deltas, _ = stream(tokenizer, [[i] for i in ids])
    assert "".join(deltas) == text
    assert all("\ufffd" not in d for d in deltas)


def test_unfinished_character_comes_out_at_the_end() -> None:
    ids = pydoc.encode("x🙂")[:-1]
    deltas, _ = stream(pydoc, [[i] for i in ids])
    assert deltas[0] == "x" and deltas[-1] == "\ufffd" and "".join(deltas[1:-1]) == ""


def test_garbage_is_not_held_back_for_ever(sentencepiece: Tokenizer) -> None:
    window = WindowDetokenizer(sentencepiece, True, True)
    shown = "".join(window.push([3 + 0xFF]) for _ in range(200))
    assert len(shown) >= 180
    assert len(window._window) < 40
    assert (shown + window.push(sentencepiece.encode("hello", add_special_tokens=False)) + window.flush()).endswith(
        "hello"
    )


def test_literal_replacement_characters_survive() -> None:
    text = "\ufffd" * 50 + "€"
    deltas, _ = stream(pydoc, [[i] for i in pydoc.encode(text)])
    assert "".join(deltas) == text


def word_backend() -> Backend:
    backend = Backend(models.WordLevel({"a": 0, "b": 1, "<x>": 2, "<y>": 3}, unk_token="a"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens(["<x>", "<y>"])
    return backend


def test_tokenizer_without_a_decoder() -> None:
    tokenizer = Tokenizer(word_backend(), {})
    ids = [0, 1, 2, 3, 0]
    assert tokenizer.decode(ids, False) == "a b <x> <y> a"
    assert tokenizer.decode(ids, False, False) == "a b<x><y>a"
    deltas, _ = stream(tokenizer, [[i] for i in ids], skip_special_tokens=False)
    assert "".join(deltas) == "a b <x> <y> a"
    backend = word_backend()
    backend.decoder = decoders.WordPiece()
    deltas, _ = stream(Tokenizer(backend, {}), [[i] for i in [0, 1, 0]])
    assert "".join(deltas) == "a b a"


stops = st.lists(st.text(alphabet="ab\n", min_size=1, max_size=4), min_size=1, max_size=3)


@given(st.lists(st.text(alphabet="ab\nc", max_size=5), max_size=8), stops, st.booleans())
def test_stop_strings_do_not_depend_on_the_cuts(parts: list[str], stops: list[str], include: bool) -> None:
    text = "".join(parts)
    expected, hit = text, None
    for end in range(1, len(text) + 1):  # what a character-by-character reader sees
        ended = [s for s in stops if text[:end].endswith(s)]
        if ended:
            hit = max(ended, key=len)
            expected = text[: end if include else end - len(hit)]
            break
    watch, shown, found = StopStrings(tuple(stops), include), "", None
    for i, part in enumerate([*parts, ""]):
        delta, found = watch.push(part, final=i == len(parts))
        shown += delta
        assert expected.startswith(shown)
        if found is not None:
            break
    assert (shown, found) == (expected, hit)


def test_stop_string_over_tokens_and_what_is_held() -> None:
    text = TextStream(pydoc, SamplingParams(stop=("\n\ndef",)))
    ids = pydoc.encode("return x\n\nde") + pydoc.encode("f g(): pass")
    shown = ""
    for i in ids:
        delta, stopped_by = text.push([i])
        shown += delta
        assert "\n" not in shown
        if stopped_by:
            break
    assert (shown, stopped_by) == ("return x", "\n\ndef")
    assert text.push([5]) == ("", "\n\ndef")
    text = TextStream(pydoc, SamplingParams(stop=("\n\ndef",)))
    assert text.push(pydoc.encode("a\n\nde"))[0] == "a"
    assert text.push([], final=True) == ("\n\nde", None)
    text = TextStream(pydoc, SamplingParams(stop=("b", "abc"), include_stop_str_in_output=True))
    assert text.push(pydoc.encode("xabc"))[0] == "xab"


def test_stop_strings_wait_for_min_tokens() -> None:
    ids = pydoc.encode("a.b.c.d.e.f.g.h")
    runs = [[i] for i in ids]
    early, _ = stream(pydoc, runs, stop=(".",), max_tokens=None)
    late, by = stream(pydoc, runs, stop=(".",), min_tokens=6, max_tokens=None)
    assert "".join(early) == "a" and by == "."
    assert "".join(late).startswith(pydoc.decode(ids[:6])) and len("".join(late)) < len("a.b.c.d.e.f.g.h")
