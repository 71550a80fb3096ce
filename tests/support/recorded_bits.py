"""Bits of answers that a redesign must not change: `make record` writes them, `make recorded` compares.

Requests of every feature (`parallel_pairs.FEATURES`) and of some ways to be parallel, over every instruction set that
this machine has, each with tokens, ranks and log-probabilities. Weights of tiny models are drawn by torch, which draws
others with other instruction sets: `make` has it use AVX2's, as where the file was made.

What was recorded has ropes of torch's float32 cosines and sines, of which 5 % are one unit in the last place off;
since, they are float64's, rounded, as are those of vision towers and the norms of rows that DoRA divides by. `compare`
therefore puts torch's in their place, in processes of ranks too, so that it shows that nothing else changed;
`compare own` does not.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch

from parallel_pairs import FEATURES, WAYS, Folders, asked_of, found
from paths import DATA, SUPPORT
from quire.core.errors import ConfigError
from quire.model.families.rope import Rope
from quire.model.load import adapter_extension
from quire.model.vision import patch_positions
from quire.ops.native import load_native

FILE = DATA / "recorded_bits.json"
PARALLEL = ("tensor 2", "stages 2", "context 2", "experts 2")
"""Ways that are recorded, of the features that they are most of interest for."""
WITH = ("plain", "int8", "int8 KV", "windows", "experts", "latents", "ngram", "structured", "LoRA", "T5")
BESIDE: dict[str, dict[str, Any]] = {
    "bf16": {"dtype": "bfloat16"},
    "bf16, int4 in groups": {"dtype": "bfloat16", "quantization": "int4", "group_size": 64},
    "two threads": {"threads": 2},
    "one row a step": {"max_num_batched_tokens": 1, "max_num_seqs": 1},
}
"""Options of the plain feature."""


def drawn() -> str:
    """What torch draws here."""
    return hashlib.sha256(torch.randn(4096, generator=torch.Generator().manual_seed(0)).numpy().tobytes()).hexdigest()


def rows() -> list[tuple[str, str, dict[str, Any]]]:
    """Name, feature and options of everything that is recorded, for one instruction set."""
    every = [(feature, feature, dict[str, Any]()) for feature in FEATURES]
    every += [(f"{feature} x {way}", feature, WAYS[way]) for feature in WITH for way in PARALLEL]
    return every + [(f"plain, {name}", "plain", options) for name, options in BESIDE.items()]


def digest(feature: str, options: dict[str, Any], folders: Folders) -> str:
    """Of all answers, in the order of requests; "refused: ..." where the engine does not start."""
    try:
        answers, alone = found(feature, options, folders)
    except ConfigError as error:
        return f"refused: {error.message.replace(str(folders.root), '')}"
    whole = hashlib.sha256()
    for request in asked_of(feature, folders):
        for answer in answers[request.id]:
            whole.update(answer.bits() + repr(answer.reason).encode())
    for answer in alone:
        whole.update(answer.bits())
    return whole.hexdigest()


def isas() -> list[str]:
    """The instruction sets of this machine."""
    native = load_native()
    assert native is not None, "nothing is built"
    return list(native.units())


def by_torch() -> None:
    """Let tables of ropes be those of torch's cosines and sines, and norms of rows torch's."""

    def table(rope: Rope, max_len: int, longest: int = 0) -> Any:
        frequencies = rope.scaling.inverse_frequencies(rope.theta, rope.dim, longest or max_len)
        angles = torch.arange(max_len, dtype=torch.float32)[:, None] * torch.from_numpy(frequencies)
        return (torch.stack((angles.cos(), angles.sin()), 1) * rope.scaling.attention_factor).numpy()

    def norms(x: Any) -> Any:
        return torch.linalg.vector_norm(torch.from_numpy(x), dim=1).numpy()

    def cosines(x: Any) -> Any:
        return torch.from_numpy(np.asarray(x, np.float32)).cos().numpy()

    def sines(x: Any) -> Any:
        return torch.from_numpy(np.asarray(x, np.float32)).sin().numpy()

    Rope.table = table  # type: ignore[method-assign]
    adapter_extension.row_norms = norms
    patch_positions.np = SimpleNamespace(**vars(np) | {"cos": cosines, "sin": sines})  # type: ignore[attr-defined]


@contextmanager
def by_torch_everywhere(folder: Path) -> Iterator[None]:
    """The same here and in every process that is started meanwhile: `folder` gets what they run first."""
    by_torch()
    (folder / "sitecustomize.py").write_text("import recorded_bits\nrecorded_bits.by_torch()\n")
    paths = [str(folder), str(SUPPORT), os.environ.get("PYTHONPATH", "")]
    with mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, paths))):
        yield


def main(words: list[str]) -> int:
    """Record, or `compare`: print what differs."""
    known: dict[str, Any] = json.loads(FILE.read_text()) if FILE.exists() else {"drawn": drawn(), "bits": {}}
    if known["drawn"] != drawn():
        print("torch draws other weights on this processor than where the file was made", file=sys.stderr)
        return 2
    bits, wrong = dict[str, str](), 0
    with tempfile.TemporaryDirectory() as root, ExitStack() as patches:
        if words == ["compare"]:
            patches.enter_context(by_torch_everywhere(Path(root)))
        for isa in isas():
            for name, feature, options in rows():
                key = f"{isa}: {name}"
                bits[key] = digest(feature, options | {"isa": isa}, Folders(Path(root) / isa))
                if words and key in known["bits"] and known["bits"][key] != bits[key]:
                    wrong += 1
                    print(f"{key}: {known['bits'][key]} was, {bits[key]} is", flush=True)
    if not words:
        FILE.write_text(json.dumps({"drawn": known["drawn"], "bits": known["bits"] | bits}, indent=1) + "\n")
    print(f"{len(bits)} rows, {wrong} differ", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
