"""Heads trained by our command: what they learn from, that a run goes on as if it had not stopped, the folder."""

from __future__ import annotations

import json
import re
import sysconfig
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file

from oracle import BACKENDS
from quire.cli.app import app
from quire.cli.train_heads import METHODS
from quire.core.config import flat_config
from quire.core.errors import ConfigError
from quire.model.net.hidden_taps import Taps
from quire.speculate.train import methods
from quire.speculate.train.eagle3 import Eagle3Layer
from quire.speculate.train.loop import HeadTraining, HeadTrainingRun
from quire.speculate.train.medusa import MedusaHeads
from quire.speculate.train.target import Target
from test_heads import hidden_states, layer_by_hand, relative, rms
from test_speculation import PYDOC

pytestmark = pytest.mark.skipif("cpu" not in BACKENDS, reason="quire._native is not built")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A module of the standard library, which the embedded model knows well."""
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_text((Path(sysconfig.get_paths()["stdlib"]) / "textwrap.py").read_text())
    return path


def train(out: Path, text: Path, *more: str) -> Result:
    words = ["train-heads", "pydoc", str(out), "--data", str(text), "--length", "128", "--heads", "2"]
    return CliRunner().invoke(app, [*words, *more])


def test_what_is_learned_from_is_what_the_model_computes() -> None:
    target = Target(flat_config(device="cpu", dtype="float32"), 32, lambda spec: Taps((2, 3), every=True))
    tokens = [9, 300, 41, 7, 1200, 33, 5, 78, 2024, 17]
    states, (hidden, logits) = hidden_states(tokens), target.read(tokens)
    assert relative(hidden, torch.cat((states[2], states[3]), 1)) < 2e-5
    embed, head = target.matrices()
    assert torch.equal(embed, head), "the embedded model's are one"
    assert relative(logits, states[-1] @ head.T) < 1e-4


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.slow
def test_a_command_trains_and_measures(method: str, text: Path, tmp_path: Path) -> None:
    result = train(tmp_path, text, "--method", method, "--steps", "4")
    assert result.exit_code == 0, result.output
    assert f"{method} heads, 4 steps" in result.output
    assert re.search(r"held out: \d\.\d\d tokens a step over \d+ drafts\n  guess 1 kept: [\d.]+ %", result.output)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["base_model_name_or_path"] == "pydoc"
    assert all(
        t.dtype in (torch.bfloat16, torch.int64, torch.bool) for t in load_file(tmp_path / "model.safetensors").values()
    )


def run_of(out: Path, steps: int = 6) -> HeadTrainingRun:
    torch.manual_seed(0)
    target = Target(flat_config(device="cpu"), 32, lambda spec: MedusaHeads.taps)
    rows = [list(range(5 + 32 * i, 37 + 32 * i)) for i in range(3)]
    return HeadTrainingRun(HeadTraining("medusa", 2, steps, 2, 32, 1e-3, 0), MedusaHeads(target, 2), target, rows, out)


def test_a_run_goes_on_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    whole, losses = run_of(tmp_path / "a"), list[float]()
    whole.go(lambda step, loss: losses.append(loss))
    assert losses[-1] < losses[0], "it learns its three rows"

    def stop(step: int, loss: float) -> None:
        if step == 3:
            raise KeyboardInterrupt

    cut = run_of(tmp_path / "b")
    assert not cut.resume()
    with pytest.raises(KeyboardInterrupt):
        cut.go(stop)
    rest = run_of(tmp_path / "b")
    assert rest.resume() and rest.step == 3 and rest.losses == losses[:3]
    rest.go(lambda step, loss: None)
    assert rest.losses == losses
    for ours, theirs in zip(rest.heads.parameters(), whole.heads.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    with pytest.raises(ConfigError, match="is of a run with other options"):
        run_of(tmp_path / "b", steps=7).resume()


def test_what_cannot_be_trained_says_why(text: Path, tmp_path: Path) -> None:
    assert "--method 'oracle' is not one of" in str(train(tmp_path, text, "--method", "oracle").exception)
    assert "cannot be read as UTF-8" in str(train(tmp_path, tmp_path / "none").exception)
    assert "has 1024 positions" in str(train(tmp_path, text, "--length", "1025").exception)
    (tmp_path / "short").write_text("import os\n")
    assert "holds 0 rows of 128 tokens; two are needed" in str(train(tmp_path, tmp_path / "short").exception)


def chain_loss(folder: Path, tokens: list[int], passes: int) -> float:
    """The loss as the formula of drafting has it: every position's chain of `passes` drafts by itself."""
    w = {k: t.float() for k, t in load_file(folder / "model.safetensors").items()}
    states = hidden_states(tokens)
    head = load_file(Path(PYDOC) / "model.safetensors")["model.embed_tokens.weight"].float()
    wanted = (states[-1] @ head.T).softmax(-1)
    fused = torch.cat([states[i] for i in (2, 3, 5)], 1) @ w["fc.weight"].T
    lost: list[list[float]] = [[] for _ in range(passes)]
    for root in range(len(tokens) - 1):
        hidden = fused[: root + 1]
        for j in range(min(passes, len(tokens) - 1 - root)):
            e = head[torch.tensor(tokens[1 : root + j + 2])]
            norms = rms(e, w["midlayer.input_layernorm.weight"]), rms(hidden, w["midlayer.hidden_norm.weight"])
            out = layer_by_hand(w, "midlayer", hidden, torch.cat(norms, 1), 32)[-1:]
            said = (rms(out, w["norm.weight"]) @ w["lm_head.weight"].T).log_softmax(-1)
            lost[j].append(-float((wanted[root + j + 1] * said[0]).sum()))
            hidden = torch.cat((hidden, out))
    return sum(0.8**j * sum(each) / len(each) for j, each in enumerate(lost))


def test_eagle3_learns_what_its_drafts_are(tmp_path: Path) -> None:
    """The passes over all positions at once are the chains that drafting makes, one position at a time."""
    torch.manual_seed(1)
    made = methods.METHODS["eagle3"]
    target = Target(flat_config(device="cpu", dtype="float32"), 32, made.taps)
    tokens = [9, 300, 41, 7, 1200, 33, 5, 78, 2024, 17]
    heads = made.heads(target, 4, [tokens])
    assert isinstance(heads, Eagle3Layer)
    run = HeadTrainingRun(HeadTraining("eagle3", 4, 1, 1, 32, 1e-3, 0), heads, target, [tokens], tmp_path)
    run.write(torch.float32)
    with torch.no_grad():
        loss = float(heads.loss(*target.read(tokens), torch.tensor(tokens)))
    assert loss == pytest.approx(chain_loss(tmp_path, tokens, 4), rel=1e-4)
