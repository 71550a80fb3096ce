"""Models that hear equal transformers', in any company, and what they cannot do is refused."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from oracle import BACKENDS, backend, relative_error
from paged_model import load
from quire.core.audio import PromptAudio
from quire.core.config import flat_config
from quire.core.errors import BadRequest, ConfigError, ModelError
from quire.core.images import placeholders
from quire.core.params import SamplingParams
from quire.core.request import Request
from quire.engine.llm import LLM
from quire.engine.local import LocalEngine
from quire.engine.requests import hearing, make_request
from quire.model.families.find import read_spec
from speech_models import (
    END,
    LANGUAGE,
    NO_TIMES,
    PREVIOUS,
    START,
    TRANSCRIBE,
    VOCABULARY,
    Heard,
    frames,
    heard,
    write_speech,
)
from turns import reports

CPU = pytest.mark.skipif("cpu" not in BACKENDS, reason="quire._native is not built")
BEGINS = (START, LANGUAGE, TRANSCRIBE, NO_TIMES)
PROMPTED = (PREVIOUS, 70, 71, 72, *BEGINS)
DECODED = [[*BEGINS, 5, 6, 7], [START], [*PROMPTED, 9, 10]]
WAYS = {"whole": [[7, 1, 10]], "steps": [[4, 1, 8], *[[1, 0, 1]] * 2, [1, 0, 0]]}


@pytest.fixture(params=[b for b in BACKENDS if b in ("cpu", "reference")], scope="module")
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("facts", [{}, {"num_mel_bins": 128}, {"encoder_layers": 1, "rows": 52}])
def test_logits_equal_transformers_however_cut(name: str, facts: dict[str, Any], tmp_path: Path) -> None:
    oracle = write_speech(tmp_path, **facts)
    rows, bins = oracle.config.max_source_positions, oracle.config.num_mel_bins
    sounds = [frames(seed, rows, bins) for seed in range(3)]
    want = [heard(oracle, sound, tokens) for sound, tokens in zip(sounds, DECODED, strict=True)]
    for block_size in (1, 16):
        model = load(tmp_path, backend(name), block_size=block_size, max_model_len=0)
        for way, cut in WAYS.items():
            for got, expected in zip(Heard(model, sounds, DECODED).run(cut), want, strict=True):
                assert relative_error(got, expected) <= 1e-5, (block_size, way)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("whisper")
    return folder, write_speech(folder)


def asked(engine: LocalEngine, sound: Any, begins: tuple[int, ...], number: int, **params: Any) -> Request:
    info, wanted = engine.info, SamplingParams(detokenize=False, **params)
    prompt = hearing(info, PromptAudio.of(sound), begins)
    return make_request(info, prompt, wanted, request_id=str(number), seed=number)


def generate(engine: LocalEngine, asks: list[tuple[Any, tuple[int, ...]]], **params: Any) -> dict[str, list[int]]:
    for number, (sound, begins) in enumerate(asks):
        engine.submit(asked(engine, sound, begins, number, **params))
    got: dict[str, list[int]] = {}
    for report in reports(engine):
        for output in report.outputs:
            assert output.error is None, output
            got.setdefault(f"{output.request_id}/{output.index}", []).extend(output.tokens)
    engine.engine.pool.check()
    assert engine.engine.pool.num_used == 0
    return got


MANY = [(frames(seed), (BEGINS, (START,), PROMPTED)[seed % 3]) for seed in range(6)]
GREEDY = {"max_tokens": 16, "min_tokens": 16, "temperature": 0.0}


def test_greedy_tokens_equal_transformers_several_at_once(made: tuple[Path, Any]) -> None:
    folder, oracle = made
    engine = LocalEngine(flat_config(model=str(folder), num_blocks=128, max_num_seqs=8, device=BACKENDS[-1]))
    got = generate(engine, MANY, **GREEDY)
    for number, (sound, begins) in enumerate(MANY):
        tokens = list(begins)
        for _ in range(16):
            logits = heard(oracle, sound, tokens)[-1]
            logits[END] = -torch.inf
            tokens.append(int(logits.argmax()))
        assert got[f"{number}/0"] == tokens[len(begins) :], number


@CPU
def test_outputs_do_not_depend_on_what_runs_beside(made: tuple[Path, Any]) -> None:
    options: dict[str, Any] = {"model": str(made[0]), "dtype": "bfloat16", "device": "cpu"}
    sampled = {"max_tokens": 40, "min_tokens": 40, "temperature": 0.8}
    roomy = LocalEngine(flat_config(**options, num_blocks=256))
    want = generate(roomy, MANY, **sampled)
    for number in range(3):
        alone = LocalEngine(flat_config(**options, num_blocks=256, enforce_eager=True))
        beside = [(frames(50 + i), BEGINS) for i in range(number)]
        assert generate(alone, [*beside, MANY[number]], **sampled)[f"{number}/0"] == want[f"{number}/0"]
    tight = LocalEngine(flat_config(**options, num_blocks=19, max_num_seqs=4))
    assert generate(tight, MANY, **sampled) == want
    assert tight.engine.scheduler.preemptions > 0


def test_siblings_share_what_was_heard(made: tuple[Path, Any]) -> None:
    engine = LocalEngine(flat_config(model=str(made[0]), num_blocks=128, device=BACKENDS[-1]))
    got = generate(engine, MANY[:2], n=3, max_tokens=6, temperature=1.0, min_tokens=6)
    assert len(got) == 6 and len({tuple(tokens) for tokens in got.values()}) > 1


@CPU
@pytest.mark.parametrize("options", [{"quantization": "int8"}, {"quantization": "int4"}, {"kv_cache_dtype": "int8"},
                                     {"kv_cache_dtype": "fp8"}, {"dtype": "bfloat16"}])  # fmt: skip
def test_formats_of_weights_and_keys(made: tuple[Path, Any], options: dict[str, Any]) -> None:
    """Close to the whole model: the distributions of one token differ little."""
    folder, oracle = made
    engine = LocalEngine(flat_config(model=str(folder), num_blocks=64, device="cpu", **options))
    engine.submit(asked(engine, MANY[0][0], BEGINS, 0, max_tokens=1, logprobs=20, temperature=0.0))
    (output,) = [o for report in reports(engine) for o in report.outputs if o.tokens]
    want = heard(oracle, MANY[0][0], list(BEGINS))[-1].log_softmax(-1)
    (entry,) = output.logprobs
    error = max(abs(want[token].item() - value) for token, value in entry.top)
    assert error < (2.0 if options.get("quantization") == "int4" else 0.5)


def test_the_decoder_has_its_own_number_of_positions(made: tuple[Path, Any]) -> None:
    engine = LocalEngine(flat_config(model=str(made[0]), num_blocks=64, device=BACKENDS[-1]))
    assert engine.info.decoder_start is not None and engine.info.decoder_start.positions == 96
    got = generate(engine, [MANY[0]], max_tokens=500, temperature=0.0, ignore_eos=True)
    assert len(got["0/0"]) == 96 - len(BEGINS)


def test_what_cannot_work_is_refused(made: tuple[Path, Any], tmp_path: Path) -> None:
    folder = str(made[0])
    options: dict[str, Any] = {"num_blocks": 64, "device": BACKENDS[-1]}
    with pytest.raises(ConfigError, match="enable-lora"):
        LLM(folder, **options, enable_lora=True)
    with pytest.raises(ConfigError, match="encoder of sound"):
        LLM(folder, **options, tensor_parallel_size=2)
    with pytest.raises(ConfigError, match="use at least 129"):
        LLM(folder, **options, max_model_len=128)
    with LLM(folder, **options, max_model_len=128 + 16) as short:
        assert len(short.transcribe(np.sin(np.arange(16000)).astype(np.float32), language="en").text) < 32
    with pytest.raises(ModelError, match="encoder_ffn_dim"):
        read_spec({"model_type": "whisper", "encoder_ffn_dim": 100, "decoder_ffn_dim": 96}, "config.json")
    engine = LocalEngine(flat_config(model=folder, **options))
    info, params, sound = engine.info, SamplingParams(), PromptAudio.of(frames(0))
    with pytest.raises(BadRequest, match="reads audio and no text"):
        make_request(info, [5, 6], params, request_id="a", seed=0)
    for begins, told in (((START,) * 96, "96 positions"), ((VOCABULARY,), "not in")):
        with pytest.raises(BadRequest, match=told):
            make_request(info, hearing(info, sound, begins), params, request_id="a", seed=0)
    with pytest.raises(BadRequest, match="200 frames of 80"):
        make_request(info, hearing(info, PromptAudio.of(frames(0, 90)), BEGINS), params, request_id="a", seed=0)
    ids = tuple(placeholders(sound.key, 100, VOCABULARY))
    for wrong in (
        {"prompt": ids[1:]},
        {"audio": None},
        {"decoder_prompt": (-1,)},
        {"audio": PromptAudio.of(frames(1))},
    ):
        asked_for = {"prompt": ids, "audio": sound, "decoder_prompt": BEGINS} | wrong
        output = engine.engine.submit(
            Request(id="b", params=params, seed=0, arrival=time.monotonic(), **asked_for)  # type: ignore[arg-type]
        )
        assert output is not None and output.error is not None
