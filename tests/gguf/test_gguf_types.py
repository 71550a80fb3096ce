"""Number formats that the gguf package does not read, scales of whole matrices, and models in several files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

gguf = pytest.importorskip("gguf", reason="the gguf package writes the test files; it is in the dev extra")

from gguf.constants import GGMLQuantizationType as Type  # noqa: E402

from gguf_families import FAMILIES, WIDE  # noqa: E402
from gguf_models import write_gguf  # noqa: E402
from oracle import BACKENDS, backend, logits, relative_error  # noqa: E402
from paged_model import Paged, prompt  # noqa: E402
from quire.core.config import flat_config  # noqa: E402
from quire.core.errors import ModelError  # noqa: E402
from quire.core.files import sampled_digest  # noqa: E402
from quire.gguf.block_types import BLOCKS  # noqa: E402
from quire.gguf.file import GgufFile, gguf_files  # noqa: E402
from quire.gguf.writer import NewTensor, write_file  # noqa: E402
from quire.model.build import load_model  # noqa: E402
from quire.model.describe import describe  # noqa: E402
from quire.ops.arrays import to_numpy  # noqa: E402
from quire.quant.gguf import TYPES, Block  # noqa: E402
from torch_weights import load_torch  # noqa: E402


def q1_0(block: bytes) -> list[float]:
    """dequantize_row_q1_0 of ggml-quants.c."""
    d = float(np.frombuffer(block[:2], np.float16)[0])
    return [d if block[2 + j // 8] >> j % 8 & 1 else -d for j in range(128)]


def q2_0(block: bytes) -> list[float]:
    """dequantize_row_q2_0 of ggml-quants.c."""
    d = float(np.frombuffer(block[:2], np.float16)[0])
    return [((block[2 + j // 4] >> j % 4 * 2 & 3) - 1) * d for j in range(64)]


def q8_1(block: bytes) -> list[float]:
    """block_q8_1 of ggml-common.h: the scale, a sum that dot products use, 32 codes."""
    return [float(np.frombuffer(block[:2], np.float16)[0]) * q for q in np.frombuffer(block[4:], np.int8).tolist()]


def q8_k(block: bytes) -> list[float]:
    """block_q8_K of ggml-common.h: the scale, 256 codes, sums that dot products use."""
    d = np.frombuffer(block[:4], np.float32)[0]
    return [float(d * np.float32(q)) for q in np.frombuffer(block[4:260], np.int8).tolist()]


DEFINED: dict[str, Callable[[bytes], list[float]]] = {"Q1_0": q1_0, "Q2_0": q2_0, "Q8_1": q8_1, "Q8_K": q8_k}


def random_bytes(name: str, rows: int, columns: int, seed: int) -> Any:
    kind, rng = TYPES[name], np.random.default_rng(seed)
    raw = rng.integers(0, 256, (rows, columns // kind.numbers, kind.nbytes), dtype=np.uint8)
    scale = rng.uniform(0.01, 0.02, raw.shape[:-1])
    wide = np.float32 if name == "Q8_K" else np.float16
    raw[..., : np.dtype(wide).itemsize] = scale.astype(wide)[..., None].view(np.uint8)
    return raw.reshape(rows, -1)


@pytest.mark.parametrize("name", DEFINED)
def test_numbers_are_those_of_ggml(name: str) -> None:
    raw, size = random_bytes(name, 3, 512, 1), TYPES[name].nbytes
    want = [[x for at in range(0, len(row), size) for x in DEFINED[name](bytes(row[at : at + size]))] for row in raw]
    weight = load_torch(Block(TYPES[name]), {name: torch.from_numpy(raw)}, torch.float32)
    assert np.array_equal(weight.dequantize().numpy(), np.array(want, np.float32))


@pytest.mark.parametrize("device", BACKENDS)
@pytest.mark.parametrize("name", [*DEFINED, "NVFP4"])
def test_products_are_those_of_the_numbers(name: str, device: str) -> None:
    ops = backend(device)
    raw = random_bytes(name, 48, 512, 2) if name in DEFINED else np.random.default_rng(2).integers(
        16, 32, (48, 8 * 36), dtype=np.uint8
    )  # fmt: skip
    weight = Block(TYPES[name]).load({name: raw}, None).with_activations(16)  # type: ignore[arg-type]
    x = np.random.default_rng(3).standard_normal((5, 512)).astype(np.float32)
    ops.begin_step()
    found = to_numpy(ops.linear(ops.put(x), weight.pack(ops), None))
    assert relative_error(torch.from_numpy(found), torch.from_numpy(x @ np.asarray(weight.dequantize()).T)) <= 1e-3


def test_every_type_of_the_format_is_known() -> None:
    assert {kind.name: kind.value for kind in Type}.items() <= {t.name: code for code, t in BLOCKS.items()}.items()
    for kind in Type:
        numbers, nbytes = gguf.constants.GGML_QUANT_SIZES[kind]
        assert kind.name == "Q8_1" or (BLOCKS[kind.value].numbers, BLOCKS[kind.value].nbytes) == (numbers, nbytes)


def load(path: Path) -> Any:
    return load_model(flat_config(model=str(path), dtype="float32", activations="int16"), backend("reference"))


def whole(model: Any, tokens: list[int]) -> torch.Tensor:
    return Paged(model, [tokens]).run([[len(tokens)]])[0]


def test_a_matrix_may_have_a_scale(tmp_path: Path) -> None:
    """The scale of a matrix, of each expert, and one of activations, which changes nothing."""
    kind, facts = FAMILIES["qwen2moe"]
    facts = facts | {"moe_intermediate_size": 64}
    experts, halves = facts["num_experts"], np.array([0.5], np.float32)

    def edit(writer: Any) -> None:
        writer.add_tensor("blk.0.attn_q.scale", halves)
        writer.add_tensor("blk.0.attn_q.input_scale", halves)
        writer.add_tensor("blk.1.ffn_up_exps.scale", np.arange(1, experts + 1, dtype=np.float32))

    def write(name: str, quantize: Any, edit: Any = lambda writer: None) -> Any:
        return write_gguf(tmp_path / name, kind, quantize, edit, **facts)

    oracle = write("model.gguf", lambda name: Type.NVFP4, edit)
    with torch.no_grad():
        layers, tokens = oracle.model.layers, prompt(19, 1)
        layers[0].self_attn.q_proj.weight *= 0.5
        up = layers[1].mlp.experts.gate_up_proj
        up[:, up.shape[1] // 2 :] *= torch.arange(1, experts + 1)[:, None, None]
    assert relative_error(whole(load(tmp_path / "model.gguf"), tokens), logits(oracle, tokens)) <= 1e-3


def split(path: Path, folder: Path, count: int) -> list[Path]:
    """The model of `path` in `count` files, as llama-gguf-split writes them: the first has all of the metadata."""
    file, out = GgufFile(path), []
    tensors = list(file.tensors.values())
    for number in range(count):
        own = tensors[number::count]
        facts = {"split.no": number, "split.count": count, "split.tensors.count": len(tensors)}
        facts |= dict(file.metadata) if number == 0 else {}
        facts = {key: file.metadata.get(key, value) for key, value in facts.items()}
        out.append(folder / f"model-{number + 1:05}-of-{count:05}.gguf")
        new = [NewTensor(t.name, t.type.name, t.shape) for t in own]
        write_file(out[-1], facts, new, (np.frombuffer(file.data, np.uint8, t.nbytes, t.start) for t in own))
    return out


def test_a_model_in_several_files_is_the_same(tmp_path: Path) -> None:
    kind, facts = FAMILIES["llama"]
    write_gguf(tmp_path / "model.gguf", kind, lambda name: Type.Q4_K, **facts | WIDE)
    (tmp_path / "parts").mkdir()
    paths, tokens = split(tmp_path / "model.gguf", tmp_path / "parts", 3), prompt(19, 1)
    want = whole(load(tmp_path / "model.gguf"), tokens)
    assert torch.equal(whole(load(paths[0]), tokens), want)
    assert torch.equal(whole(load(tmp_path / "parts"), tokens), want) and gguf_files(tmp_path / "parts") == paths[:1]
    assert describe(str(paths[0])).bytes_on_disk == describe(str(tmp_path / "model.gguf")).bytes_on_disk
    before = sampled_digest(paths[0])
    raw = bytearray(paths[2].read_bytes())
    raw[-100] ^= 1
    paths[2].write_bytes(raw)
    assert sampled_digest(paths[0]) != before
    with pytest.raises(ModelError, match="number 2 of 3; give the first"):
        describe(str(paths[1]))
    paths[1].unlink()
    with pytest.raises(ModelError, match=r"in 3 files; model-00002-of-00003\.gguf is missing"):
        describe(str(paths[0]))
    paths[1].write_bytes(paths[2].read_bytes())
    with pytest.raises(ModelError, match=r"model-00002-of-00003\.gguf: split\.no: is not 1 of 3"):
        describe(str(paths[0]))
    paths[0].rename(tmp_path / "other.gguf")
    with pytest.raises(ModelError, match="its name must end"):
        describe(str(tmp_path / "other.gguf"))
