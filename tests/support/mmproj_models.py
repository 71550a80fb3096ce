"""Models with images as two GGUF files, written from a tiny checkpoint of transformers as llama.cpp's converter does.

`tests/gguf/test_llama_cpp_mmproj.py` compares both with what that converter writes of the same folders.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType
from gguf.quants import quantize
from safetensors.numpy import load_file, save_file

from quire.compress.layouts.gguf import write_gguf as write_folder
from quire.gguf.file import GgufFile
from quire.gguf.projector_types import PROJECTORS
from quire.gguf.writer import NewTensor, write_file
from quire.model.describe import open_model
from quire.model.disk.headers import ModelHeaders
from quire.model.families.multimodal import text_config
from quire.model.tower_roles import BOUNDED, BOUNDS
from quire.model.vision.mmproj import NAMES
from vision_models import CONFIGS, LIKE_GEMMA4, make_vision_model

TYPES = {
    "gemma3": "gemma3",
    "qwen2_vl": "qwen2vl_merger",
    "qwen2_5_vl": "qwen2.5vl_merger",
    "qwen3_vl": "qwen3vl_merger",
    "qwen3_5": "qwen3vl_merger",
    "mistral3": "pixtral",
    "llava_pixtral": "pixtral",
    "idefics3": "idefics3",
    "smolvlm": "idefics3",
    "internvl": "internvl",
    "internvl_norms": "internvl",
    "lfm2_vl": "lfm2",
    "llava": "mlp",
    "llava_next": "mlp",
    "gemma4": "gemma4v",
    "gemma4_moe": "gemma4v",
    "gemma4_unified": "gemma4uv",
    "llama4": "llama4",
}
"""Family -> projector type."""
OLDER = ("llava", "llava_next")
"""Families whose files an older script wrote: an MLP's matrices are called by each other's names."""
RENAMED = {
    "qwen2_vl": ("qwen2vl", [2, 3, 3, 0]),
    "qwen2_5_vl": ("qwen2vl", [2, 3, 3, 0]),
    "qwen3_vl": ("qwen3vl", [6, 3, 3, 0]),
    "qwen3_5": ("qwen35", [3, 3, 2, 0]),
}
"""Families whose decoder has an architecture of its own where it takes images, and its sections of rope."""
FLAT = ("gemma4_unified", "llama4")
"""Families whose patches are read by a matrix, channel by channel."""
INTERN = {"architectures": ["InternVisionModel"], "num_hidden_layers": 4}
POOLED = {"pooling_kernel_size": 3}
WHOLE: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {"vision_config": CONFIGS["qwen2_5_vl"]["vision_config"] | {"window_size": 112}},
    "lfm2_vl": {
        "vision_config": CONFIGS["lfm2_vl"]["vision_config"] | {"patch_size": 16},
        "text_config": CONFIGS["lfm2_vl"]["text_config"] | {"tie_word_embeddings": True},
        "tie_word_embeddings": True,
    },
    "internvl": {"vision_config": CONFIGS["internvl"]["vision_config"] | INTERN},
    "internvl_norms": {"vision_config": CONFIGS["internvl_norms"]["vision_config"] | INTERN},
    "gemma4": {
        "vision_config": CONFIGS["gemma4"]["vision_config"] | POOLED,
        "text_config": CONFIGS["gemma4"]["text_config"] | {"pad_token_id": 0},
    },
    "llama4": {
        "text_config": CONFIGS["llama4"]["text_config"]
        | {"attention_chunk_size": 8192, "floor_scale": 8192, "attn_scale": 0.1}
        | {"num_hidden_layers": 4, "no_rope_layers": [1, 1, 1, 0]},
    },
    **{name: {"vision_config": CONFIGS[name]["vision_config"] | POOLED} for name in ("gemma4_moe", "gemma4_unified")},
}
"""Fields of config.json that the converter needs, or that no key records."""
NAMED = {"vision_tower.": "model.vision_tower.", "multi_modal_": "model.multi_modal_",
         "language_model.model.": "model.language_model.", "language_model.lm_head.": "lm_head."}  # fmt: skip
RELEASED = {
    "gemma3": {"vision_tower.": "vision_tower.vision_model."},
    "lfm2_vl": {"model.vision_tower.": "model.vision_tower.vision_model."},
    "internvl": NAMED,
    "internvl_norms": NAMED,
}
"""How published files call what newer versions of transformers call otherwise, and the converter does not."""
ALONE = ("class_token", "newline", "std_bias", "std_scale",
         *(f"{role}_{bound}" for role in BOUNDED for bound in BOUNDS))  # fmt: skip
"""Roles whose one tensor has no ending."""
SWAPPED = {"up": "down", "down": "up"}
OUTER = ("model.language_model.", "language_model.model.", "model.text_model.")
GELU = ("gelu", "gelu_pytorch_tanh")


def make_source(family: str, folder: Path) -> None:
    """The checkpoint, its images cut as files of two parts say: what no key of theirs records is the family's usual."""
    make_vision_model(family, folder, **WHOLE.get(family, {}))
    file, rules = folder / "model.safetensors", RELEASED.get(family, {})
    tensors = load_file(file)
    save_file({_released(name, rules): tensor for name, tensor in tensors.items()}, file)
    path = folder / "preprocessor_config.json"
    said = json.loads(path.read_text())
    if "Qwen2VL" in said["image_processor_type"]:
        least, most = (256**2, 4096**2) if family.startswith("qwen3") else (56**2, 3584**2)
        said |= {"min_pixels": least, "max_pixels": most, "size": {"shortest_edge": least, "longest_edge": most}}
    if family == "lfm2_vl":
        said = {name: said[name] for name in ("image_processor_type", "image_mean", "image_std")}
    if family.startswith("internvl"):
        said |= {"max_patches": 12}
    if family in LIKE_GEMMA4:
        said |= POOLED | {"max_soft_tokens": 280}
    if family == "llama4":
        said |= {"max_patches": 16}
    path.write_text(json.dumps(said))


def _released(name: str, rules: dict[str, str]) -> str:
    own = next((own for own in rules if name.startswith(own)), "")
    return rules.get(own, "") + name.removeprefix(own)


def write_text(family: str, folder: Path, out: Path) -> None:
    """The decoder."""
    own = out.parent / f"{out.stem} decoder"
    own.mkdir()
    raw = json.loads((folder / "config.json").read_text())
    (own / "config.json").write_text(json.dumps(text_config(raw, str(folder))[0]))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (own / name).write_text((folder / name).read_text())
    tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        start = next((start for start in OUTER if name.startswith(start)), None)
        if start is not None:
            tensors[f"model.{name.removeprefix(start)}"] = tensor
        elif name.endswith("lm_head.weight"):
            tensors["lm_head.weight"] = tensor
        elif name.startswith(("model.layers.", "model.embed_tokens.", "model.norm.")):
            tensors[name] = tensor
    save_file(tensors, own / "model.safetensors")
    architecture, sections = RENAMED.get(family, ("", []))
    made = out.with_suffix(".own") if architecture else out
    write_folder(own, made, "F32")
    if architecture:
        _renamed(made, out, architecture, sections)


def _renamed(path: Path, out: Path, architecture: str, sections: list[int]) -> None:
    """The same file under another architecture."""
    file = GgufFile(path)
    own = f"{file.metadata['general.architecture']}."
    metadata = {key.replace(own, f"{architecture}.", 1): file.metadata[key] for key in file.metadata}
    metadata |= {"general.architecture": architecture, f"{architecture}.rope.dimension_sections": np.int32(sections)}
    if architecture == "qwen3vl":
        metadata |= {"qwen3vl.n_deepstack_layers": 2}
    _rewritten(file, out, metadata, {})


def with_audio(path: Path, out: Path) -> None:
    """A mmproj file that reads audio, too."""
    file = GgufFile(path)
    metadata = {key: file.metadata[key] for key in file.metadata}
    metadata |= {"clip.has_audio_encoder": True, "clip.audio.block_count": 1}
    _rewritten(file, out, metadata, {"a.blk.0.attn_q.weight": np.zeros((4, 4), np.float32)})


def _rewritten(file: GgufFile, out: Path, metadata: dict[str, Any], more: dict[str, np.ndarray[Any, Any]]) -> None:
    """The tensors of a file, and more, with other metadata."""
    tensors = [NewTensor(tensor.name, tensor.type.name, tensor.shape) for tensor in file.tensors.values()]
    tensors += [NewTensor(name, "F32", tensor.shape) for name, tensor in more.items()]
    data = [np.frombuffer(file.data, np.uint8, tensor.nbytes, tensor.start) for tensor in file.tensors.values()]
    write_file(out, metadata, tensors, [*data, *more.values()])


def write_mmproj(family: str, folder: Path, out: Path, kind: str = "F32") -> None:
    """What makes rows of images, its matrices in the type `kind`."""
    raw = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(out, "clip")
    writer.add_name("tiny")
    writer.add_type("mmproj")
    if family in LIKE_GEMMA4:
        writer.add_clip_vision_projector_type(TYPES[family])
    else:
        writer.add_clip_projector_type(TYPES[family])
    writer.add_clip_has_vision_encoder(True)
    _metadata(family, folder, raw, writer)
    for name, tensor in mmproj_tensors(family, folder):
        _add(writer, name, np.ascontiguousarray(tensor), kind, family in FLAT)
    _write(writer)


def _metadata(family: str, folder: Path, raw: dict[str, Any], writer: gguf.GGUFWriter) -> None:
    told = open_model(str(folder))
    assert told.vision is not None
    spec, image = told.vision.tower.spec, json.loads((folder / "preprocessor_config.json").read_text())
    inner = told.vision.tower.config
    side = inner.raw.get("image_size")
    side = side[0] if isinstance(side, list) else side
    grid = spec.patches.grid[0] * spec.patches.size
    writer.add_vision_projection_dim(told.spec.hidden)
    unsaid = {"lfm2_vl": 256, "qwen2_vl": 560, "qwen2_5_vl": 560} | dict.fromkeys(LIKE_GEMMA4, 224)
    writer.add_vision_image_size(unsaid.get(family, side or grid))
    writer.add_vision_patch_size(8 if family in LIKE_GEMMA4 else spec.patches.size)
    writer.add_vision_embedding_length(spec.hidden)
    wide = {"qwen2_vl": 64, "gemma4_unified": 0}
    writer.add_vision_feed_forward_length(wide.get(family, spec.intermediate))
    writer.add_vision_block_count(spec.layers)
    writer.add_vision_head_count(spec.heads if spec.layers else 0)
    writer.add_vision_attention_layernorm_eps(1e-6 if family == "gemma4_unified" else spec.norm_eps)
    writer.add_vision_image_mean(image["image_mean"])
    writer.add_vision_image_std(image["image_std"])
    if (act := inner.raw["hidden_act"]) in GELU and family not in LIKE_GEMMA4:
        writer.add_vision_use_gelu(True)
    elif act == "silu":
        writer.add_vision_use_silu(True)
    kind = TYPES[family]
    if kind in ("gemma3", "idefics3", "internvl", "lfm2", "llama4"):
        writer.add_vision_projector_scale_factor(spec.patches.merge)
    if kind == "qwen3vl_merger" or family == "mistral3":
        writer.add_vision_spatial_merge_size(2)
    if kind == "qwen3vl_merger":
        deep = raw["vision_config"].get("deepstack_visual_indexes") or []
        writer.add_vision_is_deepstack_layers([i in deep for i in range(spec.layers)])
    if kind == "qwen2.5vl_merger":
        writer.add_vision_n_wa_pattern(2)
    if kind == "mlp":
        writer.add_array("clip.vision.feature_layer", list(told.vision.reading.taps))
    if family == "llava_next":
        flat = [side for high, wide in raw["image_grid_pinpoints"] for side in (wide, high)]
        writer.add_array("clip.vision.image_grid_pinpoints", flat)
    if kind == "idefics3":
        writer.add_vision_preproc_image_size(image["size"]["longest_edge"])


def mmproj_tensors(family: str, folder: Path) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    """Names and numbers of all tensors of a mmproj file."""
    raw, opened = json.loads((folder / "config.json").read_text()), open_model(str(folder)).vision
    assert opened is not None
    row = PROJECTORS[TYPES[family]]
    deep = raw["vision_config"].get("deepstack_visual_indexes") or []
    towers = NAMES | row.towers | ({"mlp_norm": "attn_post_norm"} if family == "llama4" else {})
    for part, names in ((opened.tower, towers), (opened.projector, row.names)):
        for (role, place), found in part.claim.parts.items():
            for ending, name in found.items():
                tensor = np.asarray(part.source.tensor(name)).astype(np.float32)
                layer = deep[place.layer] if names is row.names and place.layer is not None else place.layer
                start = "" if layer is None else names["layer"].format(layer)
                for one, numbers in _parts(role, tensor, part, family):
                    base = start + names[SWAPPED.get(one, one) if family in OLDER else one]
                    yield (base if one in ALONE else f"{base}.{ending}"), numbers


def _parts(
    role: str, tensor: np.ndarray[Any, Any], part: ModelHeaders, family: str
) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    """The tensors of one role, as the converter writes them."""
    spec = part.spec
    if role == "qkv" and not family.startswith("qwen3"):
        yield from zip("qkv", np.split(tensor, 3), strict=True)
    elif role in "qk" and TYPES[family] == "pixtral":
        turned = tensor.reshape(spec.heads, 2, spec.head_dim // 2, -1).swapaxes(1, 2)
        yield role, turned.reshape(tensor.shape)
    elif role == "connector_norm" and family == "gemma3":
        yield role, tensor + 1
    elif role == "connector_down" and family == "gemma3":
        yield role, tensor.T
    elif role == "positions" and family in LIKE_GEMMA4:
        two = tensor.reshape(-1, 2, spec.hidden).swapaxes(0, 1) if family == "gemma4_unified" else tensor
        yield role, two.reshape(2, -1, spec.hidden)
    elif family in FLAT and tensor.shape[-1] == 3 * spec.patches.size**2:
        yield role, tensor.reshape(*tensor.shape[:-1], -1, 3).swapaxes(-1, -2).reshape(tensor.shape)
    elif role == "connector_merge":
        yield role, tensor.reshape(len(tensor), -1, spec.connector.width).swapaxes(1, 2).reshape(tensor.shape)
    else:
        yield role, tensor


def _add(writer: gguf.GGUFWriter, name: str, tensor: np.ndarray[Any, Any], kind: str, flat: bool) -> None:
    if name == "v.patch_embd.weight" and not flat:
        for i, kernel in enumerate(_kernels(tensor)):
            writer.add_tensor(f"{name}.{i}" if i else name, np.ascontiguousarray(kernel))
        return
    small = tensor.ndim < 2 or "position_embd" in name or tensor.shape[-1] % 32
    wanted = GGMLQuantizationType[kind]
    if small or kind == "F32":
        writer.add_tensor(name, tensor)
    else:
        writer.add_tensor(name, quantize(tensor, wanted), raw_dtype=wanted)


def _kernels(matrix: np.ndarray[Any, Any]) -> Iterator[np.ndarray[Any, Any]]:
    """Kernels [n, 3, side, side] of one frame or two, from the pixels of patches in their order."""
    frames = 2 if round((matrix.shape[1] / 3) ** 0.5) ** 2 * 3 != matrix.shape[1] else 1
    side = round((matrix.shape[1] / 3 / frames) ** 0.5)
    yield from matrix.reshape(len(matrix), frames, side, side, 3).transpose(1, 0, 4, 2, 3)


def _write(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
