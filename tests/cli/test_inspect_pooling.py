"""`quire inspect` tells how encoders make vectors and classes."""

from __future__ import annotations

import json
from pathlib import Path

from command_line import Run, run
from encoder_models import write_encoder

assert run


def shown(run: Run, folder: Path) -> dict[str, str]:
    code, out, err = run("inspect", str(folder), "--device", "cpu", "--num-blocks", "64", "--json")
    assert code == 0, err
    found: dict[str, str] = json.loads(out)["vectors"]
    return found


def test_an_encoder_says_how_it_makes_vectors(run: Run, tmp_path: Path) -> None:
    write_encoder(tmp_path, "bert")
    said = {"prompts": {"query": "query: ", "document": ""}, "default_prompt_name": "query"}
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(said))
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 100}))
    assert shown(run, tmp_path) == {
        "tokens that one sees": "those before and behind it",
        "pooling": "the mean of all tokens",
        "vector": "64 numbers, of length 1",
        "longest text": "100 tokens",
        "prompt query": "'query: ' (the usual one)",
        "prompt document": "''",
    }


def test_a_classifier_says_its_classes(run: Run, tmp_path: Path) -> None:
    write_encoder(tmp_path, "bert", "ForSequenceClassification", num_labels=2)
    found = shown(run, tmp_path)
    assert found["classes"] == "LABEL_0, LABEL_1" and found["pairs"] == "as the tokenizer joins them"
    assert found["longest text"] == "140 tokens"
