"""Teachers and students: divergences against torch.distributions, likeliest tokens on disk, smaller models."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributions import Categorical, kl_divergence
from transformers import AutoModelForCausalLM, PreTrainedModel

from oracle import logits, relative_error, write
from paged_model import TOLERANCE, prompt
from quire.compress.train.dataset import TrainingRow, collate
from quire.compress.train.distillation import (
    DIVERGENCES,
    CachedTeacher,
    DistillationLoss,
    HiddenStateLoss,
    NetTeacher,
    TeacherOutput,
    cache_teacher,
)
from quire.compress.train.objective import CrossEntropy, NetLearner, cross_entropy, target_mask
from quire.compress.train.parametrized import ParametrizedNet, trainable_tensors
from quire.compress.train.student import spread_layers, write_random_student, write_truncated_student
from quire.core.errors import ConfigError
from quire.training.loop import LearningSchedule, TrainingRun
from training_runs import Plan, logits_of

ROWS = [TrainingRow(prompt(20, seed), start=1 + seed, weight=1.0 + seed / 2) for seed in range(3)]


def by_definition(kind: str, student: Tensor, teacher: Tensor) -> Tensor:
    """Of logits, by torch.distributions."""
    q, p = Categorical(logits=student), Categorical(logits=teacher)
    if kind == "kl":
        return kl_divergence(p, q)
    if kind == "reverse-kl":
        return kl_divergence(q, p)
    middle = Categorical(probs=(p.probs + q.probs) / 2)
    return (kl_divergence(p, middle) + kl_divergence(q, middle)) / 2


@pytest.mark.parametrize("kind", DIVERGENCES)
@given(seed=st.integers(0, 1 << 16), temperature=st.sampled_from([0.5, 1.0, 4.0]), spread=st.sampled_from([0.1, 5.0]))
@settings(max_examples=20, deadline=None)
def test_divergences_are_those_of_the_definition(kind: str, seed: int, temperature: float, spread: float) -> None:
    made = torch.Generator().manual_seed(seed)
    student, teacher = (torch.randn((5, 17), generator=made, dtype=torch.float64) * spread for _ in range(2))
    student.requires_grad_()
    want = by_definition(kind, student / temperature, teacher / temperature) * temperature**2
    got = TeacherOutput((teacher / temperature).log_softmax(-1)).divergence(student, kind, temperature)
    assert torch.allclose(got, want, rtol=1e-6, atol=1e-9)
    (g,) = torch.autograd.grad(got.sum(), student, retain_graph=True)
    (w,) = torch.autograd.grad(want.sum(), student)
    assert torch.allclose(g, w, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kind", DIVERGENCES)
def test_of_the_likeliest_tokens_the_rest_is_one(kind: str) -> None:
    made = torch.Generator().manual_seed(3)
    student, teacher = (torch.randn((6, 40), generator=made, dtype=torch.float64) * 2 for _ in range(2))
    logs, ids = teacher.log_softmax(-1).topk(7, -1)
    got = TeacherOutput(logs, ids).divergence(student, kind, 1.0)

    def lumped(x: Tensor) -> Tensor:
        p = x.softmax(-1).gather(-1, ids)
        return torch.cat((p, 1 - p.sum(-1, keepdim=True)), -1).log()

    assert torch.allclose(got, by_definition(kind, lumped(student), lumped(teacher)), atol=1e-9)
    whole = by_definition(kind, student, teacher)
    assert bool((got <= whole + 1e-9).all()) and float(got.sum()) > 0.3 * float(whole.sum())


def hugging_face_loss(oracle: PreTrainedModel, rows: list[TrainingRow]) -> float:
    """The weighted mean over the places that are learned, row by row."""
    total, weights = 0.0, 0.0
    for row in rows:
        logs = logits(oracle, row.tokens).log_softmax(-1)
        for at in range(row.start, len(row.tokens)):
            total -= row.weight * float(logs[at - 1, row.tokens[at]])
            weights += row.weight
    return total / weights


def test_the_loss_of_text_is_of_what_is_learned(tmp_path: Path) -> None:
    oracle = write(tmp_path, "llama")
    net = ParametrizedNet.of(str(tmp_path))
    uneven = [TrainingRow(row.tokens[: 20 - 5 * i], row.start, row.weight) for i, row in enumerate(ROWS)]
    with torch.no_grad():
        batch = collate(list(enumerate(uneven)))
        assert float(CrossEntropy().loss(net, batch, False)) == pytest.approx(
            hugging_face_loss(oracle, uneven), rel=1e-5
        )


def test_a_teacher_on_disk_says_what_the_net_says(tmp_path: Path) -> None:
    for name, seed in (("t", 1), ("s", 2)):
        write(tmp_path / name, "llama", seed)
    teacher, student = ParametrizedNet.of(str(tmp_path / "t")), ParametrizedNet.of(str(tmp_path / "s"))
    batch, vocabulary = collate(list(enumerate(ROWS))), teacher.spec.vocab_size
    done: list[int] = []
    cache_teacher(teacher, ROWS, tmp_path / "whole", vocabulary, 2.0, done.append)
    assert done == [1, 2, 3]
    said, _ = NetTeacher(teacher).predict(batch, 2.0)
    kept, _ = CachedTeacher(tmp_path / "whole", ROWS).predict(batch, 2.0)
    assert kept.ids is not None
    assert torch.allclose(torch.zeros_like(said.logs).scatter(-1, kept.ids, kept.logs), said.logs, atol=1e-5)
    cache_teacher(teacher, ROWS, tmp_path / "some", 8, 2.0, done.append)
    (tmp_path / "some" / "1.safetensors").unlink()
    before = (tmp_path / "some" / "0.safetensors").stat().st_mtime_ns
    cache_teacher(teacher, ROWS, tmp_path / "some", 8, 2.0, done.append)
    assert (tmp_path / "some" / "0.safetensors").stat().st_mtime_ns == before, "what is there is not made again"
    with torch.no_grad():
        losses = [
            float(DistillationLoss(t, "kl", 2.0).loss(student, batch, False))
            for t in (NetTeacher(teacher), CachedTeacher(tmp_path / "some", ROWS))
        ]
        assert 0 < losses[1] < losses[0], "a part of the distribution tells less apart"
        assert float(DistillationLoss(NetTeacher(teacher), "js").loss(teacher, batch, False)) == pytest.approx(
            0, abs=1e-6
        )
    with pytest.raises(ConfigError, match=r"is of temperature 2\.0, not 1\.0"):
        CachedTeacher(tmp_path / "some", ROWS).predict(batch, 1.0)
    with pytest.raises(ConfigError, match="is of other rows"):
        CachedTeacher(tmp_path / "some", ROWS[:2])
    with pytest.raises(ConfigError, match="was begun with another teacher"):
        cache_teacher(student, ROWS, tmp_path / "some", 4, 2.0, done.append)
    (tmp_path / "some" / "kept.json").write_text("{")
    with pytest.raises(ConfigError, match=r"kept\.json cannot be read"):
        CachedTeacher(tmp_path / "some", ROWS)


def test_losses_are_mixed_by_their_shares(tmp_path: Path) -> None:
    for name, seed in (("t", 1), ("s", 2)):
        write(tmp_path / name, "llama", seed)
    teacher, student = NetTeacher(ParametrizedNet.of(str(tmp_path / "t"))), ParametrizedNet.of(str(tmp_path / "s"))
    batch = collate(list(enumerate(ROWS)))
    with torch.no_grad():
        text = float(cross_entropy(student.run(batch.tokens, target_mask(batch), batch.lengths)[0], batch))
        whole, part = (
            float(DistillationLoss(teacher, share=share).loss(student, batch, False)) for share in (1.0, 0.25)
        )
    assert part == pytest.approx(0.25 * whole + 0.75 * text, rel=1e-5)


def test_hidden_states_are_learned_through_a_matrix(tmp_path: Path) -> None:
    oracle = write(tmp_path / "t", "llama", 1, num_hidden_layers=4)
    write(tmp_path / "s", "llama", 2, num_hidden_layers=2, hidden_size=32)
    teacher, student = ParametrizedNet.of(str(tmp_path / "t")), ParametrizedNet.of(str(tmp_path / "s"))
    hidden = HiddenStateLoss(student, teacher, 0)
    assert hidden.pairs == {0: 1, 1: 3}
    assert {n: tuple(p.shape) for n, p in hidden.parameters.items()} == {f"projection.{i}": (64, 32) for i in (0, 1)}
    batch = collate(list(enumerate(ROWS)))
    said = NetTeacher(teacher, (1,)).predict(batch, 1.0)[1][1]
    with torch.no_grad():
        states = oracle(torch.tensor([ROWS[0].tokens]), output_hidden_states=True).hidden_states
    assert relative_error(said[:19], states[2][0, :19]) < 1e-5
    objective = DistillationLoss(NetTeacher(teacher, (1, 3)), share=1.0, hidden=hidden, hidden_weight=1.0)
    leaves = trainable_tensors(student, ()) | hidden.parameters
    learner = NetLearner(student, leaves, objective, ROWS, 3, 0)
    run = TrainingRun(learner, LearningSchedule(30, 0.01), Plan(30), tmp_path / "state")
    run.go(lambda step, loss: None)
    assert run.losses[-1] < run.losses[0] / 2
    same = HiddenStateLoss(teacher, teacher, 0)
    states_of = {i: torch.randn(int(target_mask(batch).sum()), 64) for i in range(4)}
    assert not same.parameters and float(same.loss(states_of, states_of, batch)) == 0


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3_text"])
def test_a_student_of_half_the_layers(family: str, tmp_path: Path) -> None:
    write(tmp_path / "t", family, num_hidden_layers=4, dtype=torch.bfloat16)
    teacher = ParametrizedNet.of(str(tmp_path / "t"))
    write_truncated_student(teacher, 2, tmp_path / "s", torch.bfloat16)
    student = AutoModelForCausalLM.from_pretrained(tmp_path / "s", dtype=torch.float32).eval()
    tokens = prompt(9, 1)
    x, delta = teacher.enter(torch.tensor([tokens])), None
    with torch.no_grad():
        for i in (1, 3):
            x, delta = teacher.run_layer(i, x, delta)
        assert delta is not None
        assert relative_error(logits(student, tokens), teacher.leave(x, delta)[0]) < TOLERANCE
    assert spread_layers(5, 2) == [1, 4] and spread_layers(3, 3) == [0, 1, 2]
    with pytest.raises(ConfigError, match="--layers 5: the teacher has 4; a student has 1 to 4 of them"):
        spread_layers(4, 5)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_student_from_scratch_learns_of_its_teacher(family: str, tmp_path: Path) -> None:
    write(tmp_path / "t", family, 1)
    teacher = ParametrizedNet.of(str(tmp_path / "t"))
    changes = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 48}
    write_random_student(teacher, changes, 0, tmp_path / "s", torch.float32)
    config = json.loads((tmp_path / "s" / "config.json").read_text())
    assert {k: config[k] for k in changes} == changes
    student = ParametrizedNet.of(str(tmp_path / "s"))
    oracle = AutoModelForCausalLM.from_pretrained(tmp_path / "s", attn_implementation="eager").eval()
    with torch.no_grad():
        got = logits_of(student, ROWS[0].tokens)
    assert relative_error(got, logits(oracle, ROWS[0].tokens)) < TOLERANCE
    before = hugging_face_loss(oracle, ROWS)
    assert before == pytest.approx(math.log(99), rel=0.05), "it knows nothing"
    objective = DistillationLoss(NetTeacher(teacher))
    learner = NetLearner(student, trainable_tensors(student, ()), objective, ROWS, 3, 0)
    run = TrainingRun(learner, LearningSchedule(30, 0.01), Plan(30), tmp_path / "state")
    run.go(lambda step, loss: None)
    assert run.losses[-1] < run.losses[0] / 2
    with pytest.raises(ConfigError, match=r"--student n_layer: config\.json of t has no such field"):
        write_random_student(teacher, {"n_layer": 1}, 0, tmp_path / "n", torch.float32)
    with pytest.raises(ConfigError, match="--student: num_attention_heads: "):
        write_random_student(teacher, {"num_attention_heads": 0}, 0, tmp_path / "n", torch.float32)
