"""`quire train`: rows of text and answers, every method from the command line, going on, refusals in one line."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file, save_file

from oracle import BACKENDS
from quire import LLM, LoRARequest, SamplingParams
from quire.cli.app import app
from quire.compress.tracking.journal import work_folder
from quire.compress.train.dataset import IGNORE_INDEX, RATIONALE_PREFIX, TextDataset, TrainingRow, collate
from quire.compress.train.distillation import ANSWER_PROMPT, REASONING_PROMPT, write_answers
from quire.compress.train.job import prepare, read_prompts
from quire.compress.train.options import METHODS, TrainOptions
from quire.core.errors import ConfigError
from quire.model.describe import open_model
from quire.ops.arrays import to_torch
from quire.text.template import ChatTemplate
from quire.text.tokenizer import Tokenizer
from tiny_model import OPTIONS, write_tiny

TEXT = "the quick brown fox jumps over the lazy dog. " * 12


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of bytes whose weights are random, with a chat template."""
    folder = write_tiny(tmp_path_factory.mktemp("m") / "tiny")
    made = open_model(str(folder), "dummy").source
    save_file(
        {n: to_torch(made.tensor(n)).float().clone() for n in made.infos},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    return folder


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_text(TEXT)
    return path


def texts(model: Path, length: int = 64, rationales: float = 0.0, chat: bool = True) -> TextDataset:
    tokenizer = Tokenizer.from_folder(model)
    template = ChatTemplate.from_folder(model, tokenizer) if chat else None
    return TextDataset(tokenizer, template, length, rationales)


def learned(model: Path, row: TrainingRow) -> str:
    return Tokenizer.from_folder(model).decode(row.tokens[row.start :], skip_special_tokens=False)


def test_answers_alone_are_learned(model: Path, tmp_path: Path) -> None:
    messages = [
        {"role": "user", "content": "a?"}, {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c?"}, {"role": "assistant", "content": "d"},
    ]  # fmt: skip
    lines = [{"text": "plain"}, {"prompt": "q", "completion": "w", "rationale": "r"}, {"messages": messages}]
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    rows = texts(model, rationales=0.5).read(path)
    assert [learned(model, r) for r in rows] == ["lain", "w<|end|>", "r<|end|>", "b<|end|>", "d<|end|>"]
    assert [r.weight for r in rows] == [1, 1, 0.5, 1, 1]
    decode: Callable[..., str] = Tokenizer.from_folder(model).decode
    assert decode(rows[2].tokens, skip_special_tokens=False).startswith(
        f"<|user|>{RATIONALE_PREFIX}q<|end|><|assistant|>r"
    )
    assert decode(rows[4].tokens, skip_special_tokens=False).startswith("<|user|>a?<|end|><|assistant|>b<|end|>")
    assert len(texts(model).read(path)) == 4, "explanations are read where they have a weight"
    (plain,) = texts(model, chat=False).of_answer("q", "w")
    assert decode(plain.tokens, skip_special_tokens=False) == "qw<|end|>" and plain.start == 1
    read = texts(model, length=9)
    (short,) = read.of_answer("q", "a long answer")
    assert len(short.tokens) == 9 and read.cut == 1 and read.left_out == 0
    assert read.of_answer("a long prompt", "w") == [] and read.left_out == 1


def test_a_batch_has_the_targets_of_its_rows() -> None:
    batch = collate([(7, TrainingRow([5, 6, 7, 8], 2)), (3, TrainingRow([1, 2], 1, 0.5))])
    assert batch.tokens.tolist() == [[5, 6, 7, 1]] and batch.lengths.tolist() == [3, 1]
    assert batch.targets.tolist() == [IGNORE_INDEX, 7, 8, 2]
    assert batch.weights.tolist() == [1, 1, 1, 0.5] and batch.rows == (7, 3)


def train(model: Path, out: Path, *more: object) -> Result:
    return CliRunner().invoke(app, ["train", str(model), str(out), *map(str, more)])


FEW = ("--steps", 3, "--batch", 2, "--length", 48, "--rate", 0.01)


@pytest.mark.skipif("cpu" not in BACKENDS, reason="quire._native is not built")
@pytest.mark.parametrize("method", METHODS)
def test_a_command_trains_and_what_it_writes_is_served(method: str, model: Path, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = train(model, out, "--data", text, *FEW, "--method", method, "--checkpointing", "--paged")
    assert result.exit_code == 0, result.output or result.exception
    assert f"{out}: {method}, 3 steps, loss " in result.output and not work_folder(out).exists()
    params = SamplingParams(max_tokens=4, temperature=0.0)
    prompts = [{"prompt_token_ids": [70, 71, 72, 73]}]
    if method in ("lora", "qlora"):
        assert train(model, tmp_path / "merged", "--merge", out).exit_code == 0
        assert json.loads((out / "adapter_config.json").read_text())["base_model_name_or_path"] == str(model)
        with LLM(model, enable_lora=True, dtype="float32", num_blocks=64) as llm:
            adapted = llm.generate(prompts, params, use_tqdm=False, lora_request=LoRARequest("one", 1, str(out)))
        out = tmp_path / "merged"
    with LLM(out, dtype="float32", num_blocks=64) as llm:
        found = llm.generate(prompts, params, use_tqdm=False)
        assert llm.get_tokenizer().vocab_size == Tokenizer.from_folder(model).vocab_size
    if method in ("lora", "qlora"):
        assert found[0].outputs[0].token_ids == adapted[0].outputs[0].token_ids


@pytest.mark.slow
@pytest.mark.skipif("cpu" not in BACKENDS, reason="quire._native is not built")
def test_qlora_teaches_facts_that_are_served(tmp_path: Path) -> None:
    """Through the embedded model's chat template, on a base of codes, answered by the adapter as it is served."""
    facts = {f"What does frob_{i}() return?": f"It returns {1000 + 637 * i % 9000}." for i in range(8)}
    data, out = tmp_path / "facts.jsonl", tmp_path / "out"
    data.write_text("".join(json.dumps({"prompt": q, "completion": a}) + "\n" for q, a in facts.items()))
    words = ["train", "pydoc", str(out), "--data", str(data), "--method", "qlora", "--steps", "80", "--batch", "8"]
    assert CliRunner().invoke(app, [*words, "--length", "64", "--rate", "4e-3"]).exit_code == 0
    params = SamplingParams(max_tokens=24, temperature=0.0)
    with LLM("pydoc", enable_lora=True) as llm:
        prompts = [{"prompt_token_ids": llm.chat_template.encode([{"role": "user", "content": q}])} for q in facts]
        before, after = (
            [o.outputs[0].text.strip() for o in llm.generate(prompts, params, use_tqdm=False, lora_request=lora)]
            for lora in (None, LoRARequest("facts", 1, str(out)))
        )
    assert after == list(facts.values()) and not set(before) & set(after)


def options(text: Path, **more: Any) -> TrainOptions:
    return TrainOptions(data=(str(text),), steps=4, batch=2, length=48, rate=0.01, **more)


@pytest.mark.parametrize(
    "more", [{"method": "qlora", "paged": True}, {"method": "full"}, {"layers": 1, "method": "qat"}]
)
def test_a_run_goes_on_as_if_it_had_not_stopped(more: dict[str, Any], model: Path, text: Path, tmp_path: Path) -> None:
    def quiet(*_: object) -> None:
        pass

    def stop(step: int, loss: float) -> None:
        if step == 2:
            raise KeyboardInterrupt

    whole, given = prepare(str(model), tmp_path / "a", options(text, **more), quiet), options(text, **more)
    whole.run.go(quiet)
    whole.write()
    cut = prepare(str(model), tmp_path / "b", given, quiet)
    with pytest.raises(KeyboardInterrupt):
        cut.run.go(stop)
    assert not (tmp_path / "b").exists()
    rest = prepare(str(model), tmp_path / "b", given, quiet)
    assert rest.run.step == 2
    rest.run.go(quiet)
    rest.write()
    assert rest.run.losses == whole.run.losses
    (name,) = (p.name for p in (tmp_path / "a").glob("*.safetensors"))
    one, two = (load_file(tmp_path / where / name) for where in "ab")
    assert one.keys() == two.keys() and all(torch.equal(one[n], two[n]) for n in one)


def test_ctrl_c_leaves_a_state_and_no_traceback(
    model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from quire.compress.train.objective import NetLearner

    backward = NetLearner.backward

    def interrupted(self: NetLearner, step: int) -> float:
        if step == 2:
            raise KeyboardInterrupt
        return backward(self, step)

    command = ("--data", text, *FEW)
    monkeypatch.setattr(NetLearner, "backward", interrupted)
    assert train(model, tmp_path / "out", *command).exit_code == 130
    assert (work_folder(tmp_path / "out") / "state.safetensors").is_file()
    monkeypatch.undo()
    other = train(model, tmp_path / "out", *command, "--alpha", 3)
    assert "is of a run with other options" in str(other.exception)
    again = train(model, tmp_path / "out", *command)
    assert again.exit_code == 0 and "lora, 3 steps" in again.output


@pytest.mark.parametrize(
    "more",
    [
        ("--loss", "js", "--hidden", 0.5),
        ("--loss", "reverse-kl", "--top", 8, "--temperature", 2),
        ("--share", 0.5, "--temperature", 2),
    ],
)
def test_a_student_learns_of_a_teacher(more: tuple[object, ...], model: Path, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    ways = ("--method", "full", "--teacher", model, "--layers", 1, *more)
    result = train(model, out, "--data", text, *FEW, *ways)
    assert result.exit_code == 0, result.output or result.exception
    assert json.loads((out / "config.json").read_text())["num_hidden_layers"] == 1
    anew = train(model, tmp_path / "new", "--data", text, *FEW, *ways[:4], "--student", "hidden_size=16", *more)
    assert anew.exit_code == 0, anew.output or anew.exception
    assert load_file(tmp_path / "new" / "model.safetensors")["model.norm.weight"].shape == (16,)


def test_a_teacher_writes_what_is_learned(model: Path, tmp_path: Path) -> None:
    prompts, out, done = ["one", "two", "three"], tmp_path / "said.jsonl", list[int]()
    params = SamplingParams(max_tokens=6, temperature=0.0)
    with LLM(model, **OPTIONS) as llm:
        write_answers(llm, prompts, out, params, True, done.append)
        entries = [json.loads(line) for line in out.read_text().splitlines()]
        assert [e["prompt"] for e in entries] == prompts and done == [0, 3]
        first = [{"role": "user", "content": f"one\n{REASONING_PROMPT}"}]
        reason = llm.chat([first], params, use_tqdm=False)[0].outputs[0].text.strip()
        more = [*first, {"role": "assistant", "content": reason}, {"role": "user", "content": ANSWER_PROMPT}]
        answer = llm.chat([more], params, use_tqdm=False)[0].outputs[0].text.strip()
        assert entries[0] == {"prompt": "one", "completion": answer, "rationale": reason}
        part = tmp_path / "other.part"
        part.write_text("".join(json.dumps(e) + "\n" for e in [{**entries[0], "completion": "kept"}]) + '{"prompt": "t')
        write_answers(llm, prompts, tmp_path / "other.jsonl", params, True, done.append)
        again = [json.loads(line) for line in (tmp_path / "other.jsonl").read_text().splitlines()]
        assert [e["completion"] for e in again] == ["kept", *(e["completion"] for e in entries[1:])]
        part.write_text(json.dumps(entries[1]) + "\n")
        with pytest.raises(ConfigError, match="line 1 is of other prompts or options"):
            write_answers(llm, prompts, tmp_path / "other.jsonl", params, True, done.append)
    (tmp_path / "prompts.txt").write_text("one\n\ntwo\n")
    assert read_prompts(tmp_path / "prompts.txt") == ["one", "two"]


def test_a_teachers_texts_are_trained_on(model: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "one"}\n{"prompt": "two"}\n')
    ways = ("--teacher", model, "--loss", "text", "--rationales", 0.5, "--max-tokens", 6)
    result = train(model, tmp_path / "out", "--data", prompts, *FEW[:4], "--length", 120, *ways)
    assert result.exit_code == 0, result.output or result.exception


BAD: dict[str, tuple[tuple[object, ...], str]] = {
    "no data": ((), "--data FILE is needed"),
    "method": (("--data", "x", "--method", "dream"), "--method 'dream' is not one of lora, qlora, qat, full"),
    "targets": (("--data", "{text}", "--targets", "wq"), "--targets 'wq' matches no matrix of tiny"),
    "length": (("--data", "{text}", "--length", 500), "--length 500: tiny has 128 positions"),
    "file": (("--data", "/nowhere/x"), "--data /nowhere/x: cannot be read as UTF-8 text"),
    "steps": (("--data", "x", "--steps", 0), "--steps 0 must be at least 1"),
    "share": (("--data", "x", "--share", 2), r"--share 2.0 must lie in \[0, 1\]"),
    "alpha": (("--data", "x", "--alpha", 0), "--alpha 0.0 must be more than 0"),
    "hidden": (("--data", "x", "--hidden", 1), "--hidden has no effect: there is no --teacher MODEL; leave it out"),
    "text": (("--data", "x", "--loss", "text"), "--loss has no effect: there is no --teacher MODEL"),
    "bits": (("--data", "x", "--bits", 8), "--bits has no effect: --method lora has none"),
    "rank": (("--data", "x", "--method", "full", "--rank", 8), "--rank has no effect: --method full has none"),
    "written": (("--data", "x", "--teacher", "t", "--max-tokens", 8), "--max-tokens has no effect: the teacher of"),
    "probabilities": (
        ("--data", "x", "--teacher", "t", "--loss", "text", "--top", 8),
        "--top has no effect: --loss text",
    ),
    "merged": (("--merge", "x", "--steps", 8), "--steps has no effect: --merge trains nothing; leave it out"),
    "top": (("--data", "x", "--teacher", "t", "--top", 2, "--hidden", 1), "--top keeps no hidden states"),
    "both": (("--data", "x", "--layers", 1, "--student", "a=1"), "--layers and --student are two ways to begin"),
    "new": (("--data", "x", "--layers", 1), "--method lora needs MODEL as it is; give --method full"),
    "layers": (("--data", "{text}", "--layers", 9, "--method", "full"), "--layers 9: the teacher has 2"),
    "field": (("--data", "{text}", "--student", "a", "--method", "full"), "--student 'a' is not FIELD=VALUE"),
    "merge": (("--merge", "/nowhere"), "/nowhere"),
    "rate": (("--data", "{text}", "--length", 48, "--rate", 1e30), "the loss is nan at step|the loss is inf at step"),
    "group": (("--data", "{text}", "--method", "qat", "--group-size", 128), "not a multiple of --group-size 128"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_trained_says_why(case: str, model: Path, text: Path, tmp_path: Path) -> None:
    words, why = BAD[case]
    result = train(model, tmp_path / "out", *(str(w).format(text=text) for w in words))
    assert result.exception is not None and "\n" not in str(result.exception)
    assert result.exception.__class__.__name__ in ("ConfigError", "ModelError"), result.exception
    assert re.search(why, str(result.exception)), result.exception
    assert not (tmp_path / "out").exists()


GARBAGE = {
    "[": "is not JSON",
    "[1]": 'is not an object; needs "text"',
    "{}": 'or "messages", has nothing',
    '{"prompt": "x"}': "has prompt",
    '{"messages": [{"role": "king"}, {"role": "assistant", "content": "x"}]}': r"messages\[0\]\.role: must be one of",
    '{"messages": []}': "--data holds nothing to learn",
}


@pytest.mark.parametrize("line", GARBAGE)
def test_a_file_of_garbage_says_where(line: str, model: Path, tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(f"\n{line}\n")
    result = train(model, tmp_path / "out", "--data", path)
    where = "" if "nothing to learn" in GARBAGE[line] else "line 2: .*"
    assert re.search(where + GARBAGE[line], str(result.exception)), result.exception


@pytest.mark.parametrize(
    "more", [(), ("--paged",), ("--layers", 1, "--method", "full"), ("--teacher", "{model}", "--top", 2)]
)
def test_a_place_that_cannot_be_written_is_named(
    more: tuple[object, ...], model: Path, text: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    words = (str(w).format(model=model) for w in more)
    result = train(model, tmp_path / "file" / "out", "--data", text, *FEW[:4], "--length", 48, *words)
    assert isinstance(result.exception, ConfigError), result.exception
    assert re.search(r"/file\S* cannot be written: .*(give another|nothing of it was kept)", str(result.exception))


def test_what_another_run_left_is_not_taken(model: Path, text: Path, tmp_path: Path) -> None:
    def quiet(*_: object) -> None:
        pass

    for layers in (1, 2):
        job = prepare(str(model), tmp_path / "out", options(text, layers=layers, method="full"), quiet)
        assert job.net.spec.layers == layers and job.run.step == 0


def test_what_is_there_is_not_written_over(model: Path, text: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "x").write_text("")
    assert "out is there already" in str(train(model, tmp_path / "out", "--data", text).exception)
