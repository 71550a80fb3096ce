"""Write which models transformers and llama.cpp have: src/quire/model/families/elsewhere.json.

    python scripts/models_elsewhere.py LLAMA_CPP_FOLDER LLAMA_CPP_VERSION

transformers is the installed one, of which nothing is imported but its lists of names; llama.cpp is a folder of its
sources. Pages and errors that say what does not run read the file, so neither is needed for them.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

OUT = Path(__file__).parents[1] / "src" / "quire" / "model" / "families" / "elsewhere.json"
CAUSAL, SPEAKING = "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES"
ENCODERS = re.compile(r"bert|embedding|^t5|electra|reformer|xlm|roformer|wavtokenizer|clip")


def main(llama: str, version: str) -> None:
    """Write the file."""
    spec = importlib.util.find_spec("transformers")
    if spec is None or spec.origin is None:
        raise SystemExit("transformers is not installed: pip install transformers")
    root = Path(spec.origin).parent / "models"
    lists = _lists(root / "auto" / "modeling_auto.py")
    causal = {name: kind if isinstance(kind, str) else kind[0] for name, kind in lists[CAUSAL].items()}
    defined = _defined(root)
    types = {name: {"class": kind, "why": _why(defined.get(kind), name)} for name, kind in sorted(causal.items())}
    classes = {kind: name for held in (lists[SPEAKING], lists[CAUSAL]) for name, kind in held.items()}
    told = {
        "transformers": {"version": importlib.metadata.version("transformers"), "types": types},
        "llama.cpp": {"version": version, "architectures": dict(_architectures(Path(llama), classes))},
    }
    OUT.write_text(json.dumps(told, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _lists(path: Path) -> dict[str, dict[str, str]]:
    """The mappings of model types to classes, as the file spells them."""
    found: dict[str, dict[str, str]] = {}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and isinstance(node.value, ast.Call):
            name = node.targets[0].id
            if name in (CAUSAL, SPEAKING):
                found[name] = dict(ast.literal_eval(node.value.args[0]))
    return found


def _defined(root: Path) -> dict[str, Path]:
    """Class -> the file that defines it."""
    paths = root.glob("*/modeling_*.py")
    return {name: p for p in paths for name in re.findall(r"^class (\w+)\(", p.read_text(encoding="utf-8"), re.M)}


def _why(path: Path | None, name: str) -> str:
    """Why the model's code cannot run over a cache of keys and values; "" where nothing in its source is against it."""
    if path is None:
        return "its class is not in the package"
    text = path.read_text(encoding="utf-8")
    config = "".join(p.read_text(encoding="utf-8") for p in path.parent.glob("configuration_*.py"))
    if re.search(r"^\s+_is_stateful\s*=\s*True", text, re.MULTILINE):
        return "its layers keep a state that is not keys and values per token"
    if not re.search(r"^\s+_supports_attention_backend\s*=\s*True", text, re.MULTILINE):
        return "its attention does not go through the attention interface of transformers"
    if re.search(r"^\s+is_encoder_decoder\s*(:\s*bool\s*)?=\s*True", config, re.MULTILINE):
        return "it is an encoder and a decoder"
    return "it reads more than text" if "sub_configs" in config and f"{name}_text" not in config else ""


def _architectures(llama: Path, classes: dict[str, str]) -> Iterator[tuple[str, dict[str, object]]]:
    """Architecture -> model types whose folders become such files, and whether it makes vectors instead of text."""
    names = dict(re.findall(r"\{\s*LLM_ARCH_(\w+),\s*\"([^\"]+)\"\s*\}", (llama / "src/llama-arch.cpp").read_text()))
    types: dict[str, set[str]] = {}
    for path in sorted((llama / "conversion").glob("*.py")):
        for registered, body in _registered(path):
            for constant in re.findall(r"model_arch\s*=\s*gguf\.MODEL_ARCH\.(\w+)", body)[:1]:
                types.setdefault(constant, set()).update(classes[c] for c in registered if c in classes)
    for constant, name in names.items():
        if name not in ("clip", "(unknown)"):
            yield name, {"types": sorted(types.get(constant, ())), "encoder": bool(ENCODERS.search(name))}


def _registered(path: Path) -> Iterator[tuple[list[str], str]]:
    """The names that each class of a converter registers, and the text of the class."""
    text = path.read_text(encoding="utf-8")
    for node in ast.parse(text).body:
        if isinstance(node, ast.ClassDef):
            calls = [
                d for d in node.decorator_list if isinstance(d, ast.Call) and ast.unparse(d.func).endswith("register")
            ]
            named = [a.value for call in calls for a in call.args if isinstance(a, ast.Constant)]
            yield [str(name) for name in named], ast.get_source_segment(text, node) or ""


if __name__ == "__main__":
    main(*sys.argv[1:])
