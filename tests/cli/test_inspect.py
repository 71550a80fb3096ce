"""`quire inspect` answers from headers: without torch in every format, with one message for a file it cannot read."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

pytest.importorskip("gguf")

from gguf import GGMLQuantizationType, GGUFReader

from family_formats import FILES
from family_formats import Checkpoint as Written
from gguf_families import FAMILIES, WIDE
from gguf_models import write_gguf
from model_variants import LATENTS as LATENT
from model_variants import SMALL_ENCODER as SMALL
from oracle import backend, write
from quire.cli import main
from quire.core.cache_config import KV_DTYPES
from quire.core.config import flat_config
from quire.core.errors import ConfigError, ModelError
from quire.model.build import kv_layouts
from quire.model.describe import compute_dtype, describe
from quire.model.disk.checkpoint import Checkpoint
from quire.model.mixers.layer_mixers import kv_bytes_per_token, mixer_of
from quire.ops.backend import open_backend
from quire.ops.choice import choose

HEADERS_ONLY = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "transformers", "triton", "starlette"):
            raise ImportError(f"{name} is not for reading headers")

sys.meta_path.insert(0, Refuse())
from quire.cli import main

asked = [["inspect", path, *more] for path in sys.argv[1:] for more in ([], ["-ctk", "fp8"])]
for words in (["--help"], ["--version"], *asked):
    sys.argv = ["quire", *words]
    try:
        main()
    except SystemExit as ended:
        print("ended with", ended.code or 0)
"""
"""Commands in a process that cannot import what takes long."""

Answer = tuple[int, str, str]


@pytest.fixture
def inspect(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Answer]:
    """`inspect(path, "--flag")` -> (exit code, stdout, stderr)."""

    def call(*words: object) -> Answer:
        monkeypatch.setattr(sys, "argv", ["quire", "inspect", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            main()
        return int(ended.value.code or 0), *capsys.readouterr()

    return call


def test_headers_are_read_without_torch(tmp_path: Path) -> None:
    made = Written("llama", tmp_path / "dense")
    for name, (config, convert, _) in FILES.items():
        made.quantized(tmp_path / name, config, convert)
    write(tmp_path / "mixture", FAMILIES["qwen3moe"][0], **FAMILIES["qwen3moe"][1])
    write(tmp_path / "encoder", "t5", **SMALL)
    write_gguf(tmp_path / "q4.gguf", quantize=lambda name: GGMLQuantizationType.Q4_K, **WIDE)
    names = ["dense", *FILES, "mixture", "encoder", "q4.gguf"]
    program = [sys.executable, "-c", HEADERS_ONLY, *(str(tmp_path / name) for name in names)]
    found = subprocess.run(program, check=False, capture_output=True, text=True)
    assert found.returncode == 0 and not found.stderr, found.stderr
    assert found.stdout.count("ended with 0") == 2 + 2 * len(names), found.stdout
    for words in ("gptq int4", "awq int4", "compressed-tensors int4", "bitsandbytes nf4", "gguf Q4_K", "encoder  "):
        assert words in found.stdout


def test_dummy_weights_are_described_without_torch() -> None:
    program = (
        "import sys; from quire.model.describe import describe; describe('', 'dummy'); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


@pytest.mark.parametrize("form", ["auto", "dummy"])
def test_tensors_and_rope_tables_are_read_without_torch(form: str) -> None:
    program = (
        "import sys; from quire.model.describe import open_model; from quire.model.families.rope import shared_tables; "
        f"opened = open_model('', '{form}'); sizes = [opened.source.tensor(x).nbytes for x in opened.source.infos]; "
        "shared_tables(opened.spec.rope, 64); sys.exit('torch' in sys.modules or not all(sizes))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


@pytest.mark.parametrize("family", ["llama", "deepseek_v2"])
def test_the_cache_is_as_large_as_its_layout_says(family: str, tmp_path: Path) -> None:
    write(tmp_path, family, **(LATENT["deepseek_v2"][1] if family == "deepseek_v2" else {}))
    found = describe(str(tmp_path))
    checked = 0
    for name in KV_DTYPES:
        cache, (dtype, _) = flat_config(kv_cache_dtype=name).cache, compute_dtype("auto", found.dtype)
        try:
            layout = kv_layouts(cache, found.spec, dtype, backend("reference"))[0]
        except ConfigError:
            assert family == "deepseek_v2" and name in ("float16", "int8", "fp8")
            continue
        checked += 1
        kept = mixer_of(found.spec, 0).kept_in(cache.kv_cache_dtype, dtype, "reference")
        spec, size = found.spec, kept.itemsize
        keys_and_values = 2 * spec.kv_heads * (spec.head_dim * size + (4 if size == 1 else 0))
        wanted = (spec.mla.rank + spec.mla.rope) * size if family == "deepseek_v2" else keys_and_values
        (part,) = layout
        assert part.bytes_per_token == wanted and kv_bytes_per_token(spec, kept) == spec.layers * wanted, name
    assert checked


def test_what_is_shown_is_what_runs() -> None:
    for name in ("reference", "cpu"):
        device = flat_config(device=name, threads=2, ops=("linear=reference",)).device
        shown, runs = choose(device), open_backend(device)
        assert (shown.backend, shown.isa, shown.threads) == (runs.name, runs.isa, runs.threads)
        assert shown.chosen == runs.chosen and shown.labels["linear"] == "reference"
        assert shown.labels["attention"] == ("reference" if name == "reference" else f"cpu/{runs.isa}")


@pytest.mark.parametrize("form", ["folder", "GGUF"])
def test_windows_are_shown(form: str, inspect: Callable[..., Answer], tmp_path: Path) -> None:
    family, facts = FAMILIES["gemma3"]
    path = tmp_path / "model.gguf" if form == "GGUF" else tmp_path / "model"
    (write_gguf if form == "GGUF" else write)(path, family, **facts)
    code, out, _ = inspect(path, "--device", "reference", "--block-size", "1", "--max-num-batched-tokens", "64")
    rows = dict(line.strip().split("  ", 1) for line in out.splitlines() if line.startswith("  "))
    shown = {name: value.strip() for name, value in rows.items()}
    assert code == 0 and shown["window"] == "0, 5"
    assert shown["block tables"] == "1 of 1 layer (all tokens); 6 of 1 layer (the last 5 tokens)"
    # 256 bytes of a token in a layer: 128 tokens in one layer and 5 in each of six, of 128 in seven
    assert shown["KV cache of a sequence"] == "39.5 KiB at 128 tokens, 224.0 KiB if windows freed nothing"


def linked(path: Path, target: str) -> Path:
    path.unlink(missing_ok=True)
    path.symlink_to(target)
    return path.parent


BAD: dict[str, tuple[Callable[[Path], Path], str]] = {
    "no such path": (lambda made: made / "nowhere", "no such file or folder"),
    "no config": (lambda made: made / "empty", "config.json is missing"),
    "config is no JSON": (lambda made: written(made, "config.json", b"{"), "is not valid JSON"),
    "config is no object": (lambda made: written(made, "config.json", b"[]"), "not a JSON object"),
    "weights are cut": (lambda made: shortened(made / "model.safetensors").parent, "is truncated"),
    "a header that lies": (lambda made: written(made, "model.safetensors", b"\xff" * 64), "is truncated"),
    "no weights": (lambda made: removed(made / "model.safetensors").parent, "has no *.safetensors"),
    "a file of another kind": (lambda made: made / "config.json", "is a file, but not GGUF"),
    "config leads nowhere": (
        lambda made: linked(made / "config.json", "/no/x"),
        "config.json is a symbolic link to /no/x",
    ),
    "weights lead nowhere": (
        lambda made: linked(made / "model.safetensors", "/no/x"),
        "link to /no/x, which is not there",
    ),
    "defaults lead nowhere": (lambda made: linked(made / "generation_config.json", "/no/x"), "link to /no/x"),
    "config has no end": (
        lambda made: linked(made / "generation_config.json", "/dev/zero"),
        "larger than 16,777,216 bytes",
    ),
    "GGUF is cut": (lambda made: shortened(made / "model.gguf"), "model.gguf"),
    "GGUF is a name only": (lambda made: written(made, "model.gguf", b"GGUF") / "model.gguf", "model.gguf"),
}


def written(folder: Path, name: str, content: bytes) -> Path:
    (folder / name).write_bytes(content)
    return folder


def shortened(path: Path) -> Path:
    path.write_bytes(path.read_bytes()[:-100])
    return path


def removed(path: Path) -> Path:
    path.unlink()
    return path


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sound") / "made"
    write(folder, "llama")
    (folder / "empty").mkdir()
    write_gguf(folder / "model.gguf")
    return folder


@pytest.mark.parametrize("case", BAD)
def test_a_bad_file_is_one_message(case: str, sound: Path, inspect: Callable[..., Answer], tmp_path: Path) -> None:
    damage, words = BAD[case]
    code, out, err = inspect(damage(Path(shutil.copytree(sound, tmp_path / "copy"))))
    assert (code, out) == (2, "")
    assert err.startswith("quire: ") and err.count("\n") == 1 and words in err, err


def test_a_file_that_is_replaced_after_its_header_was_read_is_named(sound: Path, tmp_path: Path) -> None:
    shutil.copytree(sound, tmp_path / "copy")
    checkpoint = Checkpoint(tmp_path / "copy")
    save_file({"other": torch.zeros(2)}, tmp_path / "copy" / "model.safetensors")
    with pytest.raises(ModelError, match=r"model\.safetensors was changed while it was read"):
        checkpoint.tensor("model.norm.weight")


def test_json_has_metadata_and_tensors(inspect: Callable[..., Answer], tmp_path: Path) -> None:
    family, facts = FAMILIES["llama"]
    path = tmp_path / "model.gguf"
    write_gguf(path, family, **facts)
    code, out, err = inspect(path, "--json")
    assert code == 0, err
    found, read = json.loads(out), GGUFReader(path)
    assert set(found["metadata"]) == {key for key in read.fields if not key.startswith("GGUF.")}
    assert found["metadata"]["general.architecture"] == "llama"
    theirs = {t.name: (t.tensor_type.name, [int(n) for n in reversed(t.shape)]) for t in read.tensors}
    assert {t["name"]: (t["type"], t["shape"]) for t in found["tensors"]} == theirs
    assert found["model"]["family"] == "llama" and "KV cache" in found["memory"] and found["ops"]
    code, out, _ = inspect("pydoc", "--json")
    found = json.loads(out)
    assert code == 0 and {"name": "model.norm.weight", "type": "bfloat16", "shape": [256]} in found["tensors"]
    assert found["metadata"]["hidden_size"] == 256
