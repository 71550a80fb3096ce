"""GGUF files of layers with the gated delta rule: the order of value heads, formats, layers that are left out."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor

gguf = pytest.importorskip("gguf", reason="the gguf package writes the test files; it is in the dev extra")

from gguf.constants import GGMLQuantizationType as Type  # noqa: E402

import gguf_delta  # noqa: E402
from gguf_families import DELTA, FAMILIES, THIRD, WIDE  # noqa: E402
from gguf_models import put_back, write_gguf  # noqa: E402
from gguf_writing import SHAPE, add_tokenizer, byte_level  # noqa: E402
from oracle import BACKENDS, backend, logits, relative_error, write  # noqa: E402
from paged_model import Paged, prompt  # noqa: E402
from quire.compress.layouts.gguf import write_gguf as write_folder  # noqa: E402
from quire.core.config import flat_config  # noqa: E402
from quire.core.dtypes import F32  # noqa: E402
from quire.core.errors import ModelError  # noqa: E402
from quire.model.build import Model, load_model  # noqa: E402
from quire.model.describe import describe, open_model  # noqa: E402
from quire.model.load.adapter_files import LowRank  # noqa: E402
from quire.model.load.adapters import in_order  # noqa: E402
from quire.model.load.reader import MatrixForm, WeightReader  # noqa: E402
from quire.model.load.roles import DISK_ROLES, FUSED, Share  # noqa: E402
from quire.ops.arrays import to_numpy  # noqa: E402
from quire.ops.weights import Weight  # noqa: E402
from quire.quant.base import QWeight  # noqa: E402

TOKENS = prompt(19, 1)
BIG = WIDE | DELTA | THIRD | {"num_hidden_layers": 4, "head_dim": 64}
HEADS = {"of a super-block": 256, "of half a super-block": 128, "of less than a block": 16}
"""How many numbers a value head has, beside the columns that a block of the format has."""


def load(path: Path, name: str = "reference", **options: Any) -> Model:
    return load_model(flat_config(model=str(path), **options), backend(name))


def whole(model: Model) -> Tensor:
    return Paged(model, [TOKENS]).run([[len(TOKENS)]])[0]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("device", BACKENDS)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K", "Q8_0"])
def test_quantized_files_stay_packed(kind: str, heads: str, device: str, tmp_path: Path) -> None:
    """The last matrix has the columns of value heads in another order: moved where that parts no block."""
    path, size = tmp_path / "model.gguf", HEADS[heads]
    facts = BIG | {"linear_value_head_dim": size, "linear_num_value_heads": 4 if size > 16 else 16}
    oracle = write_gguf(path, "qwen3_5_text", lambda name: Type[kind], **facts)
    model = load(path, device, dtype="float32", activations="int16")
    assert relative_error(whole(model), logits(oracle, TOKENS)) <= 1e-3
    floats = {role for role, (label, _) in model.report.items() if label in ("f32", "bf16")}
    assert floats <= {"rope", "norms", "delta_conv", "embed"}


def folder_and_file(name: str, tmp_path: Path) -> tuple[WeightReader, WeightReader]:
    """Readers of the same model as a folder and as a file of floats, of the share `share`."""
    kind, facts = FAMILIES[name]
    write_gguf(tmp_path / "model.gguf", kind, **facts).save_pretrained(tmp_path / "folder")
    folder, file = (
        WeightReader(open_model(str(tmp_path / one)), backend("reference"), MatrixForm(F32), Share(), None)
        for one in ("folder", "model.gguf")
    )
    return folder, file


@pytest.mark.parametrize("name", ["qwen3next", "qwen35", "qwen35 three", "qwen35moe"])
def test_every_rank_has_the_numbers_that_it_has_of_a_folder(name: str, tmp_path: Path) -> None:
    folder, file = folder_and_file(name, tmp_path)
    spec = folder.opened.spec
    delta = [
        name
        for name, role in DISK_ROLES.items()
        if name.startswith("delta_") and name not in FUSED and role.where(spec, 0)
    ]
    for share in (Share(), Share(0, 2), Share(1, 2)):
        ours, theirs = file.of(share), folder.of(share)
        for role in delta:
            if DISK_ROLES[role].kind == "linear":
                one, other = (to_numpy(r.matrix((role,), 0)[0].dequantize()) for r in (ours, theirs))
                assert np.array_equal(one, other), role
            else:
                one, other = (to_numpy(r.vector(role, 0)) for r in (ours, theirs))
                assert np.allclose(one, other.reshape(one.shape), rtol=1e-5, atol=1e-6), role


@pytest.mark.parametrize("kind", ["Q4_K", "Q8_0"])
def test_quantized_columns_can_be_shared_by_ranks(kind: str, tmp_path: Path) -> None:
    """Heads of 128 numbers part the super-blocks of Q4_K, whose groups of 32 are moved instead."""
    path = tmp_path / "model.gguf"
    facts = BIG | {"linear_value_head_dim": 128, "linear_num_value_heads": 4}
    oracle = write_gguf(path, "qwen3_5_text", lambda name: Type[kind], **facts)
    reader = WeightReader(open_model(str(path)), backend("reference"), MatrixForm(F32), Share(), None)
    want = oracle.state_dict()["model.layers.0.linear_attn.out_proj.weight"].numpy()
    parts = [to_numpy(reader.of(Share(rank, 2)).matrix(("delta_out",), 0)[0].dequantize()) for rank in (0, 1)]
    assert np.array_equal(np.concatenate(parts, 1), want)


def fused(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield queries, keys, values and gate in one matrix, as converters of 2025 wrote them."""
    yield from [("ssm_in.weight", tensor)] if name == "in_proj_qkvz.weight" else VIEWS(name, tensor)


VIEWS = gguf_delta.views


def test_older_files_with_fused_matrices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_delta, "views", fused)
    kind, facts = FAMILIES["qwen3next"]
    oracle = write_gguf(tmp_path / "model.gguf", kind, **facts)
    assert "blk.0.ssm_in.weight" in open_model(str(tmp_path / "model.gguf")).source.infos
    assert relative_error(whole(load(tmp_path / "model.gguf")), logits(oracle, TOKENS)) <= 1e-5


def further(writer: Any) -> None:
    """Add a tensor of a layer that predicts further tokens."""
    writer.add_tensor("blk.4.nextn.eh_proj.weight", np.zeros((64, 128), np.float32))


def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    kinds = {"num_hidden_layers": 5, "layer_types": [*THIRD["layer_types"], "full_attention"]}
    oracle: Any = write_gguf(
        tmp_path / "model.gguf", "qwen3_5_text", edit=further, extra={"nextn_predict_layers": 1}, **DELTA | kinds
    )
    oracle.model.layers = oracle.model.layers[:4]
    assert describe(str(tmp_path / "model.gguf")).spec.layers == 4
    assert relative_error(whole(load(tmp_path / "model.gguf")), logits(oracle, TOKENS)) <= 1e-5


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K"])
@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5_text"])
def test_written_files_answer_as_their_rounded_weights_do(name: str, kind: str, tmp_path: Path) -> None:
    """The gguf package reads what was written, and transformers computes with it."""
    experts = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 256,
               "shared_expert_intermediate_size": 256} if name == "qwen3_next" else {}  # fmt: skip
    model = write(tmp_path, name, **SHAPE | BIG | {"linear_value_head_dim": 128} | experts)
    add_tokenizer(tmp_path, byte_level())
    path = tmp_path / "model.gguf"
    write_folder(tmp_path, path, kind)
    kinds = {t.name: t.tensor_type.name for t in gguf.GGUFReader(path).tensors}
    assert kinds["blk.0.attn_qkv.weight"] == kinds["blk.0.ssm_out.weight"] == kind
    assert kinds["blk.0.ssm_a"] == kinds["blk.0.ssm_ba.weight" if experts else "blk.0.ssm_beta.weight"] == "F32"
    put_back(model, path)
    got = whole(load(path, dtype="float32", activations="int16"))
    assert relative_error(got, logits(model, TOKENS)) <= (2e-3 if experts else 1e-3)  # activations have 16 bits


@pytest.mark.parametrize("role", ["delta_v", "delta_z", "delta_out"])
def test_adapters_follow_the_order_of_the_file(role: str, tmp_path: Path) -> None:
    """What is added to a matrix as it lies in the file, is added to it in our order."""
    kind, facts = FAMILIES["qwen35 three"]
    write_gguf(tmp_path / "model.gguf", kind, **facts)
    opened = open_model(str(tmp_path / "model.gguf"))
    n, k = DISK_ROLES[role].shape(opened.spec)
    generator = np.random.default_rng(1)
    low = LowRank(*(generator.standard_normal(shape).astype(np.float32) for shape in ((2, k), (n, 2))))
    found, whole = in_order(low, role, 0, opened), QWeight(Weight("f32", low.b @ low.a))
    order = opened.family.order(role, opened.spec)
    assert order is not None
    wanted = whole.take_cols(order) if role == "delta_out" else whole.take_rows(order)
    assert np.allclose(found.b @ found.a, to_numpy(wanted.dequantize()), rtol=1e-5)


def positive(writer: Any) -> None:
    """Make a rate of decay one of growth."""
    at = next(tensors["blk.0.ssm_a"] for tensors in writer.tensors)
    at.tensor = np.abs(at.tensor)


REFUSED: dict[str, tuple[dict[str, Any], Any, str]] = {
    "layers": ({"nextn_predict_layers": 4}, None, r"qwen35\.nextn_predict_layers: is 4, needs a number of 4 blocks"),
    "heads": ({"ssm.unknown": 1}, None, r"qwen35\.ssm\.unknown: is not known"),
    "rates": ({}, positive, r"blk\.0\.ssm_a\.weight holds a number that is not below 0"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_such_model_has_is_refused(name: str, tmp_path: Path) -> None:
    extra, edit, message = REFUSED[name]
    kind, facts = FAMILIES["qwen35"]
    write_gguf(tmp_path / "model.gguf", kind, extra=extra, edit=edit or (lambda writer: None), **facts)
    with pytest.raises(ModelError, match=message):
        load(tmp_path / "model.gguf")


@pytest.mark.parametrize("parts", ["a block", "none"])
def test_columns_in_another_order(parts: str) -> None:
    """A matrix keeps its numbers, whether groups are moved or activations are."""
    from quire.quant.rtn import INT4

    generator = np.random.default_rng(1)
    matrix = generator.standard_normal((32, 128)).astype(np.float32)
    weight = INT4.quantize(matrix, 32)
    groups = np.array([2, 0, 3, 1])
    cols = generator.permutation(128) if parts == "a block" else (groups[:, None] * 32 + np.arange(32)).flatten()
    back = weight.take_cols(cols).take_cols(np.argsort(cols))
    assert np.array_equal(to_numpy(weight.take_cols(cols).dequantize()), to_numpy(weight.dequantize())[:, cols])
    assert np.array_equal(to_numpy(back.dequantize()), to_numpy(weight.dequantize()))
    assert (weight.take_cols(cols).weight.order is None) == (parts == "none")
    ops = backend(BACKENDS[-1])
    packed, plain = weight.take_cols(cols).pack(ops), weight.pack(ops)
    x = generator.standard_normal((3, 128)).astype(np.float32)
    moved = np.ascontiguousarray(x[:, np.argsort(cols)])
    y, want = (to_numpy(ops.linear(v, p, None)) for v, p in ((x, packed), (moved, plain)))
    assert np.allclose(y, want, rtol=1e-2, atol=5e-2)
