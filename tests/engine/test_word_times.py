"""Times of words are those of openai/whisper's timing.py, of which this file has what it needs over transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from oracle import BACKENDS
from quire.audio.log_mel import log_mel
from quire.core.alignment import Alignment
from quire.core.audio import PromptAudio
from quire.core.errors import BadRequest, ModelError
from quire.core.request import Output
from quire.engine.llm import LLM
from quire.engine.speech.calls import answer_of, request_of
from quire.engine.speech.transcript import Word
from quire.engine.speech.vocabulary import speech_vocabulary
from quire.engine.speech.windows import Ask
from quire.engine.speech.words import SpokenWord, WordTimes, join_punctuation, split_words
from quire.sample.token_alignment import first_rows, mean_attention, smoothed
from speech_models import END, LANGUAGE, NO_TIMES, START, TRANSCRIBE, sound, write_speech
from turns import reports

pytestmark = pytest.mark.skipif("cpu" not in BACKENDS, reason="quire._native is not built")
ROWS = 100
OFF: dict[str, Any] = {"temperature": 0.0, "compression_ratio_threshold": None, "logprob_threshold": None,
                       "no_speech_threshold": None, "language": "en"}  # fmt: skip
TOLD: dict[str, Any] = {"num_blocks": 200, "device": "cpu", "dtype": "float32"}
HEADS = {"named": [[1, 2], [0, 1], [1, 0]], "usual": [[1, head] for head in range(4)]}


def warped(distance: NDArray[np.float64]) -> list[int]:
    """Where each token begins, as openai/whisper's `dtw_cpu` and `backtrace` find it, cell by cell."""
    tokens, rows = distance.shape
    cost, trace = np.full((tokens + 1, rows + 1), np.inf, np.float32), -np.ones((tokens + 1, rows + 1))
    cost[0, 0] = 0
    for j in range(1, rows + 1):
        for i in range(1, tokens + 1):
            before = cost[i - 1, j - 1], cost[i - 1, j], cost[i, j - 1]
            if before[0] < before[1] and before[0] < before[2]:
                way = 0
            else:
                way = 1 if before[1] < before[0] and before[1] < before[2] else 2
            cost[i, j], trace[i, j] = distance[i - 1, j - 1] + before[way], way
    trace[0, :], trace[:, 0] = 2, 1
    i, j, path = tokens, rows, []
    while i > 0 or j > 0:
        path.append((i - 1, j - 1))
        way = trace[i, j]
        i, j = i - (way != 2), j - (way != 1)
    found = path[::-1]
    return [found[at][1] for at in range(len(found)) if at == 0 or found[at][0] != found[at - 1][0]]


def aligned(oracle: Any, samples: NDArray[np.float32], text: list[int], heads: list[list[int]], rows: int) -> list[int]:
    """What `find_alignment` gives: rows where the tokens of `text`, and its end, begin."""
    features = torch.from_numpy(log_mel(samples, 80, 2 * ROWS).T.copy())[None]
    ids = torch.tensor([[START, LANGUAGE, TRANSCRIBE, NO_TIMES, *text, END]])
    with torch.no_grad():
        found = oracle(input_features=features, decoder_input_ids=ids, output_attentions=True).cross_attentions
    weights = torch.stack([found[layer][0, head] for layer, head in heads])[..., :rows]
    weights = weights / weights.sum(-1, keepdim=True)
    std, mean = torch.std_mean(weights, dim=-2, keepdim=True, unbiased=False)
    weights = torch.nn.functional.pad((weights - mean) / std, (3, 3), mode="reflect")
    matrix = weights.unfold(-1, 7, 1).sort()[0][..., 3].mean(0)[3:-1]
    return warped(-matrix.double().numpy())


@pytest.fixture(scope="module", params=HEADS)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("whisper")
    oracle = write_speech(folder, rows=ROWS, scale=6.0)
    oracle.set_attn_implementation("eager")
    if request.param == "named":
        name_heads(folder, HEADS["named"])
    with LLM(str(folder), **TOLD) as llm:
        yield llm, oracle, HEADS[request.param]


def name_heads(folder: Path, heads: Any) -> None:
    path = folder / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"alignment_heads": heads}))


def rows_of(llm: LLM, asked: list[Ask]) -> list[tuple[int, ...]]:
    """What the engine answers to alignments that are asked for at once."""
    requests = [request_of(llm.info, ask) for ask in asked]
    came = {request.id: Output(request_id=request.id) for request in requests}
    for request in requests:
        llm.engine.submit(request)
    for report in reports(llm.engine):
        for output in report.outputs:
            assert output.error is None, output.error
            came[output.request_id].merge(output)
    assert all(output.finish_reason == "stop" and not output.tokens for output in came.values())
    return [answer_of(came[request.id]).rows for request in requests]


def test_tokens_begin_where_openai_whisper_says(made: Any) -> None:
    llm, oracle, heads = made
    named = tuple(map(tuple, heads))
    assert speech_vocabulary(llm.info, llm.get_tokenizer()).alignment_heads == named
    rng, asked, want = np.random.default_rng(3), list[Ask](), list[list[int]]()
    for seed, (seconds, count) in enumerate(((2.0, 40), (1.3, 12), (2.0, 1), (0.7, 60), (1.0, 90))):
        samples, text = sound(seed, seconds), rng.integers(0, END, count).tolist()
        rows = round(seconds * 50)
        asks = Alignment(heads=named, first=3, rows=rows)
        opening = (START, LANGUAGE, TRANSCRIBE, NO_TIMES, *text, END)
        asked.append(Ask(PromptAudio.of(log_mel(samples, 80, 2 * ROWS)), opening, None, alignment=asks))
        want.append(aligned(oracle, samples, text, heads, rows))
    found = rows_of(llm, asked)
    assert [list(rows) for rows in found] == want
    assert [rows_of(llm, [ask])[0] for ask in asked] == found


def test_segments_are_the_same_with_words(made: Any) -> None:
    llm = made[0]
    sounds = [sound(seed, seconds) for seed, seconds in enumerate((2.0, 7.3, 0.4))]
    plain, timed = (llm.transcribe(sounds, word_timestamps=words, **OFF) for words in (False, True))
    for one, other in zip(plain, timed, strict=True):
        assert [each.fields() for each in one.segments] == [each.fields() for each in other.segments]
        assert not one.words and other.words
        assert all(word.start <= word.end <= other.duration + 0.02 for word in other.words)
    assert timed == [llm.transcribe(each, word_timestamps=True, **OFF) for each in sounds]


def test_the_way_is_the_cheapest() -> None:
    rng = np.random.default_rng(0)
    for tokens, rows in ((1, 1), (1, 9), (7, 3), (5, 40), (40, 5), (30, 70)):
        likeness = rng.standard_normal((tokens, rows)).astype(np.float32)
        if tokens % 2:
            likeness = np.round(likeness)  # ways that cost the same
        assert first_rows(likeness).tolist() == warped(-likeness.astype(np.float64))


def test_attention_is_normed_and_smoothed() -> None:
    rng = np.random.default_rng(1)
    scores = rng.standard_normal((3, 11, 50)).astype(np.float32)
    weights = torch.from_numpy(scores).softmax(-1)
    std, mean = torch.std_mean(weights, dim=-2, keepdim=True, unbiased=False)
    padded = torch.nn.functional.pad((weights - mean) / std, (3, 3), mode="reflect")
    want = padded.unfold(-1, 7, 1).sort()[0][..., 3].mean(0)
    np.testing.assert_allclose(mean_attention(scores), want.numpy(), atol=1e-5)
    short = np.ones((2, 3), np.float32)
    assert smoothed(short) is short and not mean_attention([np.zeros((4, 9), np.float32)]).any()


def words_of(*texts: str) -> list[SpokenWord]:
    return [SpokenWord(text, 1, float(i), i + 1.0) for i, text in enumerate(texts)]


def test_punctuation_belongs_to_words() -> None:
    for given, want in (
        ((" Hello", ",", " world", "!"), [" Hello,", " world!"]),
        ((" said", ' "', "Yes", ".", '"'), [" said", ' "Yes."']),
        ((" (", "a", ")", " -", " b", "?!"), [" (a)", " - b", "?!"]),
    ):
        words = words_of(*given)
        join_punctuation(words)
        assert [word.text for word in words if word.text] == want
        assert sum(word.tokens for word in words) == len(given)


def test_words_are_split_at_spaces_and_between_whole_characters(made: Any) -> None:
    tokenizer = made[0].get_tokenizer()
    text = " Grüße an dich, 世界!"
    tokens = tokenizer.encode(text, False)
    words = split_words(tokenizer, tokens, False)
    assert [word.text for word in words] == [" Grüße", " an", " dich", ",", " 世界", "!"]
    assert [word.text for word in split_words(tokenizer, tokens, True)] == list(text)
    assert sum(word.tokens for word in words) == len(tokens)
    broken = split_words(tokenizer, tokenizer.encode("ü", False)[:1], False)
    assert [(word.text, word.tokens) for word in broken] == [("\ufffd", 1)]


def test_long_words_are_cut_at_pauses(made: Any) -> None:
    tokenizer = made[0].get_tokenizer()
    parts = [tokenizer.encode(" ab cd.", False), tokenizer.encode(" ef", False)]
    times = WordTimes(tokenizer, "en")
    #            ' '  a    b    ' '  c    d    .    | ' '  e    f    end
    starts = [0.0, 4.8, 4.9, 5.0, 5.1, 5.2, 5.3, 9.0, 9.1, 9.2, 9.3]
    first, second = times.add(parts, [(4.5, 5.5), (9.0, 9.5)], starts, 0.0)
    assert first == (Word(" ab", 4.3, 5.0), Word(" cd.", 5.0, 5.3))
    assert second == (Word(" ef", 9.0, 9.3),) and times.said == 9.3


def test_heads_of_a_larger_model_are_not_taken(made: Any, tmp_path: Path) -> None:
    write_speech(tmp_path, rows=ROWS)
    for heads in ([[2, 0], [1, 1]], [[0, 4]], []):
        name_heads(tmp_path, heads)
        info = msgspec.structs.replace(made[0].info, folder=str(tmp_path))
        assert speech_vocabulary(info, made[0].get_tokenizer()).alignment_heads == tuple(map(tuple, HEADS["usual"]))


def test_what_cannot_be_is_refused(made: Any, tmp_path: Path) -> None:
    write_speech(tmp_path, rows=ROWS)
    for heads in ([[0]], "all", [[0, 1], 3], [[0, "1"]]):
        name_heads(tmp_path, heads)
        with LLM(str(tmp_path), **TOLD) as llm, pytest.raises(ModelError, match="alignment_heads"):
            llm.transcribe(sound(0, 0.5), **OFF)
    llm = made[0]
    sent = list[Any]()
    submit = llm.engine.submit
    llm.engine.submit = lambda request: (sent.append(request), submit(request))[1]
    try:
        llm.transcribe(sound(0, 1.0), word_timestamps=True, **OFF)
    finally:
        llm.engine.submit = submit
    good = next(request for request in sent if request.alignment is not None)
    for wrong in ({"heads": ((2, 0),)}, {"heads": ()}, {"rows": 0}, {"rows": ROWS + 1}, {"first": 500}):
        bad = msgspec.structs.replace(good, id=str(wrong), alignment=msgspec.structs.replace(good.alignment, **wrong))
        assert llm.engine.engine.submit(bad).error_kind == BadRequest.__name__
    assert llm.engine.engine.submit(msgspec.structs.replace(good, alignment=None)).error_kind == BadRequest.__name__
    assert llm.engine.engine.submit(msgspec.structs.replace(good, pooling=None)).error_kind == BadRequest.__name__
