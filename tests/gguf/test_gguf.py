"""GGUF files: families, number formats, mixed files, metadata, and how broken ones are refused."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from often import one_of
from quire.ops.arrays import to_numpy

gguf = pytest.importorskip("gguf", reason="the gguf package writes the test files; it is in the dev extra")

from gguf.constants import GGMLQuantizationType as Type  # noqa: E402

from gguf_families import FAMILIES, WIDE  # noqa: E402
from gguf_models import random_blocks, write_gguf  # noqa: E402
from oracle import BACKENDS, backend, logits, relative_error  # noqa: E402
from paged_model import Paged, prompt  # noqa: E402
from quire.core.config import flat_config  # noqa: E402
from quire.core.errors import ConfigError, ModelError  # noqa: E402
from quire.engine.local import LocalEngine  # noqa: E402
from quire.gguf.file import GgufFile  # noqa: E402
from quire.model.build import Model, load_model  # noqa: E402
from quire.model.describe import describe, open_model  # noqa: E402
from quire.model.load.packed_writing import finish_all  # noqa: E402
from quire.model.net.parts import Embedding  # noqa: E402
from quire.ops.choice import choose  # noqa: E402
from quire.ops.weights import PackedTable  # noqa: E402
from quire.plan.needs import weights_of  # noqa: E402
from quire.quant.gguf import TYPES as ALL_TYPES  # noqa: E402
from quire.quant.gguf import Block  # noqa: E402
from torch_weights import load_torch  # noqa: E402

TYPES = {name: kind for name, kind in ALL_TYPES.items() if name not in ("Q1_0", "Q2_0", "Q8_1", "Q8_K")}
"""Those that the package reads; the others are in test_gguf_types.py."""


def load(path: Path, name: str = "reference", **options: Any) -> Model:
    return load_model(flat_config(model=str(path), **options), backend(name))


def whole(model: Model, tokens: list[int]) -> torch.Tensor:
    return Paged(model, [tokens]).run([[len(tokens)]])[0]


@pytest.mark.sampled(10)
@pytest.mark.parametrize("name", FAMILIES)
def test_families_equal_transformers(name: str, tmp_path: Path) -> None:
    kind, facts = FAMILIES[name]
    oracle = write_gguf(tmp_path / "model.bin", kind, **facts)
    model = load(tmp_path / "model.bin")
    tokens = prompt(19, 1)
    assert relative_error(whole(model, tokens), logits(oracle, tokens)) <= 1e-5
    assert model.eos_token_ids == (2,) and model.bos_token_id == 1 and model.name == "model"


@pytest.mark.parametrize("name", TYPES)
def test_numbers_equal_those_of_the_gguf_package(name: str) -> None:
    kind = Type[name]
    raw = random_blocks((5, 768), kind, seed=3)
    want = gguf.quants.dequantize(raw, kind)
    weight = load_torch(Block(TYPES[name]), {name: torch.from_numpy(raw)}, torch.float32)
    assert np.array_equal(weight.dequantize().numpy(), want)
    assert weight.shape == want.shape and weight.weight.codes.dtype == torch.int8


@pytest.mark.sampled(5)
@pytest.mark.parametrize("device", BACKENDS)
@pytest.mark.parametrize("name", one_of(3, TYPES))
def test_quantized_files(name: str, device: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    oracle = write_gguf(path, quantize=lambda tensor: Type[name], **WIDE)
    model, tokens = load(path, device, dtype="float32"), prompt(19, 1)
    assert describe(str(path)).scheme == f"gguf {name}" and describe(str(path)).dtype.name == "bfloat16"
    assert relative_error(whole(model, tokens), logits(oracle, tokens)) <= 0.05  # activations are rounded to int8
    model = load(path, device, dtype="float32", activations="int16")
    assert relative_error(whole(model, tokens), logits(oracle, tokens)) <= 1e-3


@pytest.mark.parametrize("device", BACKENDS)
def test_what_a_file_is_may_be_said_and_is_reported(device: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, quantize=lambda tensor: Type.Q4_0, **WIDE)
    options = {"model": str(path), "device": device, "num_blocks": 8}
    assert LocalEngine(flat_config(**options, quantization="gguf")).info.quantization == "gguf Q4_0"
    with pytest.raises(ConfigError, match="--quantization awq: the model's files are gguf"):
        LocalEngine(flat_config(**options, quantization="awq"))


@pytest.mark.sampled(5)
@pytest.mark.skipif("cpu" not in BACKENDS, reason="quire._native was not built")
@pytest.mark.parametrize("name", TYPES)
def test_gguf_tables_stay_packed_and_give_the_same_bits(name: str, tmp_path: Path) -> None:
    path, tied = tmp_path / "model.gguf", name in ("Q4_0", "Q6_K", "MXFP4")
    write_gguf(path, quantize=lambda tensor: Type[name], **WIDE, tie_word_embeddings=tied)
    config = flat_config(model=str(path), cache_packed=str(tmp_path))
    made = load_model(config, backend("cpu"))
    source = open_model(str(path)).source
    widened = load_torch(Block(TYPES[name]), {name: source.tensor(f"token_embd.{name}")}, torch.float32).dequantize()
    decoder: Any = made.decoder
    assert isinstance(decoder.embed.table, PackedTable)
    assert (decoder.head.weight is decoder.embed.table.matrix) == tied
    tokens = prompt(19, 1)
    before = whole(replace(made, decoder=replace(decoder, embed=Embedding(to_numpy(widened.bfloat16())))), tokens)
    assert torch.equal(whole(made, tokens), before)
    facts = describe(str(path))
    predicted = weights_of(config, facts, choose(config.device))
    assert bool(facts.notes) == (not Block(TYPES[name]).form.native)
    assert predicted == pytest.approx(made.weight_bytes, rel=0.05)  # rows are padded to 16
    finish_all()
    again: Any = load_model(config, backend("cpu"))
    assert isinstance(again.decoder.embed.table, PackedTable) and torch.equal(whole(again, tokens), before)


@pytest.mark.parametrize("device", BACKENDS)
def test_files_that_mix_formats(device: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    kinds = {"attn_v": Type.Q8_0, "attn_k": Type.Q5_0, "ffn_up": Type.F16, "output": None}

    def kind(name: str) -> Any:
        return next((kinds[part] for part in kinds if part in name), Type.Q4_0)

    oracle = write_gguf(path, quantize=kind, **WIDE | {"attention_bias": True})
    model, tokens = load(path, device, dtype="float32"), prompt(19, 1)
    assert describe(str(path)).scheme == "gguf Q4_0 + Q5_0 + Q8_0"
    assert relative_error(whole(model, tokens), logits(oracle, tokens)) <= 0.05


@pytest.mark.parametrize("device", BACKENDS)
@pytest.mark.parametrize("family", ["mixtral", "qwen2moe", "gpt-oss"])
def test_quantized_experts(family: str, device: str, tmp_path: Path) -> None:
    kind, facts = FAMILIES[family]
    formats = {"exps": Type.MXFP4, "shexp": Type.Q8_0, "attn_q": Type.Q4_1, "token_embd": Type.Q8_0, "output": None}
    path = tmp_path / "model.gguf"
    oracle = write_gguf(
        path, kind, lambda tensor: next((formats[f] for f in formats if f in tensor), Type.Q5_0), **facts
    )
    model, tokens = load(path, device, dtype="float32", activations="int16"), prompt(19, 1)
    assert model.report["expert_gate+expert_up"][0] == "table4 g32 a16"
    assert relative_error(whole(model, tokens), logits(oracle, tokens)) <= 1e-3


@pytest.mark.parametrize("name", ["F16", "BF16"])
def test_half_precision_files(name: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    oracle = write_gguf(path, quantize=lambda tensor: Type[name])
    tokens = prompt(19, 1)
    assert relative_error(whole(load(path, dtype="float32"), tokens), logits(oracle, tokens)) <= 1e-5
    assert load(path).dtype == {"F16": "float16", "BF16": "bfloat16"}[name]


def test_factors_of_rope_frequencies(tmp_path: Path) -> None:
    ropes = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 128, "factor": 1.0,
             "short_factor": [1.0 + i for i in range(8)], "long_factor": [1.0 + i for i in range(8)]}  # fmt: skip
    path = tmp_path / "model.gguf"
    factors = np.arange(1, 9, dtype=np.float32)
    oracle = write_gguf(
        path, rope_parameters=ropes, edit=lambda writer: writer.add_tensor("rope_freqs.weight", factors)
    )
    tokens = prompt(19, 1)
    assert relative_error(whole(load(path), tokens), logits(oracle, tokens)) <= 1e-5


def test_linear_rope_scaling(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    ropes = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
    oracle = write_gguf(path, rope_parameters=ropes, extra={"rope.scaling.type": "linear", "rope.scaling.factor": 4.0})
    tokens = prompt(19, 1)
    assert relative_error(whole(load(path), tokens), logits(oracle, tokens)) <= 1e-5


Edit = Callable[[bytearray], Any]


def put(form: str, at: int, value: Any) -> Edit:
    return lambda raw: struct.pack_into(form, raw, at, value)


def swap(old: bytes, new: bytes) -> Edit:
    def edit(raw: bytearray) -> None:
        at = raw.index(old)
        raw[at : at + len(old)] = new

    return edit


def after(name: bytes, form: str, skip: int, value: Any) -> Edit:
    """Write `value` at `skip` bytes after the first occurrence of `name`."""

    def edit(raw: bytearray) -> None:
        struct.pack_into(form, raw, raw.index(name) + len(name) + skip, value)

    return edit


BROKEN: dict[str, tuple[Edit, list[str]]] = {
    "version": (put("<I", 4, 1), ["version", "is 1"]),
    "big-endian": (put(">I", 4, 3), ["version", "big-endian"]),
    "tensors": (put("<Q", 8, 1 << 40), ["tensor count"]),
    "one tensor more": (put("<Q", 8, 32), ["model.gguf"]),
    "pairs": (put("<Q", 16, 1 << 60), ["metadata count", "truncated or damaged"]),
    "string length": (after(b"general.architecture", "<Q", 4, 1 << 62), ["general.architecture", "at most"]),
    "array length": (after(b"tokenizer.ggml.tokens", "<Q", 8, 1 << 61), ["tokenizer.ggml.tokens", "truncated"]),
    "array of arrays": (after(b"tokenizer.ggml.tokens", "<I", 4, 9), ["tokenizer.ggml.tokens", "array of arrays"]),
    "value type": (after(b"general.architecture", "<I", 0, 99), ["general.architecture", "99"]),
    "dimensions": (after(b"token_embd.weight", "<I", 0, 5), ["token_embd.weight", "5 dimensions"]),
    "shape": (after(b"token_embd.weight", "<Q", 4, 1 << 33), ["token_embd.weight", "truncated"]),
    "no numbers": (after(b"token_embd.weight", "<Q", 4, 0), ["token_embd.weight", "no number"]),
    "another shape": (after(b"token_embd.weight", "<Q", 12, 98), ["token_embd.weight", "[98, 64]", "[99, 64]"]),
    "type": (after(b"token_embd.weight", "<I", 20, 15), ["token_embd.weight", "Q8_K"]),
    "unknown type": (after(b"token_embd.weight", "<I", 20, 77), ["token_embd.weight", "77"]),
    "removed type": (after(b"token_embd.weight", "<I", 20, 31), ["token_embd.weight", "Q4_0_4_4"]),
    "no floats": (after(b"token_embd.weight", "<I", 20, 26), ["token_embd.weight", "floating-point"]),
    "offset": (after(b"token_embd.weight", "<Q", 24, 4), ["token_embd.weight", "alignment"]),
    "overlap": (after(b"output_norm.weight", "<Q", 16, 0), ["overlaps"]),
    "beyond the end": (after(b"output_norm.weight", "<Q", 16, 1 << 40), ["output_norm.weight", "truncated"]),
    "truncated data": (lambda raw: raw.__delitem__(slice(-64, None)), ["truncated", "download it again"]),
    "truncated header": (lambda raw: raw.__delitem__(slice(300, None)), ["truncated"]),
    "twice": (swap(b"blk.0.ffn_up.weight", b"blk.1.ffn_up.weight"), ["blk.1.ffn_up.weight", "twice"]),
    "key twice": (swap(b"llama.context_length", b"llama.attention.head_count"[:20]), ["model.gguf"]),
    "missing": (swap(b"blk.0.ffn_up.weight", b"blk.9.ffn_up.weight"), ["missing", "blk.0.ffn_up.weight", "role up"]),
    "architecture": (swap(b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0rwkv6"), ["general.architecture", "rwkv6"]),
    "layers": (after(b"llama.block_count", "<I", 4, 1), ["no role", "blk.1."]),
    "heads": (after(b"llama.attention.head_count_kv", "<I", 4, 3), ["num_key_value_heads", "must divide"]),
    "width": (after(b"llama.embedding_length", "<I", 4, 0), ["llama.embedding_length"]),
    "unknown feature": (swap(b"llama.rope.freq_base", b"llama.rope.freq_bose"), ["llama.rope.freq_bose", "not known"]),
    "no text": (after(b"tokenizer.ggml.tokens", "<B", 24, 0xFF), ["tokenizer.ggml.tokens", "entry 0 is not UTF-8"]),
    "text length": (after(b"tokenizer.ggml.tokens", "<Q", 16, 1 << 60), ["tokenizer.ggml.tokens", "entry 0 ends past"]),
    "end token": (after(b"tokenizer.ggml.eos_token_id", "<I", 4, 99), ["eos_token_id", "99 tokens"]),
}  # fmt: skip


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    write_gguf(path)
    return path.read_bytes()


@pytest.mark.parametrize("name", BROKEN)
def test_broken_file_is_refused_by_file_and_field(name: str, sound: bytes, tmp_path: Path) -> None:
    edit, words = BROKEN[name]
    raw = bytearray(sound)
    edit(raw)
    path = tmp_path / "model.gguf"
    path.write_bytes(raw)
    for attempt in (lambda: describe(str(path)), lambda: load(path)):
        with pytest.raises(ModelError) as caught:
            attempt()
        assert all(w in caught.value.message for w in ["model.gguf", *words]), caught.value.message
        assert caught.value.exit_code == 2


def test_files_are_told_by_their_first_bytes(tmp_path: Path) -> None:
    write_gguf(tmp_path / "weights")
    assert describe(str(tmp_path / "weights")).spec.family == "llama"
    (tmp_path / "model.gguf").write_bytes(b"no such thing")
    with pytest.raises(ModelError, match="not GGUF"):
        describe(str(tmp_path / "model.gguf"))


def test_sampling_defaults_lie_beside_a_file(sound: bytes, tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(sound)
    before = describe(str(tmp_path / "model.gguf")).generation
    assert before.sampling == {}
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.2, "top_p": 0.9, "eos_token_id": 3}')
    after = describe(str(tmp_path / "model.gguf")).generation
    assert after.sampling == {"temperature": 0.2, "top_p": 0.9}
    assert after.eos_token_ids == before.eos_token_ids, "the file knows its own"


def test_metadata_is_what_the_gguf_package_reads(sound: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(sound)
    ours, theirs = GgufFile(path), gguf.GGUFReader(path)
    for field in theirs.fields.values():
        if not field.name.startswith("GGUF."):
            value = ours.metadata[field.name]
            assert (value.tolist() if isinstance(value, np.ndarray) else value) == field.contents()
    assert [(t.name, list(t.shape)[::-1]) for t in theirs.tensors] == [
        (t.name, list(t.shape)) for t in ours.tensors.values()
    ]
    assert [int(t.data_offset) for t in theirs.tensors] == [t.start for t in ours.tensors.values()]
