"""The vision part of a GGUF model, from the headers of its mmproj file. See docs/design/weight-formats.md."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from quire.core.errors import ModelError
from quire.gguf.file import GgufFile
from quire.gguf.mmproj import Mmproj
from quire.images.processor_config import SettingFields, Settings
from quire.model.disk.gguf_dense import SECTIONS
from quire.model.disk.gguf_model import GgufModel
from quire.model.disk.headers import VisionHeaders
from quire.model.disk.hf_config import HfConfig
from quire.model.families.multimodal import MULTIMODAL, vision_config
from quire.model.load.roles import FUSED
from quire.model.spec import ModelSpec, Sight
from quire.model.tower_roles import BOUNDED, BOUNDS
from quire.model.vision.mmproj_tensors import MmprojTensors
from quire.model.vision.tensors import VisionMatrices
from quire.model.vision.vision_headers import VisionPart, VisionSaid

MATRICES = {
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "o": "attn_out",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
}
NAMES = {
    "patch": "v.patch_embd",
    "patch_norm": "v.patch_norm.1",
    "patch_out_norm": "v.patch_norm.2",
    "class_token": "v.class_embd",
    "positions": "v.position_embd",
    "embed_norm": "v.pre_ln",
    "final_norm": "v.post_ln",
    "layer": "v.blk.{}.",
    "attn_norm": "ln1",
    "attn_post_norm": "attn_post_norm",
    "mlp_norm": "ln2",
    "mlp_post_norm": "ffn_post_norm",
    "qkv": "attn_qkv",
    "q_row_norm": "attn_q_norm",
    "k_row_norm": "attn_k_norm",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "attn_scale": "ls1",
    "mlp_scale": "ls2",
    "std_bias": "v.std_bias",
    "std_scale": "v.std_scale",
    **MATRICES,
    **{f"{role}_{bound}": f"{MATRICES[role]}.{bound}" for role in BOUNDED for bound in BOUNDS},
}
"""Role of a tower -> name, the same for every type of projector."""


def open_mmproj(found: Mmproj, text: GgufModel, spec: ModelSpec) -> tuple[VisionHeaders, Sight]:
    """Claim all tensors of a mmproj file, and what images change in the decoder `text`, whose shape is `spec`.

    `ModelError` naming both files where they are not of one model, or a tensor that is missing, left over or of another
    shape.
    """
    where, architecture = str(found.file.path), text.prefix.removesuffix(".")
    raw = found.config(architecture, text.file.path.name)
    width = found.get("vision.projection_dim", 0)
    if width not in (0, spec.hidden):
        raise ModelError(
            f"{where}: clip.vision.projection_dim: {found.said} makes rows of {width} numbers, those of "
            f"{text.file.path.name} ({architecture}) have {spec.hidden}; give the mmproj file of the same model, or "
            "--language-model-only"
        )
    table = MULTIMODAL[raw["model_type"]]
    said = VisionSaid.read(raw, where, table.tower, spec, SettingFields(found.image, where))
    source = MmprojTensors(found, said.inner.integers("deepstack_visual_indexes"))
    projector = said.projector
    names = {role: found.row.names[role] for role in projector.names}
    own = _own(names, source.infos)
    towers = names_of(said.tower.family.names, source.infos, found.row.towers)
    family = said.trimmed(replace(said.tower.family, names=towers, buffers=(), skipped=found.row.skipped))
    shape = replace(said.spec, interleaved_rope=found.row.interleaved)
    tower = VisionPart(said.inner, shape, family, _required(said.tower.required(said.inner), towers), "")
    norm = replace(projector.spec, norm=projector.spec.norm.removesuffix("1p"))  # which files hold whole
    made = VisionPart(said.config, norm, replace(projector.family, names=names), frozenset(projector.required), "")
    unfolded = dict.fromkeys(found.row.unfolded, 3)
    turned = [names[role] for role in projector.turned]
    grouped = {names[role]: projector.spec.connector.width for role in projector.grouped}
    headers = VisionHeaders(
        tower.open(found.file.path, VisionMatrices(source, source.infos.keys() - own, (), unfolded), 0),
        made.open(found.file.path, VisionMatrices(source, own, turned, grouped), 0),
        said.reading,
        sum(tensor.nbytes for tensor in found.file.tensors.values()),
    )
    return headers, table.sight(_text(text, where), vision_config(raw, where))


def settings_of(found: Mmproj, decoder: GgufFile) -> Settings:
    """What a mmproj file, beside that of its `decoder`, says of cutting images and of prompts with them."""
    config = found.config(str(decoder.metadata.get("general.architecture")), decoder.path.name)
    where = str(found.file.path)
    return Settings(SettingFields(found.image, where), SettingFields(found.text, where), SettingFields(config, where))


def names_of(roles: Collection[str], tensors: Collection[str], own: Mapping[str, str]) -> dict[str, str]:
    """The format's names for the roles of a tower, `own` or as elsewhere; queries, keys and values are one matrix or
    three."""
    parts = {*FUSED["qkv"], "qkv"}
    kept = set(roles) - parts
    if kept != set(roles):
        kept |= {"qkv"} if any(".attn_qkv." in name for name in tensors) else set(FUSED["qkv"])
    return {role: own.get(role) or NAMES[role] for role in sorted(kept)}


def _required(parts: frozenset[str], names: Mapping[str, str]) -> frozenset[str]:
    """Required roles and biases, of the matrices that are there."""
    found = set[str]()
    for part in parts:
        role, dot, ending = part.partition(".")
        others = FUSED["qkv"] if role == "qkv" else ("qkv",)
        found |= {part} if role in names else {other + dot + ending for other in others}
    return frozenset(found)


def _own(names: Mapping[str, str], tensors: Collection[str]) -> set[str]:
    """The projector's tensors."""
    stack = names.get("layer", "\0").partition("{")[0]
    bases = {base for role, base in names.items() if not role.startswith("deep_")}
    return {
        name for name in tensors if name.startswith(("mm.", stack)) or name in bases or name.rpartition(".")[0] in bases
    }


def _text(text: GgufModel, where: str) -> HfConfig:
    """The decoder's config, with the sections of its rope where its file has them."""
    raw: dict[str, Any] = text.config()
    sections = text.file.metadata.get(text.prefix + SECTIONS)
    if sections is not None:
        rope = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
        raw["rope_scaling"] = {**rope, "mrope_section": [int(count) for count in sections[:3]]}
    return HfConfig(raw, where)
