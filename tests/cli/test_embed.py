"""`quire embed`: files of vectors, a run that goes on where it was cut off, and files that are refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest

from command_line import Run, run
from encoder_models import write_encoder, write_splade, write_tokenizer
from quire import LLM, PoolingParams
from quire.cli import embed_texts as command
from quire.ops.native import load_native

assert run
pytestmark = pytest.mark.skipif(load_native() is None, reason="quire._native is not built")
TEXTS = ["the cat sat on a mat.", "", "how many live in berlin?", "a cat", "  many \t mats", "in berlin"] * 2
LONG = "in berlin live many " * 60


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("encoder")
    write_encoder(made, "bert")
    write_tokenizer(made)
    (made / "config_sentence_transformers.json").write_text(json.dumps({"prompts": {"query": "query: "}}))
    return made


def wanted(folder: Path, texts: list[str], **params: Any) -> np.ndarray[Any, Any]:
    with LLM(folder, device="cpu", num_blocks=512) as llm:
        found = llm.embed(texts, PoolingParams(**params), use_tqdm=False)
    return np.array([each.outputs.embedding for each in found], np.float32)


def read(path: Path) -> tuple[list[str], np.ndarray[Any, Any]]:
    if path.suffix == ".parquet":
        table = pyarrow.parquet.read_table(path).to_pydict()
        return table["text"], np.array(table["embedding"], np.float32)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [each["text"] for each in lines], np.array([each["embedding"] for each in lines], np.float32)


def embed(run: Run, folder: Path, *words: Any) -> tuple[int, str, str]:
    return run("embed", *map(str, words), "-m", str(folder), "--device", "cpu", "--num-blocks", "512", "-q")


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl", ".npy"])
def test_vectors_are_those_of_llm(run: Run, folder: Path, tmp_path: Path, suffix: str) -> None:
    source, target = tmp_path / "in.txt", tmp_path / f"out{suffix}"
    source.write_text("\n".join(TEXTS) + "\n")
    code, out, err = embed(run, folder, source, "-o", target, "--batch-size", "5")
    assert (code, out) == (0, f"12 vectors of 64 numbers are in {target}\n"), err
    want = wanted(folder, TEXTS)
    if suffix == ".npy":
        assert np.array_equal(np.load(target), want)
    else:
        texts, found = read(target)
        assert texts == TEXTS and np.array_equal(found, want)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.txt", target.name]


@pytest.mark.parametrize("piped", [False, True], ids=["in this process", "piped"])
def test_texts_of_standard_input(run: Run, folder: Path, tmp_path: Path, piped: bool) -> None:
    source, target = "\n".join(TEXTS).encode(), tmp_path / "out.npy"
    words = ["embed", "-", "-o", str(target), "-m", str(folder), "--device", "cpu", "--num-blocks", "512", "-q"]
    if piped:
        code = "import sys; sys.argv = ['quire', *sys.argv[1:]]; from quire.cli import main; main()"
        made = subprocess.run([sys.executable, "-c", code, *words], input=source, capture_output=True)
        assert made.returncode == 0, made.stderr
        out = made.stdout.decode()
    else:
        ended, out, err = run(*words, stdin=source)
        assert ended == 0, err
    assert out == f"12 vectors of 64 numbers are in {target}\n"
    assert np.array_equal(np.load(target), wanted(folder, TEXTS))
    assert [path.name for path in tmp_path.iterdir()] == [target.name]


def test_objects_of_standard_input(run: Run, folder: Path, tmp_path: Path) -> None:
    source, target = "".join(json.dumps({"body": text}) + "\n" for text in TEXTS).encode(), tmp_path / "out.jsonl"
    flags = ("-", "-o", str(target), "--field", "body", "-m", str(folder), "--device", "cpu", "--num-blocks", "512")
    code, _, err = run("embed", *flags, "-q", stdin=source)
    assert code == 0, err
    texts, found = read(target)
    assert texts == TEXTS and np.array_equal(found, wanted(folder, TEXTS))
    target.unlink()
    for wrong, words in ((b"", "standard input has no texts"), (b"[]\n", "standard input: line 1 is no JSON object")):
        code, _, err = run("embed", *flags, stdin=wrong)
        assert code in (1, 2) and words in err and not list(tmp_path.iterdir())


def test_sparse_vectors_are_refused(run: Run, tmp_path: Path) -> None:
    (made := tmp_path / "model").mkdir()
    write_splade(made, "bert")
    write_tokenizer(made)
    (tmp_path / "in.txt").write_text("a\n")
    code, _, err = embed(run, made, tmp_path / "in.txt", "-o", tmp_path / "out.jsonl")
    assert code in (1, 2) and "LLM.embed_sparse" in err and not (tmp_path / "out.jsonl").exists()


def test_options_of_vectors(run: Run, folder: Path, tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps({"id": i, "body": text}) + "\n" for i, text in enumerate([*TEXTS, LONG])))
    flags = ("--field", "body", "--prompt-name", "query", "--dimensions", "8", "--no-normalize", "--truncate")
    code, _, err = embed(run, folder, source, "-o", target, *flags)
    assert code == 0, err
    texts, found = read(target)
    assert texts == [*TEXTS, LONG]
    want = wanted(folder, TEXTS, prompt_name="query", dimensions=8, normalize=False)
    assert np.array_equal(found[:-1], want)


def test_a_run_that_was_cut_off_goes_on(
    run: Run, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = tmp_path / "in.txt", tmp_path / "out.npy"
    source.write_text("\n".join(TEXTS))
    make, asked = command._vectors, list[int]()

    def cut(llm: LLM, batch: Any, *more: Any) -> Any:
        if len(asked) == 2:
            raise KeyboardInterrupt
        asked.append(batch[0])
        return make(llm, batch, *more)

    monkeypatch.setattr(command, "_vectors", cut)
    code, _, err = embed(run, folder, source, "-o", target, "--batch-size", "4")
    assert (code, asked) == (130, [1, 5]) and "the same command goes on" in err
    assert not target.exists()
    asked.clear()
    code, out, err = embed(run, folder, source, "-o", target, "--batch-size", "4")
    assert code == 0 and "8 of them from an earlier run" in out, err
    assert asked == [9]
    assert np.array_equal(np.load(target), wanted(folder, TEXTS))


@pytest.mark.parametrize(
    ("data", "flags", "words"),
    [
        (b"a\n\xff\n", (), "line 2 is no UTF-8 text"),
        (b"", (), "has no texts"),
        (f"a\n{LONG}\n".encode(), (), "line 2 has"),
        (b"{}\n", ("--field", "text"), "line 1 has no text as 'text'"),
        (b"[]\n", ("--field", "text"), "line 1 is no JSON object"),
        (b"a\n", ("--dimensions", "99"), "dimensions: must lie in"),
        (b"a\n", ("--prompt-name", "other"), "this model has no prompt"),
        (b"a\n", ("--batch-size", "0"), "--batch-size 0"),
    ],
    ids=range(8),
)
def test_what_is_refused(
    run: Run, folder: Path, tmp_path: Path, data: bytes, flags: tuple[str, ...], words: str
) -> None:
    (tmp_path / "in.txt").write_bytes(data)
    code, _, err = embed(run, folder, tmp_path / "in.txt", "-o", tmp_path / "out.jsonl", *flags)
    assert code in (1, 2) and words in err
    assert [path.name for path in tmp_path.iterdir()] == ["in.txt"]


def test_files_that_cannot_be(run: Run, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "in.txt").write_text("a\n")
    for source, target, words in (
        ("none.txt", "out.npy", "no such file"),
        ("in.txt", "out.csv", "must end with .parquet, .jsonl, .npy"),
        ("in.txt", "none/out.npy", "there is no folder"),
    ):
        code, _, err = embed(run, folder, tmp_path / source, "-o", tmp_path / target)
        assert code == 2 and words in err
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    code, _, err = embed(run, folder, tmp_path / "in.txt", "-o", tmp_path / "out.parquet")
    assert code == 2 and "pip install 'quire[records]'" in err
