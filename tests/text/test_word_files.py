"""Folders with vocab.json and merges.txt or vocab.txt, flags of tokenizer_config.json, chat_template.json."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers, processors
from transformers import AutoTokenizer, BertTokenizer, GPT2Tokenizer, RobertaTokenizer

from quire.compress.layouts.gguf_vocab import vocabulary
from quire.core.errors import ModelError
from quire.text.template import ChatTemplate
from quire.text.tokenizer import Tokenizer
from text_models import PYDOC, sentencepiece_folder
from text_tokenizers import KINDS, texts

SPECIAL = ("<|endoftext|>", "<s>", "</s>", "<unk>", "<pad>", "<mask>")
NONE: dict[str, Any] = {}


def backend_of(kind: str, folder: Path) -> Any:
    return KINDS[kind](folder)._backend


def byte_level_folder(folder: Path, config: dict[str, Any], model_type: str = "gpt2") -> Path:
    """A folder as GPT-2's, OPT's or BART's of old: no tokenizer.json."""
    state = json.loads(backend_of("byte-level with a space", folder).to_str())["model"]
    table = {token: i for i, token in enumerate([*SPECIAL, *state["vocab"]])}
    (folder / "vocab.json").write_text(json.dumps(table, ensure_ascii=False))
    merges = ["#version: 0.2", *(" ".join(pair) for pair in state["merges"])]
    (folder / "merges.txt").write_text("\n".join(merges) + "\n")
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    if config:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


OPT = {"bos_token": {"__type": "AddedToken", "content": "</s>", "normalized": True}, "eos_token": "</s>",
       "unk_token": "</s>", "pad_token": "<pad>", "add_bos_token": True,
       "tokenizer_class": "GPT2Tokenizer"}  # fmt: skip
BYTE_LEVEL: dict[str, tuple[Any, dict[str, Any]]] = {
    "GPT-2": (GPT2Tokenizer, {"model_max_length": 1024}),
    "GPT-J": (GPT2Tokenizer, {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": False, "errors": "replace"}),
    "GPT-2 with a space": (GPT2Tokenizer, {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": True}),
    "OPT": (GPT2Tokenizer, OPT),
    "BART": (RobertaTokenizer, {"tokenizer_class": "BartTokenizer"}),
    "RoBERTa": (RobertaTokenizer, {"tokenizer_class": "RobertaTokenizer", "add_prefix_space": True}),
}


@pytest.mark.parametrize("name", BYTE_LEVEL)
def test_byte_level_vocabularies_are_as_in_transformers(name: str, tmp_path: Path) -> None:
    kind, config = BYTE_LEVEL[name]
    folder = byte_level_folder(tmp_path, config)
    size = len(json.loads((folder / "vocab.json").read_text()))
    (folder / "added_tokens.json").write_text(json.dumps({"<|extra|>": size}))
    ours, theirs = Tokenizer.from_folder(folder), kind.from_pretrained(folder)
    for text in [*texts()[::4], "a <|extra|>b</s>", "<|endoftext|>x <mask>", ""]:
        for special in (True, False):
            want = theirs(text, add_special_tokens=special)["input_ids"]
            assert ours.encode(text, add_special_tokens=special) == want, (text, special)
        assert ours.decode(want) == theirs.decode(want, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert (ours.bos_id, ours.eos_id) == (theirs.bos_token_id, theirs.eos_token_id)


def test_bart_is_known_by_its_model_type(tmp_path: Path) -> None:
    ours = Tokenizer.from_folder(byte_level_folder(tmp_path, NONE, "bart"))
    assert ours.encode("x")[0] == ours.bos_id == 1 and ours.encode("x")[-1] == ours.eos_id == 2


@pytest.mark.parametrize("lower", [True, False])
def test_word_piece_vocabularies_are_as_in_transformers(lower: bool, tmp_path: Path) -> None:
    table = backend_of("WordPiece", tmp_path).get_vocab(with_added_tokens=False)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *sorted(t for t in table if t != "[UNK]")]
    (tmp_path / "vocab.txt").write_text("\n".join(words) + "\n")
    config = {"tokenizer_class": "BertTokenizer", "do_lower_case": lower}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    ours, theirs = Tokenizer.from_folder(tmp_path), BertTokenizer.from_pretrained(tmp_path)
    for text in [*texts()[::4], "Große Äpfel [MASK] x[SEP]", ""]:
        assert ours.encode(text) == theirs(text)["input_ids"], text
    pair = theirs("one text", "and another")
    assert ours.encode_pair("one text", "and another") == (pair["input_ids"], pair["token_type_ids"].index(1))


@pytest.mark.parametrize("name", ["BART", "RoBERTa"])
def test_pairs_of_byte_level_vocabularies(name: str, tmp_path: Path) -> None:
    kind, config = BYTE_LEVEL[name]
    folder = byte_level_folder(tmp_path, config)
    want = kind.from_pretrained(folder)("one text", "and another")["input_ids"]
    assert Tokenizer.from_folder(folder).encode_pair("one text", "and another") == (want, 0)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"vocab.json": '{"a": -1}', "merges.txt": ""}, "must map"),
        ({"vocab.json": '{"a</w>": 0}', "merges.txt": ""}, "no vocabulary of byte-level BPE"),
        ({"vocab.json": '{"\u0120": 0}', "merges.txt": "a b c\n"}, r"merges\.txt.*two tokens"),
        ({"vocab.json": '{"\u0120": 0}', "merges.txt": "a b\n"}, r"vocab\.json"),
        ({"vocab.json": "[]", "merges.txt": ""}, "not a JSON object"),
        ({"vocab.json": "{}"}, r"tokenizer\.json is missing"),
    ],
)
def test_malformed_files_are_named(files: dict[str, str], message: str, tmp_path: Path) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(ModelError, match=message):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("kind", ["GPT2Tokenizer", "GPT2TokenizerFast"])
def test_prefix_space_of_the_config(kind: str, tmp_path: Path) -> None:
    shutil.copy(PYDOC / "tokenizer.json", tmp_path)
    backend = Backend(models.BPE({c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.save(str(tmp_path / "tokenizer.json"))
    for wanted in (True, False):
        config = {"tokenizer_class": kind, "add_prefix_space": wanted}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        theirs = AutoTokenizer.from_pretrained(tmp_path)("x y", add_special_tokens=False)["input_ids"]
        assert Tokenizer.from_folder(tmp_path).encode("x y") == theirs
        assert len(theirs) == 3 + wanted


BOS, EOS = ("<s>", 1), ("</s>", 2)
AROUND: dict[str, tuple[Any, list[int], list[int]]] = {
    "none": (None, [], []),
    "byte level": (processors.ByteLevel(), [], []),
    "before": (processors.TemplateProcessing("<s> $A", special_tokens=[BOS]), [1], []),
    "both": (processors.TemplateProcessing("<s> $A </s>", special_tokens=[BOS, EOS]), [1], [2]),
    "sequence": (
        processors.Sequence([processors.ByteLevel(), processors.TemplateProcessing("<s> $A", special_tokens=[BOS])]),
        [1],
        [],
    ),
    "roberta": (processors.RobertaProcessing(EOS, BOS), [1], [2]),
    "bert": (processors.BertProcessing(EOS, BOS), [1], [2]),
}


@pytest.mark.parametrize("name", AROUND)
@pytest.mark.parametrize(("bos", "eos"), [*itertools.product((None, True, False), repeat=2)])
def test_an_absent_flag_keeps_what_tokenizer_json_does(
    name: str, bos: bool | None, eos: bool | None, tmp_path: Path
) -> None:
    folder = sentencepiece_folder(tmp_path)
    processor, before, after = AROUND[name]
    state = json.loads((folder / "tokenizer.json").read_text())
    state["post_processor"] = None if processor is None else json.loads(processor.__getstate__())
    (folder / "tokenizer.json").write_text(json.dumps(state))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config |= {k: v for k, v in (("add_bos_token", bos), ("add_eos_token", eos)) if v is not None}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    ours, theirs = Tokenizer.from_folder(folder), AutoTokenizer.from_pretrained(folder)
    bare = theirs("hello", add_special_tokens=False)["input_ids"]
    assert theirs("hello")["input_ids"] == [*before, *bare, *after]  # the flags are nothing to it
    before = before if bos is None else [1] if bos else []
    after = after if eos is None else [2] if eos else []
    assert ours.encode("hello") == [*before, *bare, *after]


def test_chat_template_json_is_read(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(PYDOC)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))
    assert ChatTemplate.from_folder(tmp_path, tokenizer) is None
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "[{{ messages[0]['content'] }}]"}))
    found = ChatTemplate.from_folder(tmp_path, tokenizer)
    assert found is not None and found.render([{"role": "user", "content": "hi"}]) == "[hi]"
    named = {"default": "{{ messages[0]['content'] }}!", "tool_use": "tools"}
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": named}))
    found = ChatTemplate.from_folder(tmp_path, tokenizer)
    assert found is not None and found.render([{"role": "user", "content": "hi"}]) == "hi!"
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": 3}))
    with pytest.raises(ModelError, match=r"chat_template\.json"):
        ChatTemplate.from_folder(tmp_path, tokenizer)


def test_a_vocabulary_of_words_goes_into_gguf(tmp_path: Path) -> None:
    folder = byte_level_folder(tmp_path, {"chat_template": "a", "eos_token": "</s>"})
    size = len(json.loads((folder / "vocab.json").read_text()))
    found = vocabulary(folder, size, 1, (2,))
    assert found["tokenizer.ggml.model"] == "gpt2" and len(found["tokenizer.ggml.tokens"]) == size
    assert found["tokenizer.chat_template"] == "a"
