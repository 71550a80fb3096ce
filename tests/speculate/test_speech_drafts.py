"""Drafts beside models that hear: answers keep their bits, and a draft model may read its target's encoder."""

from __future__ import annotations

import json
import random
import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from transformers import WhisperForConditionalGeneration

from engine_answers import Answer, run
from oracle import BACKENDS, write
from quire.core.audio import PromptAudio
from quire.core.config import flat_config
from quire.core.errors import ConfigError
from quire.core.params import SamplingParams
from quire.core.request import Request
from quire.engine.llm import LLM
from quire.engine.local import LocalEngine
from quire.engine.requests import hearing, make_request
from quire.engine.speech.vocabulary import speech_vocabulary
from quire.model.build import load_model
from quire.model.net.audio_encoder import AudioEncoder
from quire.ops.backend import open_backend
from quire.speculate.draft_encoder import shared_encoder
from quire.text.tokenizer import Tokenizer
from speculation_methods import GROWN
from speech_models import (
    LANGUAGE,
    NO_TIMES,
    START,
    TRANSCRIBE,
    VOCABULARY,
    frames,
    sound,
    write_speech,
    write_tokenizer,
)

pytestmark = pytest.mark.skipif("cpu" not in BACKENDS, reason="quire._native is not built")
ROWS = 100
METHODS: dict[str, dict[str, Any]] = {
    "ngram": {"prompt_lookup_min": 1, "num_speculative_tokens": 4},
    "suffix": {"prompt_lookup_min": 1, "num_speculative_tokens": 4, "suffix_decoding_max_spec_factor": 4.0},
    "self": {"layers": 1, "num_speculative_tokens": 3},
    "same": {"num_speculative_tokens": 5},
    "distilled": {"num_speculative_tokens": 5},
    "other": {"num_speculative_tokens": 3},
    "ngram tree": {"method": "ngram", "prompt_lookup_min": 1} | GROWN,
    "distilled tree": {"model": "distilled"} | GROWN,
    "other tree": {"model": "other"} | GROWN,
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A target; itself; one of a layer behind the same encoder; one that is narrower and has an encoder of its own."""
    home = tmp_path_factory.mktemp("whisper")
    target = write_speech(home / "target", rows=ROWS)
    shutil.copytree(home / "target", home / "same")
    write_distilled(home / "distilled", target)
    write_speech(home / "other", seed=9, rows=ROWS, d_model=32, decoder_layers=1, encoder_layers=2)
    return {name: str(home / name) for name in ("target", "same", "distilled", "other")}


def write_distilled(folder: Path, target: WhisperForConditionalGeneration) -> None:
    """A model of one decoder layer of its own behind the encoder of `target`."""
    made = write_speech(folder, seed=5, rows=ROWS, decoder_layers=1)
    with torch.no_grad():
        made.model.encoder.load_state_dict(target.model.encoder.state_dict())
    made.save_pretrained(folder)


def engine_of(folder: str, **options: Any) -> LocalEngine:
    told: dict[str, Any] = {"model": folder, "device": "cpu", "num_blocks": 400, "dtype": "float32"}
    return LocalEngine(flat_config(**told | options))


def spoken(name: str, folders: dict[str, str]) -> str:
    way = METHODS[name] | {"adaptive": False}
    model = folders.get(str(way.get("model", name)))
    return json.dumps({"method": name} | way if model is None else way | {"model": model})


def asked(engine: LocalEngine) -> list[Request]:
    """Windows with and without times, greedy and drawn, some of them twice and some behind a text."""
    vocabulary = speech_vocabulary(engine.info, Tokenizer.from_folder(Path(engine.info.folder)))
    cold, short = {"temperature": 0.0}, {"temperature": 0.3, "max_tokens": 20}
    ways: list[dict[str, Any]] = [cold, {"temperature": 1.0}, {"temperature": 0.8}, short, cold | {"max_tokens": 1}]
    made = list[Request]()
    for i, way in enumerate(ways * 2):
        timed = i % 3 != 2
        opening = [START, LANGUAGE, TRANSCRIBE, *(() if timed else (NO_TIMES,))]
        said = range(65, 85) if i == 3 else ()
        prompt = hearing(engine.info, PromptAudio.of(frames(i // 2, ROWS)), [*said, *opening])
        params = SamplingParams(logprobs=0, detokenize=False, **{"max_tokens": None} | way)
        request = make_request(engine.info, prompt, params, request_id=f"r{i}", seed=i)
        made.append(replace(request, speech=vocabulary.rules(timed)))
    return made


@pytest.fixture(scope="module")
def alone(folders: dict[str, str]) -> dict[str, Answer]:
    answers = dict[str, Answer]()
    with closing(engine_of(folders["target"])) as engine:
        for request in asked(engine):
            answers |= run(engine, [request])
    return answers


@pytest.mark.parametrize("method", METHODS)
def test_drafts_change_no_bit_of_what_is_heard(method: str, folders: dict[str, str], alone: dict[str, Answer]) -> None:
    for options in ({}, {"max_num_seqs": 4, "num_blocks": 40}):
        with closing(engine_of(folders["target"], speculative_config=spoken(method, folders), **options)) as engine:
            for _ in range(2):
                got = run(engine, asked(engine), random.Random(method))
                assert [name for name in got if got[name].bits() != alone[name].bits()] == []
            stats = engine.engine.stats()
            assert stats.accepted_tokens > 0 and (not options or stats.preemptions > 0)
            if method == "same":
                assert stats.accepted_tokens == stats.draft_tokens


@pytest.mark.parametrize("name", ["same", "distilled", "other"])
def test_an_encoder_with_the_same_weights_runs_once(
    name: str, folders: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    runs, encode = list[int](), AudioEncoder.encode

    def counted(self: AudioEncoder, sound: Any) -> Any:
        runs.append(self.spec.hidden)
        return encode(self, sound)

    monkeypatch.setattr(AudioEncoder, "encode", counted)
    with closing(engine_of(folders["target"], speculative_config=spoken(name, folders))) as engine:
        run(engine, [request for request in asked(engine) if request.params.max_tokens != 1])
    windows, others = 5, 5 if name == "other" else 0
    assert (runs.count(64), runs.count(32)) == (windows, others)


def test_an_encoder_of_other_weights_is_not_shared(folders: dict[str, str], tmp_path: Path) -> None:
    config = flat_config(model=folders["target"], device="cpu", dtype="float32")
    target = load_model(config, open_backend(config.device))
    assert shared_encoder(config, target, folders["distilled"]) is target.encoder
    for part in ("conv1.weight", "layers.2.fc2.bias", "layer_norm.weight", "embed_positions.weight"):
        made = WhisperForConditionalGeneration.from_pretrained(folders["distilled"])
        with torch.no_grad():
            made.model.encoder.get_parameter(part).view(-1)[-1] += 0.5
        shutil.copytree(folders["distilled"], tmp_path / part)
        made.save_pretrained(tmp_path / part)
        assert shared_encoder(config, target, str(tmp_path / part)) is None


def test_transcripts_are_the_same_with_drafts(folders: dict[str, str]) -> None:
    sounds = [sound(seed, seconds) for seed, seconds in enumerate((2.0, 7.3, 0.4, 5.0))]
    options: dict[str, Any] = {"temperature": (0.0, 0.7), "compression_ratio_threshold": 0.1, "seed": 5}
    told: dict[str, Any] = {"device": "cpu", "num_blocks": 200, "dtype": "float32"}
    with LLM(folders["target"], **told) as llm:
        want = llm.transcribe(sounds, **options)
    for method in ("distilled", "other", "suffix"):
        with LLM(folders["target"], speculative_config=spoken(method, folders), **told) as llm:
            assert llm.transcribe(sounds, **options) == want


def test_what_does_not_fit_is_refused(folders: dict[str, str], tmp_path: Path) -> None:
    def refusal(**asked: Any) -> str:
        with pytest.raises(ConfigError) as told:
            engine_of(folders["target"], speculative_config=json.dumps(asked))
        return told.value.message

    write_speech(tmp_path / "bins", rows=ROWS, num_mel_bins=40)
    write_speech(tmp_path / "rows", rows=50)
    for name, part in (("bins", "frames of 40 numbers"), ("rows", "50 rows")):
        assert part in refusal(model=str(tmp_path / name))
    write(tmp_path / "llama", "llama", vocab_size=VOCABULARY)
    write_tokenizer(tmp_path / "llama")
    assert "has none" in refusal(model=str(tmp_path / "llama"))
    for method in ("medusa", "eagle", "dflash"):
        assert "has an encoder" in refusal(method=method, model=folders["same"])
    assert "has an encoder" in refusal(method="self", quantization="int4")
