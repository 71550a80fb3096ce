"""Passports: what is measured equals its definition, and who shows it."""

from __future__ import annotations

import json
import math
import shutil
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from live_server import live
from oracle import BACKENDS
from quire import LLM, SamplingParams
from quire.bench import quality
from quire.cli import main
from quire.compress.evaluation import quality_measurement
from quire.compress.evaluation.passport import (
    Answers,
    Passport,
    Rates,
    passport_rows,
    read_passport,
    with_section,
    write_passport,
)
from quire.compress.evaluation.quality_measurement import passport_of, speed_of
from quire.compress.pipelines.recipe_runner import compress
from quire.compress.recipes.parser import recipe_of
from quire.core.config import EngineConfig, flat_config
from quire.core.errors import ConfigError, ModelError
from quire.model.disk.checkpoint import EMBEDDED
from quire.ops.arrays import to_torch
from quire.run.step import LocalStep
from quire.text.tokenizer import Tokenizer
from stub_engine import StubEngine, stub_info
from tiny_model import OPTIONS, write_tiny

pytestmark = pytest.mark.skipif("cpu" not in BACKENDS, reason="quire._native is not built")

TEXTS = {
    "a": "import os\n\n\ndef join(*parts):\n    return os.path.join(*parts)\n",
    "b": "class Queue:\n    pass\n" * 4,
}


def served(**options: Any) -> EngineConfig:
    return flat_config(device="cpu", num_blocks=64, **options)


def served_rows(ids: list[int], **options: Any) -> torch.Tensor:
    """Log-probabilities [n - 1, V] f64 that an engine computes for a prompt, in chunks of 16 rows."""
    seen: list[torch.Tensor] = []
    forward = LocalStep.forward

    def spied(self: LocalStep, *given: Any) -> np.ndarray:
        found = forward(self, *given)
        seen.append(to_torch(found).clone())
        return found

    with pytest.MonkeyPatch.context() as patch, LLM(device="cpu", num_blocks=64, **options) as llm:
        patch.setattr(LocalStep, "forward", spied)
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, ignore_eos=True, detokenize=False)
        llm.generate({"prompt_token_ids": ids}, params, use_tqdm=False)
    return torch.cat(seen)[: len(ids) - 1].double().log_softmax(-1)


def compared(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[float, float]:
    """KL and agreement, a token at a time by the formulas."""
    kls = [float((p * (lp - lq)).sum()) for a, b in pairs for p, lp, lq in zip(a.exp(), a, b, strict=True)]
    same = [int(x.argmax()) == int(y.argmax()) for a, b in pairs for x, y in zip(a, b, strict=True)]
    return sum(kls) / len(kls), sum(same) / len(same)


@pytest.fixture(scope="module")
def int4() -> Passport:
    return passport_of(served(quantization="int4"), served(), TEXTS, limit=4, rounds=1, also=["int8"])


def test_a_model_against_itself_differs_in_nothing() -> None:
    passport = passport_of(served(), served(), TEXTS, limit=2, rounds=0)
    assert (passport.kl, passport.top1) == (0.0, 1.0)
    assert passport.perplexity == passport.of_source.perplexity and not passport.speed
    assert passport.exact_answers == passport.of_source.exact_answers == Answers(2, 2)
    assert passport.evaluation.tokens == passport.evaluation.kl_tokens > 40


def test_the_numbers_are_their_definitions(int4: Passport) -> None:
    """Against what an engine computes when it serves, and `quire eval`'s perplexity."""
    tokenizer = Tokenizer.from_folder(EMBEDDED)
    rows = [tokenizer.encode(text, add_special_tokens=False) for text in TEXTS.values()]
    small: dict[str, Any] = {"max_num_batched_tokens": 16, "max_num_seqs": 1}
    pairs = [(served_rows(ids, **small), served_rows(ids, quantization="int4", **small)) for ids in rows]
    kl, same = compared(pairs)
    assert int4.kl > 1e-3 and int4.kl == pytest.approx(kl, rel=1e-9)
    assert int4.top1 == same < 1
    count = sum(len(ids) - 1 for ids in rows)
    for which, found in ((0, int4.of_source), (1, int4)):
        lost = -sum(
            float(pair[which][at, t]) for ids, pair in zip(rows, pairs, strict=True) for at, t in enumerate(ids[1:])
        )
        assert found.perplexity == pytest.approx(math.exp(lost / count), rel=1e-9)
    with LLM(device="cpu", num_blocks=64) as llm:
        plain = quality.perplexity(llm, TEXTS)
    assert int4.evaluation.tokens == count == plain["tokens"]
    assert int4.of_source.perplexity == pytest.approx(plain["perplexity"], rel=1e-5)
    assert int4.of_source.bits_per_byte == pytest.approx(plain["bits_per_byte"], rel=1e-5)


def test_two_checkpoints_are_as_far_apart_as_for_transformers(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder = tmp_path / "noisy"
    shutil.copytree(EMBEDDED, folder)
    torch.manual_seed(0)
    weights = {
        n: t.float() * (1 + 0.1 * torch.randn_like(t.float()))
        for n, t in load_file(folder / "model.safetensors").items()
    }
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    passport = passport_of(
        served(model=str(folder), dtype="float32"), served(dtype="float32"), TEXTS, limit=1, rounds=0
    )
    tokenizer = Tokenizer.from_folder(EMBEDDED)
    models = [AutoModelForCausalLM.from_pretrained(f, dtype=torch.float32) for f in (EMBEDDED, folder)]
    pairs = []
    for text in TEXTS.values():
        ids = torch.tensor([tokenizer.encode(text, add_special_tokens=False)])
        with torch.no_grad():
            a, b = (model(ids).logits[0, :-1].double().log_softmax(-1) for model in models)
        pairs.append((a, b))
    kl, same = compared(pairs)
    assert passport.kl > 1e-2 and passport.kl == pytest.approx(kl, rel=1e-4) and passport.top1 == same < 1
    assert (
        passport.digests["source"] != passport.digests["model"] and passport.size_bytes > passport.of_source.size_bytes
    )


def test_long_texts_are_windows_of_which_some_are_compared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of 32 tokens, each scored once as `quality.windows` has it; every fifth window's distributions fit."""
    vocab = 6144
    monkeypatch.setattr(quality_measurement, "MAX_WINDOW_LOGITS", 32 * vocab)
    text = (EMBEDDED / "README.md").read_text()[:1500]
    whole = passport_of(served(quantization="int4"), served(), {"t": text}, limit=1, rounds=0)
    monkeypatch.setattr(quality_measurement, "MAX_LOGIT_BYTES", 4 * vocab * whole.evaluation.tokens // 5 + 1)
    part = passport_of(served(quantization="int4"), served(), {"t": text}, limit=1, rounds=0)
    assert whole.evaluation.window == part.evaluation.window == 32
    assert part.perplexity == whole.perplexity and whole.evaluation.kl_tokens == whole.evaluation.tokens
    assert 0.15 < part.evaluation.kl_tokens / part.evaluation.tokens < 0.25
    assert part.kl == pytest.approx(whole.kl, rel=0.5) and part.kl != whole.kl
    with LLM(device="cpu", num_blocks=64, max_model_len=33) as llm:
        assert whole.of_source.perplexity == pytest.approx(quality.perplexity(llm, {"t": text})["perplexity"], rel=1e-5)


def test_speeds_are_of_both(int4: Passport) -> None:
    assert [speed.format.split(", ")[1] for speed in int4.speed] == ["quantization int4", "quantization int8"]
    for speed in int4.speed:
        assert "quantization none" in speed.source_format
        for name in Rates.__struct_fields__:
            own, other = (getattr(r, name) for r in (speed.tokens_per_second, speed.source_tokens_per_second))
            assert own > 0 and getattr(speed.ratio, name) == pytest.approx(own / other), "one round is its own median"
        assert speed.weight_bytes < speed.source_weight_bytes
    assert int4.speed[0].weight_bytes < int4.speed[1].weight_bytes


@pytest.mark.slow
def test_no_prompt_that_is_timed_was_seen_before() -> None:
    """Or it would be found in the cache, and read in no time."""
    with LLM(device="cpu", num_blocks=256) as made, LLM(device="cpu", num_blocks=256) as source:
        for _ in range(2):
            speed_of(made, source, 1)
        for llm in (made, source):
            stats = llm.engine.engine.stats()
            assert stats.prefix_queries > 0 and stats.prefix_hits == 0


def test_it_says_what_it_was_made_of(int4: Passport) -> None:
    files = sum(p.stat().st_size for p in EMBEDDED.glob("*.safetensors"))
    assert 0.99 * files < int4.size_bytes == int4.of_source.size_bytes <= files
    assert int4.digests["source"] == int4.digests["model"] and len(int4.digests["code"]) == 32
    assert int4.machine["cores"] and int4.evaluation.texts == 2
    recipe = recipe_of({"stage": [{"kind": "quantize", "method": "rtn"}]}, "R")
    told = passport_of(served(), served(), {"a": "x = 1\n"}, 1, 0, recipe, {"calibration": "c"})
    assert told.recipe is not None and told.recipe["stages"][0]["method"] == "rtn"
    assert told.digests["recipe"] == recipe.digest and told.digests["calibration"] == "c"


def test_what_cannot_be_compared(tmp_path: Path) -> None:
    tiny = str(write_tiny(tmp_path / "tiny"))
    other = flat_config(**OPTIONS, model=tiny)
    with pytest.raises(ConfigError, match=r"tiny has 260 tokens and its source 6,144: KL needs one vocabulary"):
        passport_of(other, served(), TEXTS, rounds=0)
    with pytest.raises(ConfigError, match=r"tiny names no held-out text; give texts to score with --text FILE"):
        passport_of(other, other, rounds=0)
    with pytest.raises(ConfigError, match="there is no text to score"):
        passport_of(other, other, {"a": "x"}, rounds=0)


def test_it_is_written_and_read(int4: Passport, tmp_path: Path) -> None:
    (tmp_path / "file.gguf").write_text("")
    assert read_passport(tmp_path) is None and read_passport(tmp_path / "file.gguf") is None
    write_passport(tmp_path, int4)
    assert read_passport(tmp_path) == int4
    keys = json.loads((tmp_path / "quire.json").read_text())
    assert {"perplexity", "kl", "top1", "bits_per_byte", "exact_answers", "size_bytes", "speed", "recipe"} <= set(keys)
    first = (tmp_path / "README.md").read_text()
    assert first.startswith(f"# {tmp_path.name}\n") and f"{int4.kl:.6f} nats a token" in first
    write_passport(tmp_path, msgspec.structs.replace(int4, kl=0.5))
    assert (tmp_path / "README.md").read_text() == first.replace(f"{int4.kl:.6f}", "0.500000")
    write_passport(tmp_path / "alone.json", int4)
    assert json.loads((tmp_path / "alone.json").read_text()) == json.loads(msgspec.json.encode(int4))
    (tmp_path / "quire.json").write_text('{"kl": 1}')
    with pytest.raises(ModelError, match=r"quire.json is no passport: .*missing.*; remove it"):
        read_passport(tmp_path)
    with pytest.raises(ConfigError, match="No such file"):
        write_passport(tmp_path / "none" / "a.json", int4)


def test_a_folder_that_is_made_has_the_title_of_its_place(
    int4: Passport, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It is measured in the folder of the last stage, which has another name."""
    monkeypatch.setattr("quire.compress.pipelines.recipe_runner.passport_of", lambda *_, **__: int4)
    stage = {"kind": "quantize", "method": "rtn", "targets": ["*layers.0.*q_proj*"]}
    compress("", tmp_path / "small", recipe_of({"stage": [stage]}, "test"), lambda what: None, passport=True)
    assert (tmp_path / "small" / "README.md").read_text().startswith("# small\n")


def test_a_section_takes_the_place_of_the_last_one(int4: Passport) -> None:
    text = "# Model\n\nWords.\n"
    once = with_section(text, int4)
    assert once.startswith(text) and with_section(once, int4) == once
    more = once + "\nAfter.\n"
    assert with_section(more, int4) == more


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["quire", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def test_the_commands_show_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(EMBEDDED, folder)
    (tmp_path / "t.txt").write_text(TEXTS["a"])
    asked = ["--against", "pydoc", "--text", str(tmp_path / "t.txt"), "--limit", "1", "--rounds", "1"]
    more = ["--quantization", "int8", "--num-blocks", "64", "-o", str(folder)]
    assert run(monkeypatch, "eval", str(folder), *asked, *more) == 0
    out = capsys.readouterr().out
    passport = read_passport(folder)
    assert passport is not None and 0 < passport.kl < 0.01 and passport.source == "pydoc"
    assert f"{passport.kl:.6f} nats a token" in out and "tokens/s, " in out
    assert run(monkeypatch, "inspect", str(folder)) == 0
    shown = capsys.readouterr().out
    assert all(value in shown for _, value in passport_rows(passport))
    mistakes = {"no folder /no/such": [*asked, "-o", "/no/such/f"], "/no/model": ["--against", "/no/model"]}
    for reason, words in mistakes.items():
        assert run(monkeypatch, "eval", *words) == 2
        assert reason in capsys.readouterr().err
    (folder / "quire.json").write_text("[]")
    assert run(monkeypatch, "inspect", str(folder)) == 2
    assert "quire.json is no passport" in capsys.readouterr().err


def test_the_server_says_it_of_the_model_alone(int4: Passport, tmp_path: Path) -> None:
    write_passport(tmp_path, int4)
    with live(StubEngine(stub_info(folder=str(tmp_path), adapters=("sql",)))) as server:
        model, adapter = server.http.get("/v1/models").json()["data"]
        assert model["quire"] == json.loads((tmp_path / "quire.json").read_text()) and "quire" not in adapter
        assert server.http.get("/v1/models/stub").json()["quire"]["kl"] == int4.kl
    with live() as server:
        assert "quire" not in server.http.get("/v1/models").json()["data"][0]
    (tmp_path / "quire.json").write_text("[")
    stub = StubEngine(stub_info(folder=str(tmp_path)))
    with pytest.raises(ModelError, match=r"quire.json: is not a JSON object"), live(stub):
        pass
