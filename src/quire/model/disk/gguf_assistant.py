"""GGUF files of models that draft for another (Gemma 4's assistants): their metadata as a folder's config.json.

Names and keys are those of llama.cpp's converter, which leaves out clusters of tokens: all tokens are scored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from quire.model.disk.claim import claim
from quire.model.disk.gguf_gemmas import GEMMAS, cap_of_gemma4, layers_of_gemma4
from quire.model.disk.gguf_model import GgufModel
from quire.model.disk.gguf_names import KV_HEADS, NEXTN
from quire.model.disk.headers import ModelHeaders
from quire.model.families.assistants import read_assistant

OUT = "embedding_length_out"
"""The key of numbers of a hidden row of the model that is drafted for."""
CLUSTERS = "masked_embd_"
"""Beginning of names of clusters of tokens, whose number that is looked at no key records."""


def _layers(raw: Mapping[str, Any], has: Callable[[str], bool]) -> dict[str, Any]:
    """Fields of the decoder: layers that see everything have heads of their own where their number is another."""
    found = layers_of_gemma4(raw, has)
    return found | {"attention_k_eq_v": found["num_global_key_value_heads"] != found[KV_HEADS]}


def _told(raw: Mapping[str, Any]) -> dict[str, Any]:
    """What caps logits, and how many layers share keys and values: all read those of another model."""
    return cap_of_gemma4(raw) | {"num_kv_shared_layers": raw["num_hidden_layers"]}


_GEMMA4 = GEMMAS["gemma4"]
DRAFTING = {
    "gemma4-assistant": replace(
        _GEMMA4,
        extra=(*_GEMMA4.extra, NEXTN, OUT),
        names={
            **_GEMMA4.names,
            "head": "token_embd",
            "assistant_in": "nextn.pre_projection",
            "assistant_out": "nextn.post_projection",
        },
        skipped=(CLUSTERS,),
        further=_layers,
        tell=_told,
        also=(),
    )
}
"""Architectures of files of such models."""
KINDS = {"gemma4-assistant": "gemma4_assistant"}
"""Architecture -> `model_type` of the folder."""


@dataclass(frozen=True)
class AssistantFile(GgufModel):
    """A file of which every block drafts."""

    def _own_layers(self, blocks: Any) -> Any:
        return blocks

    def raw(self) -> dict[str, Any]:
        """The config.json of its folder."""
        kind = KINDS[self.prefix.removesuffix(".")]
        return {"model_type": kind, "backbone_hidden_size": self.get(OUT), "text_config": self.config()}


def open_assistant_file(path: Path) -> ModelHeaders:
    """Read and claim the file `path`; `ModelError` where it is none of such a model."""
    file = AssistantFile.open(path, DRAFTING)
    spec, family, config = read_assistant(file.raw(), str(path))
    spec, family = file.as_stored(spec, family)
    source, scheme = file.source(), file.tensors.scheme
    claimed = claim(source.infos, spec, family, family.required_parts(config), scheme)
    notes = (*file.notes, *scheme.notes)
    return ModelHeaders(path.stem, path, config, spec, family, source, scheme, claimed, file.tensors.dtype, notes)
