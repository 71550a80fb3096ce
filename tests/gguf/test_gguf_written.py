"""Models of every architecture that is written: read again with the same logits, by names that the format has."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

gguf = pytest.importorskip("gguf", reason="the gguf package knows the format's names; it is in the dev extra")

from gguf_models import permuted  # noqa: E402
from gguf_written import CHANGED, MULTIPLIED_IN, PERMUTED, WRITTEN, missing, unknown, write_folder  # noqa: E402
from model_variants import Encoded  # noqa: E402
from oracle import backend, logits, relative_error  # noqa: E402
from paged_model import Paged, prompt  # noqa: E402
from quire.compress.checkpoint.dequantized import as_plain_checkpoint  # noqa: E402
from quire.compress.layouts.gguf import write_gguf  # noqa: E402
from quire.core.config import flat_config  # noqa: E402
from quire.gguf.file import GgufFile  # noqa: E402
from quire.gguf.writer import NewTensor, write_file  # noqa: E402
from quire.model.build import load_model  # noqa: E402
from quire.model.describe import open_model  # noqa: E402
from quire.ops.arrays import to_numpy  # noqa: E402

TOKENS = prompt(19, 1)


def answer(path: Path) -> Tensor:
    """Logits of the file's model, of an encoder's with the same tokens before them."""
    model = load_model(flat_config(model=str(path), dtype="float32"), backend("reference"))
    paged = Paged(model, [TOKENS]) if model.encoder is None else Encoded(model, [TOKENS], [TOKENS])
    return paged.run([[len(TOKENS)]])[0]


def wanted(oracle: PreTrainedModel) -> Tensor:
    """transformers' logits."""
    if not oracle.config.is_encoder_decoder:
        return logits(oracle, TOKENS)
    ids = torch.tensor([TOKENS])
    with torch.no_grad():
        found: Tensor = oracle(input_ids=ids, decoder_input_ids=ids).logits[0]
    return found


OTHER_ROWS = ("baichuan second", "llama helium", "chatglm published", "plamo", "muse-glimmer")
"""Models whose files are another row's, which has other matrices or rows in another order."""
OTHER_PAIRS = ("llama helium", "plamo")
"""Models that transformers turns, or a model in their place, in pairs of neighbours."""


@pytest.mark.sampled(10)
@pytest.mark.parametrize("name", WRITTEN)
def test_written_files_answer_as_transformers_does(name: str, tmp_path: Path) -> None:
    oracle = write_folder(tmp_path, name)
    if "second" in name and name.startswith("baichuan"):  # divides each row of its head by its length
        with torch.no_grad():
            oracle.lm_head.weight.copy_(torch.nn.functional.normalize(oracle.lm_head.weight))
    path, arch = tmp_path / "model.gguf", name.split()[0]
    write_gguf(tmp_path, path, "F32")
    file = GgufFile(path)
    assert file.metadata["general.architecture"] == arch
    assert not unknown(file, arch)
    assert not missing(file, arch, tmp_path)
    want = answer(tmp_path) if name in CHANGED else wanted(oracle)
    assert relative_error(answer(path), want) <= 1e-5
    assert_rows_lie_as_converted(name, oracle, path)
    if arch not in MULTIPLIED_IN and name not in OTHER_ROWS:
        assert_a_folder_again(path, tmp_path)


def assert_rows_lie_as_converted(name: str, oracle: PreTrainedModel, path: Path) -> None:
    """Rows of queries and keys take turns in a file where the converter makes them do so."""
    arch, config = name.split()[0], oracle.config.to_dict()
    heads = {"q": config.get("num_attention_heads", 0), "k": config.get("num_key_value_heads", 0)}
    tensors = {tensor.name: tensor.data for tensor in gguf.GGUFReader(path).tensors}
    for matrix, count in heads.items():
        theirs = oracle.state_dict().get(f"model.layers.1.self_attn.{matrix}_proj.weight")
        ours = tensors.get(f"blk.1.attn_{matrix}.weight")
        if theirs is not None and ours is not None and name not in OTHER_PAIRS and arch not in MULTIPLIED_IN:
            assert np.array_equal(ours, permuted(theirs, count) if arch in PERMUTED else theirs), matrix


def assert_a_folder_again(path: Path, folder: Path) -> None:
    """What the file is as a folder has the tensors of the folder that it was made of."""
    plain, own = as_plain_checkpoint(open_model(str(path))).opened, open_model(str(folder))
    assert set(plain.claim.parts) == set(own.claim.parts)
    still = {i for i, rope in enumerate(own.spec.rope) if not rope.dim}
    for place, parts in own.claim.parts.items():
        if place[0] in ("q", "k") and place[1].layer in still:
            continue  # rows of both may lie in another order, which changes no product
        for part, tensor in parts.items():
            ours = to_numpy(plain.source.tensor(plain.claim.parts[place][part]))
            assert np.allclose(ours, to_numpy(own.source.tensor(tensor)).reshape(ours.shape), atol=1e-6), place


def test_layers_of_laguna_have_windows_without_a_list_of_them(tmp_path: Path) -> None:
    """As llama.cpp's converter writes its files: the first and every fourth behind it see everything."""
    write_folder(tmp_path, "laguna")
    path, without = tmp_path / "model.gguf", tmp_path / "without.gguf"
    write_gguf(tmp_path, path, "F32")
    file = GgufFile(path)
    metadata = {key: file.metadata[key] for key in file.metadata if not key.endswith(".sliding_window_pattern")}
    assert len(metadata) + 1 == len(file.metadata)
    tensors = [NewTensor(tensor.name, tensor.type.name, tensor.shape) for tensor in file.tensors.values()]
    data = [np.frombuffer(file.data, np.uint8, tensor.nbytes, tensor.start) for tensor in file.tensors.values()]
    write_file(without, metadata, tensors, data)
    assert open_model(str(without)).spec == open_model(str(path)).spec


SAID = [("t5", "decoder_start_token_id", 1), ("gemma4 windows", "final_logit_softcapping", 0.0)]


@pytest.mark.parametrize(("name", "key", "value"), SAID)
def test_what_llama_cpp_takes_for_another_number_is_said(name: str, key: str, value: float, tmp_path: Path) -> None:
    """Of fields that config.json does not have."""
    write_folder(tmp_path, name)
    write_gguf(tmp_path, tmp_path / "model.gguf", "F32")
    assert GgufFile(tmp_path / "model.gguf").metadata[f"{name.split()[0]}.{key}"] == value


def test_a_layer_ahead_of_glm5_next_is_left_out(tmp_path: Path) -> None:
    """llama.cpp's converter writes the layer behind the last one, and one more number in lists that have it."""
    write_folder(tmp_path, "glm5-next")
    plain, more = tmp_path / "plain.gguf", tmp_path / "more.gguf"
    write_gguf(tmp_path, plain, "F32")
    file, arch = GgufFile(plain), "glm5-next."
    metadata = {key: file.metadata[key] for key in file.metadata} | {arch + "nextn_predict_layers": 1}
    layers = metadata[arch + "block_count"]
    metadata[arch + "block_count"] = layers + 1
    for key in ("attention.head_count_kv", "swiglu_clamp_exp", "swiglu_clamp_shexp"):
        metadata[arch + key] = np.append(metadata[arch + key], metadata[arch + key][-1:])
    held = dict(file.tensors)
    held |= {
        name.replace(f"blk.{layers - 1}.", f"blk.{layers}."): tensor
        for name, tensor in file.tensors.items()
        if name.startswith(f"blk.{layers - 1}.") and ".hc_" not in name
    }
    held[f"blk.{layers}.nextn.enorm.weight"] = file.tensors["output_norm.weight"]
    infos = [NewTensor(name, tensor.type.name, tensor.shape) for name, tensor in held.items()]
    write_file(more, metadata, infos, [np.frombuffer(file.data, np.uint8, t.nbytes, t.start) for t in held.values()])
    assert torch.equal(answer(more), answer(plain))
