"""SmolLM2-135M-Instruct as a float32 folder, and three texts on which its formats and compressions are compared.

What `quire pull smollm2` gets is a GGUF file of Q4_1 blocks, 32 columns of 16 levels with a scale and a minimum each;
embedding and head are Q8_0. The float32 model is what these blocks say, so Q4_1 and Q8_0 lose less of it, and other
formats of 4 bits more, than of weights that were never quantized.

Texts, each the first `LENGTH` tokens: prose and code of those that passports are measured on (a novel; Python of this
repository), and a dialogue that the model wrote itself (`benchmarks/common/dialogue.py`, held-out topics).
"""

from __future__ import annotations

import json
from pathlib import Path

import torch

from quire.bench.quality import general_heldout
from quire.compress.checkpoint.dequantized import as_plain_checkpoint
from quire.compress.checkpoint.tensors import CheckpointTensors
from quire.compress.checkpoint.writer import write_folder
from quire.model.describe import open_model
from quire.model.disk.checkpoint import resolve
from quire.store.pull import ensure
from quire.text.template import ChatTemplate
from quire.text.tokenizer import Tokenizer

LENGTH = 2048
DIALOGUE = Path(__file__).parent / "smollm2_dialogue.jsonl"


def float32_folder(work: Path) -> Path:
    """The folder below `work`, made when it is missing; pulls the model when it is not here."""
    out = work / "smollm2-f32"
    if not out.exists():
        work.mkdir(parents=True, exist_ok=True)
        file = resolve(ensure("smollm2"))
        plain = as_plain_checkpoint(open_model(str(file)))
        tensors = CheckpointTensors(plain.base, torch.float32)
        write_folder(out, tensors, plain.config, file, torch.float32)
    return out


def texts(folder: Path) -> dict[str, list[int]]:
    """Name -> `LENGTH` tokens."""
    tokenizer, general = Tokenizer.from_folder(folder), general_heldout()
    found = {
        name: tokenizer.encode(general[part], add_special_tokens=False)
        for name, part in (("prose", "novel"), ("code", "code"))
    }
    found["dialogue"] = [token for said in dialogue_tokens(folder, DIALOGUE) for token in said]
    for name, ids in found.items():
        assert len(ids) >= LENGTH, f"{name} has {len(ids)} tokens"
    return {name: ids[:LENGTH] for name, ids in found.items()}


def strings(folder: Path) -> dict[str, str]:
    """The same texts as characters."""
    tokenizer = Tokenizer.from_folder(folder)
    return {name: tokenizer.decode(ids, skip_special_tokens=False) for name, ids in texts(folder).items()}


def dialogue_tokens(folder: Path, file: Path) -> list[list[int]]:
    """Tokens of each conversation of a file, as the model's chat template writes it."""
    template = ChatTemplate.from_folder(folder, Tokenizer.from_folder(folder))
    assert template is not None
    rows = [json.loads(line)["messages"] for line in file.read_text().splitlines()]
    return [template.encode(messages, add_generation_prompt=False) for messages in rows]
