"""Models whose decoder alone runs: where their config.json and their files have it, and what of them is left out.

A folder may hold towers for images, audio or video, talkers and more that are not built. Its decoder runs where that
is of a family of the table: a row of text has one position, also where rows of images have three, so that prompts of
text alone are exact.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from quire.model.disk.renamed_tensors import Rewrite
from quire.model.families.multimodal import LEFT_OUT, MULTIMODAL, OUTER, REFUSED, SAME_TEXT, Raw, without_kind
from quire.model.families.row import Family
from quire.model.families.text_defaults import USUAL
from quire.model.vision.towers import is_known

PATHS = (("text_config",), ("thinker_config", "text_config"), ("llm_config",), ("language_config",))
"""Where config.json has the decoder's; of several the first."""
KEPT = (*OUTER, "bos_token_id", "eos_token_id")
"""Fields of the whole model that are the decoder's where that does not say otherwise."""
FLAT = {"phi3_v": "phi3", "phi4mm": "phi3", "phi4_multimodal": "phi3", "dots3_note": "dots3_note_text"}
"""Model types whose config.json is that of their decoder, which is of this family, with more in it, unless it has a
`text_config`."""
FLAT_PARTS = ("img_processor", "audio_processor", "embd_layer", "vision_config", "audio_config")
"""What else is in it."""
ADAPTED = Rewrite(r"(.*)\.base_layer\.weight", r"\1.weight")
"""Matrices beside adapters that only images and audio switch on (Phi-4-multimodal)."""
ADAPTERS = tuple(f".lora_{side}.{kind}.weight" for side in "AB" for kind in ("speech", "vision"))
"""Endings of the names of these adapters."""


@dataclass(frozen=True)
class TextPart:
    """The decoder of a model that is more. `kind`: the model type of the whole; `config`: what the decoder's
    config.json would be; `where` it is in that of the whole; `others`: objects there that say what the other parts are.
    """

    kind: str
    config: Raw
    where: str
    others: tuple[str, ...]

    @property
    def hint(self) -> str:
        """What names of the decoder begin with where its config lies deep: the thinker's of a model that also talks."""
        outer, _, inner = self.where.partition(": ")
        return f"{outer.removesuffix('_config')}." if inner else ""

    @property
    def told(self) -> str:
        """A line that says what does not run."""
        parts = ", ".join(self.others) or "its other parts"
        why = f" ({REFUSED[self.kind]})" if self.kind in REFUSED else ""
        return f"only the decoder of {self.kind!r} runs, for text: {parts} left out; images and audio are refused{why}"


def text_part(raw: Raw) -> TextPart | None:
    """The decoder in `raw`, a config.json; None where that is a decoder's itself, or of a model with all of its
    parts."""
    kind = raw.get("model_type")
    if not isinstance(kind, str) or (kind in MULTIMODAL and _has_tower(raw)):
        return None
    if kind in FLAT and not raw.get("text_config"):
        others = tuple(name for name in FLAT_PARTS if raw.get(name))
        inner = {name: value for name, value in raw.items() if name not in others}
        return TextPart(kind, _whole({}, inner | {"model_type": FLAT[kind]}), "", others)
    for path in PATHS:
        found, beside = _at(raw, path)
        if found is not None:
            return TextPart(kind, _whole(raw, found), ": ".join(path), beside)
    return None


def parts_left_out(raw: Raw) -> list[str]:
    """Lines that say which parts of a model do not run, by its config.json `raw`."""
    part = text_part(raw)
    if part is not None:
        return [part.told]
    row = MULTIMODAL.get(str(raw.get("model_type")))
    return [] if row is None else row.left_out(raw)


def _has_tower(raw: Raw) -> bool:
    """Whether there is what reads images, and it is built; what else its config says is looked at later."""
    said = raw.get("vision_config", {})
    if said is None:
        return False
    name = said.get("model_type") if isinstance(said, Mapping) else None
    return not isinstance(name, str) or is_known(name)


def _at(raw: Raw, path: tuple[str, ...]) -> tuple[Raw | None, tuple[str, ...]]:
    """The object at `path` if it names a model type, and the names of others that do on the way."""
    others, here = list[str](), dict(raw)
    for step in path:
        others += [name for name, part in here.items() if name != step and _is_part(part)]
        found = here.get(step)
        if not isinstance(found, Mapping):
            return None, ()
        here = dict(found)
    return (here, tuple(others)) if isinstance(here.get("model_type"), str) else (None, ())


def _is_part(value: Any) -> bool:
    return isinstance(value, Mapping) and ("model_type" in value or "hidden_size" in value)


def _whole(raw: Raw, inner: Raw) -> Raw:
    """`inner` with what it leaves out."""
    kind = str(inner["model_type"])
    whole = {name: value for name, value in inner.items() if value is not None}
    usual: Raw = LEFT_OUT.get(kind) or USUAL.get(kind, {})
    whole = {**usual, **{name: raw[name] for name in KEPT if raw.get(name) is not None}, **whole}
    said = [part["tie_word_embeddings"] for part in (raw, inner) if isinstance(part.get("tie_word_embeddings"), bool)]
    whole["tie_word_embeddings"] = not said or True in said  # a head that the files have counts, whatever they say
    whole["model_type"] = SAME_TEXT.get(kind, kind)
    return without_kind(whole)


@dataclass(frozen=True)
class TextNames:
    """Which tensors are the decoder's: what stands for "model." before their names, the name of the head, and all that
    are `kept`."""

    root: str
    head: str
    kept: frozenset[str]


def find_text(names: Iterable[str], family: Family, hint: str) -> TextNames | None:
    """The decoder's tensors among `names`, wherever they lie; None where there is no table of tokens beside layers.

    `hint`: what its names begin with where several parts have both.
    """
    every = frozenset(names)
    bases = {name.rpartition(".")[0] for name in every}
    usual = family.prefix or "model."
    table, layer = (family.names[role].removeprefix(usual) for role in ("embed", "layer"))
    first = layer.partition("{}")[0]
    roots = {base.removesuffix(table) for base in bases if base == table or base.endswith(f".{table}")}
    roots = {root for root in roots if any(name.startswith(root + first) for name in every)}
    if not roots:
        return None
    root = min(roots, key=lambda root: (not root.startswith(hint), len(root), root))
    head = _head(root, family, bases)
    kept = {name for name in every if name.startswith((root, f"{head}."))}
    if root in ("", "model."):  # where other parts are beside it
        own = {
            name.removeprefix(usual).partition(".")[0] for role, name in family.names.items() if name.startswith(usual)
        }
        own |= {head.removeprefix(root).partition(".")[0], (family.mtp.beginning if family.mtp else "").rstrip(".")}
        kept = {name for name in kept if name.removeprefix(root).partition(".")[0] in own}
    return TextNames(root, head, frozenset(kept))


def _head(root: str, family: Family, bases: Collection[str]) -> str:
    """The head's name: beside the decoder, or beside what it lies in."""
    words = root.split(".")[:-1]
    beside = [".".join((*words[:count], "")) for count in range(len(words), -1, -1)]
    asked = (family.names["head"], *family.aliases.get("head", ()))
    return next((way + name for way in beside for name in asked if way + name in bases), asked[0])


def as_found(family: Family, found: TextNames) -> Family:
    """`family` with names as they are in the files of the whole model."""
    heads = (*family.aliases.get("head", ()), found.head)
    usual = family.prefix or "model."
    skipped = tuple(found.root + name.removeprefix(usual) for name in family.skipped)
    return replace(family, nested=(found.root,), aliases={**family.aliases, "head": heads}, skipped=skipped)
