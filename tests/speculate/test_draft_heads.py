"""Heads that draft from hidden rows: what they read, their logits against plain torch, and folders that do not fit."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import silu

from engine_answers import engine_of
from head_folders import saved, write_dflash, write_eagle, write_medusa
from head_layers import hidden_states, layer_by_hand, relative, rms
from oracle import BACKENDS, write
from quire.cli.app import app
from quire.core.errors import ConfigError
from quire.core.params import SamplingParams
from quire.core.request import Request
from quire.core.speculation import Speculation
from quire.engine.engine import Engine
from quire.model.net.hidden_taps import Taps
from quire.ops.arrays import to_torch
from quire.run.executor import LocalExecutor
from quire.run.runner import Runner
from quire.speculate.medusa import MedusaDrafter
from speculation_methods import PYDOC
from turns import working

pytestmark = pytest.mark.skipif("cpu" not in BACKENDS, reason="quire._native is not built")
PROMPT = (9, 300, 41, 7, 1200, 33, 5, 78, 2024, 17)


def engine_with(folder: Path, method: str, **options: Any) -> Engine:
    """The embedded model in f32 with these heads, always drafting."""
    asked = json.dumps({"method": method, "model": str(folder), "adaptive": False})
    return engine_of(**{"dtype": "float32", "speculative_config": asked} | options).engine


def start(engine: Engine, prompt: tuple[int, ...] = PROMPT, tokens: int = 9) -> None:
    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    engine.submit(Request(id="r", prompt=prompt, params=params, seed=1, arrival=0.0))


@pytest.mark.parametrize("layers", [(), (2, 3, 3)])
@pytest.mark.parametrize("every", [False, True])
def test_hidden_rows_are_those_of_the_definition(layers: tuple[int, ...], every: bool) -> None:
    if layers and not every:
        pytest.skip("nothing asks for it")
    engine = engine_of(dtype="float32").engine
    tapped = SimpleNamespace(asked=Speculation(), taps=Taps(layers, every), model=None, beside=())
    executor = LocalExecutor(engine.config, engine.model, engine.ops, tapped)  # type: ignore[arg-type]
    runner = Runner(executor.allocate(engine.kv, engine.scheduler.config))
    runner.caches.own[:] = engine.runner.caches.own
    runner.caches.of_layer[:] = engine.runner.caches.of_layer
    runner.step.caches.of_layer[:] = engine.runner.step.caches.of_layer
    plain, engine.runner = engine.runner, runner
    engine.step_queue._runner = runner
    start(engine)
    engine.step()
    states = hidden_states(list(PROMPT))
    want = torch.cat([states[i] for i in layers], 1) if layers else states[-1]
    want = want if every else want[-1:]
    assert relative(runner.step.hidden[: len(want)], want) < 2e-5
    (seq,) = engine.scheduler.running
    for _ in range(3):  # recorded, then replayed
        engine.step()
    states = hidden_states(seq.tokens[:-1])
    want = torch.cat([states[i] for i in layers], 1) if layers else states[-1]
    assert relative(runner.step.hidden[:1], want[-1:]) < 2e-5
    assert plain.step.hidden.size == 0, "nobody asked"


def medusa_by_hand(folder: Path, h: Tensor, own: bool, vocab: int) -> list[Tensor]:
    """Logits [n, V] of each head by their papers' formula."""
    tensors = {k.removeprefix("medusa_heads."): t for k, t in load_file(folder / "model.safetensors").items()}
    tensors = {k: t.float() if t.is_floating_point() else t for k, t in tensors.items()}
    found = []
    for i in range(3):
        x = h
        for j in range(2):
            name = f"{i}.{j}.linear" if own else f"blocks.{i}.layers.{j}"
            x = x + silu(x @ tensors[f"{name}.weight"].T + tensors.get(f"{name}.bias", torch.zeros(())))
        logits = x @ tensors[f"{i}.2.weight" if own else f"lm_heads.{i}.weight"].T
        if not own:
            ids = tensors["token_map"]
            known = logits if logits.shape[1] == len(ids) else logits[:, ids]
            logits = torch.full((len(h), vocab), -torch.inf).index_copy_(1, ids, known)
        found.append(logits)
    return found


@pytest.mark.parametrize("own", [True, False], ids=["authors", "vllm"])
def test_medusa_says_what_its_formula_says(own: bool, tmp_path: Path) -> None:
    engine = engine_with(write_medusa(tmp_path / "m", 256, 6144, blocks=2, own=own), "medusa")
    assert engine.speculator is not None
    drafter = engine.speculator.proposer
    assert isinstance(drafter, MedusaDrafter)
    h = torch.randn(5, 256, generator=torch.Generator().manual_seed(1))
    want = medusa_by_hand(tmp_path / "m", h, own, 6144)
    for head, logits in zip(drafter._medusa.heads, want, strict=True):
        found = to_torch(drafter._logits(head, h.numpy())).clone()
        finite = logits.isfinite()
        assert torch.equal(found.isfinite(), finite)
        assert relative(found[finite], logits[finite]) < 1e-5


def test_medusa_drafts_from_the_row_of_the_last_token(tmp_path: Path) -> None:
    folder = write_medusa(tmp_path / "m", 256, 6144)
    engine = engine_with(folder, "medusa")
    start(engine)
    for _ in range(4):
        engine.step()
    (seq,) = engine.scheduler.running
    assert engine.speculator is not None
    engine.speculator.draft()
    tensors = load_file(folder / "model.safetensors")
    h = hidden_states(seq.tokens[:-1])[-1][-1:]
    by_hand = []
    for i in range(3):
        x = h + silu(h @ tensors[f"{i}.0.linear.weight"].float().T + tensors[f"{i}.0.linear.bias"].float())
        by_hand.append(int((x @ tensors[f"{i}.1.weight"].float().T).argmax()))
    assert seq.draft.tokens == by_hand


def eagle_by_hand(folder: Path, method: str, tokens: list[int], states: tuple[Tensor, ...], count: int) -> list[int]:
    """The next `count` drafted tokens, everything computed anew for each."""
    w = {k: t.float() if t.is_floating_point() else t for k, t in load_file(folder / "model.safetensors").items()}
    own = load_file(Path(PYDOC) / "model.safetensors")["model.embed_tokens.weight"].float()
    embed = w.get("embed_tokens.weight", own)
    three = method == "eagle3"
    hidden = torch.cat([states[i] for i in (2, 3, 3)], 1) @ w["fc.weight"].T if three else states[-1]
    drafted: list[int] = []
    for _ in range(count):
        e = embed[torch.tensor((tokens + drafted)[1:])]
        if three:
            h = torch.cat(
                (rms(e, w["midlayer.input_layernorm.weight"]), rms(hidden, w["midlayer.hidden_norm.weight"])), 1
            )
            out = layer_by_hand(w, "midlayer", hidden, h)
            best = int((rms(out[-1], w["norm.weight"]) @ w["lm_head.weight"].T).argmax())
            best += int(w["d2t"][best]) if "d2t" in w else 0
        else:
            x = torch.cat((e, hidden), 1) @ w["fc.weight"].T + w["fc.bias"]
            out = layer_by_hand(w, "layers.0", x, x)
            best = int((out[-1] @ own.T).argmax())
        drafted.append(best)
        hidden = torch.cat((hidden, out[-1:]))
    return drafted


@pytest.mark.sampled(5)
@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_eagle_drafts_what_its_formula_says(method: str, tmp_path: Path) -> None:
    """In the middle of an answer, over a prompt that was cut into chunks, after drafts that were kept and lost."""
    folder = write_eagle(tmp_path / "e", method, 256, 6144, 3000 if method == "eagle3" else 0)
    engine = engine_with(folder, method, max_num_batched_tokens=16, max_num_seqs=4)
    start(engine, PROMPT * 4, 30)
    seen = 0
    for _ in working(engine):
        engine.step()
        for seq in engine.scheduler.running:
            if len(seq.tokens) <= seq.prompt_len:
                continue
            assert engine.speculator is not None
            engine.speculator.draft()
            by_hand = eagle_by_hand(folder, method, seq.tokens, hidden_states(seq.tokens[:-1]), 4)
            assert seq.draft.tokens == by_hand[: len(seq.draft.tokens)] and (
                len(seq.draft.tokens) == 4 or len(seq.output) > 24
            )
            seen += 1
            if seen == 2:  # what the target says next takes the place of the draft: kept, as it is right
                seq.draft.tokens[:] = right_ahead(seq.tokens, 3)
        if seen > 4:
            return
    assert seen > 3


def right_ahead(tokens: list[int], count: int) -> list[int]:
    """What the embedded model says next."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(PYDOC, dtype=torch.float32)
    made = model.generate(torch.tensor([tokens]), max_new_tokens=count, do_sample=False)
    return [int(t) for t in made[0, len(tokens) :]]


def refusal(folder: Path, method: str, **options: Any) -> str:
    with pytest.raises(ConfigError) as error:
        engine_with(folder, method, **options)
    return error.value.message


def test_medusa_heads_that_do_not_fit_are_refused_by_name(tmp_path: Path) -> None:
    other = refusal(write_medusa(tmp_path / "a", 64, 6144), "medusa")
    assert "0.0.linear.weight is [64, 64], the target needs [256, 256]" in other
    words = refusal(write_medusa(tmp_path / "b", 256, 99), "medusa")
    assert "0.1.weight is [99, 256], the target needs [6144, 256]" in words
    assert "hidden_size: is 64" in refusal(write_medusa(tmp_path / "c", 64, 99, own=False), "medusa")
    more = write_medusa(tmp_path / "d", 256, 6144)
    tensors = load_file(more / "model.safetensors")
    saved(more, {}, tensors | {"0.0.gate.weight": torch.zeros(3)})
    assert "nothing reads the tensor 0.0.gate.weight" in refusal(more, "medusa")
    saved(more, {}, {"x": torch.zeros(3)})
    assert "nothing reads the tensor x" in refusal(more, "medusa")
    (more / "model.safetensors").unlink()
    (more / "medusa_lm_head.pt").write_bytes(b"pickle")
    assert "medusa_lm_head.pt), which can run code" in refusal(more, "medusa")


def test_more_tokens_than_heads_are_refused(tmp_path: Path) -> None:
    folder = write_medusa(tmp_path / "m", 256, 6144)
    asked = json.dumps({"method": "medusa", "model": str(folder), "num_speculative_tokens": 4})
    assert "has 3 heads" in refusal(folder, "medusa", speculative_config=asked)


def test_models_without_hidden_rows_take_no_heads(tmp_path: Path) -> None:
    folder = write_medusa(tmp_path / "m", 64, 99)
    t5 = tmp_path / "t5"
    write(t5, "t5", decoder_start_token_id=0)
    assert "has an encoder, and what reads hidden rows" in refusal(folder, "medusa", model=str(t5))


def test_eagle_layers_that_do_not_fit_are_refused_by_name(tmp_path: Path) -> None:
    assert "hidden_size: is 64" in refusal(write_eagle(tmp_path / "a", "eagle", 64, 6144), "eagle")
    assert "vocab_size: is 99" in refusal(write_eagle(tmp_path / "b", "eagle3", 256, 99), "eagle3")
    good = write_eagle(tmp_path / "c", "eagle3", 256, 6144, 3000)
    config = json.loads((good / "config.json").read_text())
    tensors = load_file(good / "model.safetensors")
    for changes, says in (
        ({"d2t": tensors["d2t"] + 5000}, "d2t names tokens that the target does not have"),
        ({"t2d": tensors["t2d"].roll(1)}, "t2d does not say the tokens that d2t says"),
        ({"fc.weight": tensors["fc.weight"][:, :512]}, "fc.weight is [256, 512], the target needs [256, 768]"),
        ({"midlayer.extra.weight": torch.zeros(3)}, "nothing reads the tensor midlayer.extra.weight"),
    ):
        assert says in refusal(saved(good, config, tensors | changes), "eagle3")
    without = {k: t for k, t in tensors.items() if k != "d2t"}
    assert "d2t is missing, and draft_vocab_size 3000" in refusal(saved(good, config, without), "eagle3")
    other = config | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 9]}}
    assert "layers (1, 2, 9) of pydoc, which has 6" in refusal(saved(good, other, tensors), "eagle3")
    one = write_eagle(tmp_path / "d", "eagle", 256, 6144)
    assert "fc.weight is [256, 512], the target needs [256, 768]" in refusal(one, "eagle3")


@pytest.mark.parametrize(
    ("method", "rows"),
    [
        ("medusa", ("3.0 KiB\n", "medusa heads of", "(9 tensors)", "one a head, as many as pay")),
        ("eagle3", ("3.5 KiB, what drafts included", "eagle3 heads of", "4 at most")),
        ("eagle", ("3.5 KiB, what drafts included", "eagle heads of", "weights that draft  about")),
        ("dflash", ("4.0 KiB, what drafts included", "dflash heads of", "as many as a block has, as many as pay")),
    ],
)
def test_inspect_shows_what_heads_take(method: str, rows: tuple[str, ...], tmp_path: Path) -> None:
    if method == "medusa":
        write_medusa(tmp_path, 256, 6144)
    elif method == "dflash":
        write_dflash(tmp_path, 256, 6144, (0, 2))
    else:
        write_eagle(tmp_path, method, 256, 6144)
    asked = json.dumps({"method": method, "model": str(tmp_path)})
    shown = CliRunner().invoke(app, ["inspect", "--speculative-config", asked])
    assert shown.exit_code == 0, shown.output
    assert all(row in shown.output for row in rows), shown.output
