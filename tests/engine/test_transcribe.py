"""Texts of sound are made as transformers and openai/whisper make them: times, windows, languages, second tries."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers.generation.logits_process import WhisperTimeStampLogitsProcessor

from oracle import BACKENDS
from quire.audio.decoding import RATE
from quire.audio.log_mel import log_mel
from quire.core.audio import PromptAudio
from quire.core.errors import BadRequest
from quire.core.speech import SpeechRules
from quire.engine.llm import LLM
from quire.engine.speech.calls import request_of
from quire.engine.speech.transcript import Segment, Transcript, clock, to_srt, to_vtt
from quire.engine.speech.vocabulary import SpeechVocabulary, speech_vocabulary
from quire.engine.speech.windows import Ask, Heard, SpeechOptions, Transcription, WindowTokens, compression_ratio
from quire.sample.speech_rules import mask_of
from speech_models import (
    END,
    LANGUAGE,
    NO_SPEECH,
    NO_TIMES,
    PREVIOUS,
    START,
    TIMES,
    TRANSCRIBE,
    TRANSLATE,
    VOCABULARY,
    sound,
    write_speech,
)

ROWS = 100
OFF: dict[str, Any] = {"temperature": 0.0, "compression_ratio_threshold": None, "logprob_threshold": None,
                       "no_speech_threshold": None}  # fmt: skip
Made = tuple[LLM, Any]


@pytest.fixture(scope="module", params=[0, 3])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("whisper")
    oracle = write_speech(folder, seed=request.param, rows=ROWS)
    with LLM(str(folder), num_blocks=200, device=BACKENDS[-1], dtype="float32") as llm:
        yield llm, oracle


def test_masks_are_those_of_transformers() -> None:
    class Facts:
        no_timestamps_token_id, eos_token_id, bos_token_id, max_initial_timestamp_index = NO_TIMES, END, END, 50

    rules = SpeechRules(times=TIMES, initial=50, end=END, untimed=NO_TIMES, suppress=(40, 41), begin=(32, END))
    generator = torch.Generator().manual_seed(0)
    for said in ([], [TIMES], [TIMES, 5], [TIMES, 5, 6, TIMES + 9], [TIMES, 5, TIMES + 9, TIMES + 9],
                 [TIMES, 5, TIMES + 9, TIMES + 9, 8], [TIMES + 100, 5, TIMES + 100], [7, 8]):  # fmt: skip
        for scale in (0.1, 5.0):
            logits = scale * torch.randn(1, VOCABULARY, generator=generator)
            scores = logits.clone()
            scores[0, [40, 41]] = -torch.inf
            if not said:
                scores[0, [32, END]] = -torch.inf
            ids = torch.tensor([[START, *said]])
            want = WhisperTimeStampLogitsProcessor(Facts(), begin_index=1)(ids, scores)[0]  # type: ignore[arg-type]
            bits = np.unpackbits(mask_of(rules, said, logits[0].numpy()).view(np.uint8), bitorder="little")
            np.testing.assert_array_equal(bits[:VOCABULARY] == 1, torch.isfinite(want).numpy(), str(said))


@pytest.mark.parametrize("told", [False, True])
@pytest.mark.parametrize("seconds", [2.0, 7.3])
def test_segments_are_those_of_transformers(made: Made, told: bool, seconds: float) -> None:
    llm, oracle = made
    for seed in range(3):
        samples = sound(seed, seconds)
        features = torch.from_numpy(log_mel(samples, 80, 2 * ROWS).T.copy())[None]
        with torch.inference_mode():
            want = oracle.generate(
                features, attention_mask=torch.ones(1, features.shape[-1], dtype=torch.long), return_timestamps=True,
                return_segments=True, language="de", task="transcribe", temperature=0.0,
                condition_on_prev_tokens=told,
            )["segments"][0]  # fmt: skip
        got = llm.transcribe(samples, language="de", condition_on_previous_text=told, **OFF)
        kept = [(round(float(s["start"]), 2), round(float(s["end"]), 2), s["tokens"].tolist()) for s in want]
        heard = {(round(s.start, 2), round(s.end, 2)): list(s.tokens) for s in got.segments}
        for start, end, tokens in kept:
            text = speech_vocabulary(llm.info, llm.get_tokenizer()).text(tokens)
            if not text.strip() or end <= start:
                continue
            mine = heard.pop((start, end))
            assert mine == tokens or mine == tokens[:-1], (seed, start)
        assert not heard


def test_languages_are_detected_as_transformers_does(made: Made) -> None:
    llm, oracle = made
    for seed in range(4):
        samples = sound(seed, 2.0)
        features = torch.from_numpy(log_mel(samples, 80, 2 * ROWS).T.copy())[None]
        with torch.inference_mode():
            want = int(oracle.detect_language(features)[0])
        found = llm.transcribe(samples, **OFF)
        assert found.language == {LANGUAGE: "en", LANGUAGE + 1: "de", LANGUAGE + 2: "fr"}[want]


def test_sounds_at_once_give_the_same_texts(made: Made) -> None:
    llm, _ = made
    sounds = [sound(seed, seconds) for seed, seconds in enumerate((2.0, 7.3, 0.4, 5.0))]
    options: dict[str, Any] = {"temperature": (0.0, 0.7), "compression_ratio_threshold": 0.1, "seed": 5}
    told: list[tuple[int, float]] = []
    together = llm.transcribe(
        sounds, told=lambda number, heard, seconds: told.append((number, heard.seconds)), **options
    )
    assert together == [llm.transcribe(each, **options) for each in sounds]
    assert {number for number, _ in told} == {0, 1, 2, 3} and max(done for _, done in told) == 7.3
    assert any(segment.temperature == 0.7 for each in together for segment in each.segments)


@pytest.fixture(scope="module")
def vocabulary(made: Made) -> SpeechVocabulary:
    return speech_vocabulary(made[0].info, made[0].get_tokenizer())


Answers = dict[tuple[int, float], WindowTokens]


def heard_by(transcription: Transcription, answers: Answers, asked: list[Any]) -> Transcript:
    """Drive a transcription by answers for (number of the window, temperature); `asked` is what it asked."""
    run, given, windows = transcription.run(), None, 0
    while True:
        try:
            step = run.send(given)
        except StopIteration as end:
            found: Transcript = end.value
            return found
        if isinstance(step, Heard):
            given, windows = None, windows + 1
            continue
        asked.append(step)
        given = WindowTokens(step.among[:1], (-0.05,)) if step.among else answers[windows, step.temperature]


def text_answer(tokenizer: Any, text: str, logprob: float, first: int = 0, last: int = 90) -> WindowTokens:
    tokens = (TIMES + first, *tokenizer.encode(text, False), TIMES + last, TIMES + last, END)
    return WindowTokens(tokens, (logprob,) * len(tokens))


def transcription(vocabulary: SpeechVocabulary, frames: int, **options: Any) -> Transcription:
    mel = np.random.default_rng(0).standard_normal((max(frames, 2 * ROWS), 80)).astype(np.float32)
    return Transcription(mel, frames, vocabulary, SpeechOptions(**options), (2 * ROWS, 96))


def test_a_window_is_tried_again_hotter(vocabulary: SpeechVocabulary) -> None:
    words, asked = vocabulary.tokenizer, list[Any]()
    answers = {
        (0, 0.0): text_answer(words, " la la la la la la la la la la la la la la", -0.1, last=100),
        (0, 0.2): text_answer(words, " unlikely", -1.5, last=100),
        (0, 0.4): text_answer(words, " good", -0.2, last=100),
        (1, 0.0): text_answer(words, " more", -0.3, last=100),
    }
    found = heard_by(
        transcription(vocabulary, 400, language="en", no_speech_threshold=None, prompt="Mr Quire"), answers, asked
    )
    assert found.text == "good more" and [s.temperature for s in found.segments] == [0.4, 0.0]
    assert [(s.start, s.end) for s in found.segments] == [(0.0, 2.0), (2.0, 4.0)]
    assert [a.temperature for a in asked] == [0.0, 0.2, 0.4, 0.0] and len({a.seed for a in asked}) == 4
    opening = (START, LANGUAGE, TRANSCRIBE)
    assert asked[0].opening == (PREVIOUS, *words.encode(" Mr Quire", False), *opening)
    assert asked[3].opening == (PREVIOUS, *words.encode(" Mr Quire", False), TIMES, *words.encode(" good", False),
                                TIMES + 100, *opening)  # fmt: skip
    assert compression_ratio(" la" * 14) > 2.4


def test_a_hot_text_is_not_told_to_the_next_window(vocabulary: SpeechVocabulary) -> None:
    answers = {(window, t): text_answer(vocabulary.tokenizer, " word", -2.0, last=100)
               for window in range(2) for t in (0.0, 1.0)}  # fmt: skip
    asked: list[Any] = []
    options: dict[str, Any] = {"language": "en", "temperatures": (0.0, 1.0), "no_speech_threshold": None}
    found = heard_by(transcription(vocabulary, 400, **options), answers, asked)
    assert [s.temperature for s in found.segments] == [1.0, 1.0]
    assert asked[2].opening == (START, LANGUAGE, TRANSCRIBE)


def test_silence_is_left_out(vocabulary: SpeechVocabulary) -> None:
    words, asked = vocabulary.tokenizer, list[Any]()
    answers = {(0, 0.0): text_answer(words, " thanks", -1.4), (1, 0.0): text_answer(words, " hello", -0.4)}
    found = heard_by(transcription(vocabulary, 350, language="en"), answers, asked)
    assert found.text == "hello" and [s.start for s in found.segments] == [2.0]
    assert [a.among for a in asked] == [(), (NO_SPEECH,), ()] and asked[1].opening == (START,)


def test_windows_without_a_sound_are_not_asked_for(made: Made, vocabulary: SpeechVocabulary) -> None:
    asked: list[Any] = []
    mel = np.full((600, 80), -1.5, np.float32)
    mel[400:] += sound(0, 1.0)[:200, None]
    found = heard_by(
        Transcription(mel, 600, vocabulary, SpeechOptions(), (2 * ROWS, 96)),
        {(2, 0.0): text_answer(vocabulary.tokenizer, " late", -0.1, last=100)}, asked,
    )  # fmt: skip
    assert len(asked) == 2 and [(s.text, s.start) for s in found.segments] == [(" late", 4.0)]
    quiet = made[0].transcribe(np.zeros(3 * RATE, np.float32))
    assert (quiet.text, quiet.segments, quiet.duration) == ("", (), 3.0)


def test_windows_begin_where_a_sentence_ended(vocabulary: SpeechVocabulary) -> None:
    words, asked = vocabulary.tokenizer, list[Any]()
    cut = (TIMES, *words.encode(" one", False), TIMES + 40, TIMES + 40, *words.encode(" tw", False), END)
    once = (TIMES, *words.encode(" two", False), TIMES + 50, END)
    answers = {(0, 0.0): WindowTokens(cut, (-0.1,) * len(cut)), (1, 0.0): WindowTokens(once, (-0.1,) * len(once)),
               (2, 0.0): WindowTokens((*words.encode(" three", False), END), (-0.1,) * 7)}  # fmt: skip
    found = heard_by(transcription(vocabulary, 300, language="en"), answers, asked)
    assert [(s.text, s.start, s.end) for s in found.segments] == [
        (" one", 0.0, 0.8), (" two", 0.8, 1.8), (" three", 2.8, 3.0),
    ]  # fmt: skip
    assert found.duration == 3.0 and [s.id for s in found.segments] == [0, 1, 2]


@pytest.mark.parametrize(("name", "code"), [("Castilian", "es"), ("mandarin", "zh"), ("valencian", "ca"),
                                            ("en-US", "en"), ("German", "de"), ("moldovan", "ro")])  # fmt: skip
def test_names_of_languages(vocabulary: SpeechVocabulary, name: str, code: str) -> None:
    known = replace(vocabulary, languages=vocabulary.languages | dict.fromkeys(("es", "zh", "ca", "ro"), 0))
    assert known.language(name) == code
    with pytest.raises(BadRequest, match="language: 'klingon'"):
        known.language("klingon")


def test_segments_are_numbered_as_they_are_shown(vocabulary: SpeechVocabulary) -> None:
    words = vocabulary.tokenizer
    parts = ((0, " one", 20), (20, " ", 30), (30, " two", 40))
    tokens = tuple(t for first, text, last in parts for t in (TIMES + first, *words.encode(text, False), TIMES + last))
    answers = {(0, 0.0): WindowTokens((*tokens, TIMES + 40, END), (-0.1,) * (len(tokens) + 2)),
               (1, 0.0): text_answer(words, " three", -0.1, last=100)}  # fmt: skip
    found = heard_by(transcription(vocabulary, 280, language="en"), answers, [])
    assert [(s.id, s.text) for s in found.segments] == [(0, " one"), (1, " two"), (2, " three")]


def test_a_translation_without_times(vocabulary: SpeechVocabulary) -> None:
    words, asked = vocabulary.tokenizer, list[Any]()
    answers = {(0, 0.0): WindowTokens((*words.encode(" a", False), END), (-0.1,) * 3)}
    found = heard_by(
        transcription(vocabulary, 150, language="French", task="translate", timestamps=False), answers, asked
    )
    assert asked[0].opening == (START, LANGUAGE + 2, TRANSLATE, NO_TIMES) and asked[0].rules.times == 0
    assert [(s.text, s.start, s.end) for s in found.segments] == [(" a", 0.0, 1.5)] and found.language == "fr"


def test_what_cannot_be_is_refused(made: Made, vocabulary: SpeechVocabulary) -> None:
    for options, told in (
        ({"language": "klingon"}, "language"), ({"task": "sing"}, "task"), ({"temperatures": ()}, "temperature"),
        ({"temperatures": (3.0,)}, "temperature"),
    ):  # fmt: skip
        with pytest.raises(BadRequest, match=told):
            transcription(vocabulary, 100, **options)
    with pytest.raises(BadRequest, match="colour"):
        made[0].transcribe(sound(0, 0.5), colour="red")
    with pytest.raises(BadRequest, match="No such file"):
        made[0].transcribe("/nowhere.wav")
    with LLM(num_blocks=32, device=BACKENDS[-1]) as text, pytest.raises(BadRequest, match="takes no audio"):
        text.transcribe(sound(0, 0.5))


def test_subtitles() -> None:
    parts = [Segment(i, 0, 3600.0 * i + 1.5, 3600.0 * i + 2.25, f" a -->\n\nb{i}", (), 0.0, 0.0, 1.0, 0.0)
             for i in range(2)]  # fmt: skip
    assert to_srt(parts) == (
        "1\n00:00:01,500 --> 00:00:02,250\na -> b0\n\n2\n01:00:01,500 --> 01:00:02,250\na -> b1\n\n"
    )
    assert to_vtt(parts).startswith("WEBVTT\n\n00:01.500 --> 00:02.250\na -> b0\n\n01:00:01.500 --> ")
    assert clock(59.9996, ".") == "00:01:00.000"


def test_a_text_may_be_as_long_as_the_decoder_has_positions(made: Made, vocabulary: SpeechVocabulary) -> None:
    info = made[0].info
    audio = PromptAudio.of(np.zeros((2 * ROWS, 80), np.float32))
    asked = request_of(info, Ask(audio, (START, LANGUAGE, TRANSCRIBE), vocabulary.rules(True)))
    assert asked.params.max_tokens == 96 - 3 and asked.speech is not None and asked.speech.times == TIMES
