"""Models without a row in the table, by transformers' code: the same logits and invariants, or the reason why not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from hidden_rows import hide_rows
from model_variants import BORROWED as VARIANTS
from model_variants import HEADS, PLAIN_ROPE
from oracle import BACKENDS, backend, edit_config, logits, relative_error, write
from paged_model import CUTS, TOLERANCE, Paged, load, prompt
from quire import LLM, SamplingParams
from quire.cli.app import app
from quire.core.dtypes import BF16
from quire.core.errors import ConfigError, ModelError
from quire.model.describe import describe
from quire.model.transformers_backend import detect
from quire.model.transformers_backend.detect import find_borrowed

SEQUENCES = [prompt(19, 1), prompt(7, 2), prompt(1, 3)]


@pytest.fixture(autouse=True)
def _no_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever families have rows by now: those of the tests run by the code of transformers."""
    hide_rows(monkeypatch, *(family for family, *_ in (*VARIANTS.values(), *REFUSED.values())))


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "variant",
    [pytest.param(v, marks=[pytest.mark.slow] if v == "heads_of_unlike_sizes" else []) for v in VARIANTS],
)
def test_logits_equal_transformers_and_do_not_depend_on_the_batch(variant: str, tmp_path: Path) -> None:
    family, facts = VARIANTS[variant]
    oracle = write(tmp_path, family, **facts)
    want = [logits(oracle, s) for s in SEQUENCES]
    for name in BACKENDS:
        model = load(tmp_path, backend(name), block_size=16 if name == "cpu" else 1)
        whole = Paged(model, SEQUENCES).run(CUTS["whole"])
        for cut_name, cut in CUTS.items():
            for got, expected, first in zip(Paged(model, SEQUENCES, 3).run(cut), want, whole, strict=True):
                assert relative_error(got, expected) <= TOLERANCE, (name, cut_name)
                assert name == "reference" or torch.equal(got, first), (name, cut_name)


def greedy(llm: LLM, prompts: list[list[int]]) -> list[tuple[tuple[int, ...], float]]:
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, detokenize=False, logprobs=0)
    found = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    return [(tuple(f.outputs[0].token_ids), f.outputs[0].cumulative_logprob) for f in found]


@pytest.mark.skipif("cpu" not in BACKENDS, reason="quire._native is not built")
@pytest.mark.slow
def test_batches_prefixes_chunks_and_preemption_change_nothing(tmp_path: Path) -> None:
    family, facts = VARIANTS["heads_of_unlike_sizes"]
    write(tmp_path, family, **facts)
    prompts = [prompt(9 + 3 * i, i) for i in range(6)] + [prompt(9, 0) + prompt(5, 9)]
    with LLM(tmp_path, num_blocks=200, block_size=4, enable_prefix_caching=False) as llm:
        alone = [greedy(llm, [p])[0] for p in prompts]
    with LLM(tmp_path, num_blocks=20, block_size=4, max_num_seqs=5, max_num_batched_tokens=16) as llm:
        assert greedy(llm, prompts) == alone
        assert greedy(llm, prompts) == alone, "with a warm prefix cache"
        stats = llm.engine.engine.stats()
        assert stats.preemptions > 0 and stats.prefix_hits > 0


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_matrices_are_quantized_at_load(quantization: str, tmp_path: Path) -> None:
    oracle = write(tmp_path, "hunyuan_v1_dense", **HEADS)
    model = load(tmp_path, backend(BACKENDS[-1]), quantization=quantization)
    assert model.report["matrices"][0] == f"{quantization} g32"
    (got,) = Paged(model, SEQUENCES[:1]).run([[19]])
    assert 1e-4 < relative_error(got, logits(oracle, SEQUENCES[0])) <= (0.05 if quantization == "int8" else 0.5)


def test_a_16_bit_file_is_served_in_16_bits(tmp_path: Path) -> None:
    oracle = write(tmp_path, "apertus", **PLAIN_ROPE, dtype=torch.bfloat16)
    model = load(tmp_path, backend(BACKENDS[-1]))
    assert model.dtype == "bfloat16" and model.layouts[0][0].dtype == BF16
    (got,) = Paged(model, SEQUENCES[:1]).run([[19]])
    assert relative_error(got, logits(oracle, SEQUENCES[0])) <= 0.05


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "state": ("rwkv", {}, "state is not keys and values"),
    "linear_attention": ("minimax", HEADS, "linear_attention"),
    "own_attention": ("xglm", {}, "attention interface"),
    "own_mask": ("doge", HEADS, "mask or bias of its own"),
    "two_in_one": ("diffllama", {}, "more than once"),
    "rope": ("apertus", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "dynamic"),
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_run_is_refused_with_the_reason(case: str, tmp_path: Path) -> None:
    family, facts, reason = REFUSED[case]
    write(tmp_path, family, **facts)
    with pytest.raises(ModelError, match=reason):
        load(tmp_path, backend("reference"))


def test_state_beside_the_cache_is_found_by_the_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.apertus import modeling_apertus

    write(tmp_path, "apertus", **PLAIN_ROPE)
    plain = modeling_apertus.ApertusMLP.forward

    def mixes_neighbours(self: Any, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = plain(self, x)
        return y + y.roll(1, 1)

    monkeypatch.setattr(modeling_apertus.ApertusMLP, "forward", mixes_neighbours)
    with pytest.raises(ModelError, match="depends on more than keys, values and positions"):
        load(tmp_path, backend("reference"))


def test_bad_folders_are_named(tmp_path: Path) -> None:
    write(tmp_path, "apertus", **PLAIN_ROPE)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    save_file({k: v for k, v in tensors.items() if "layers.1.mlp.up_proj" not in k}, path, {"format": "pt"})
    with pytest.raises(ModelError, match=r"missing keys: model\.layers\.1\.mlp\.up_proj"):
        load(tmp_path, backend("reference"))
    save_file(tensors | {"extra": torch.zeros(1)}, path, {"format": "pt"})
    with pytest.raises(ModelError, match="unexpected keys: extra"):
        load(tmp_path, backend("reference"))
    save_file(tensors, path, {"format": "pt"})
    edit_config(tmp_path, quantization_config={"quant_method": "gptq", "bits": 4})
    with pytest.raises(ModelError, match="is quantized"):
        describe(str(tmp_path))
    edit_config(tmp_path, remove=("quantization_config",), num_hidden_layers="three")
    with pytest.raises(ModelError, match=r"config\.json: transformers cannot read it"):
        describe(str(tmp_path))


@pytest.mark.parametrize("option", [{"enable_lora": True}, {"cache_packed": "somewhere"}, {"load_format": "dummy"}])
def test_options_of_the_table_are_refused(option: dict[str, Any], tmp_path: Path) -> None:
    write(tmp_path, "apertus", **PLAIN_ROPE)
    with pytest.raises(ConfigError, match="needs a family of the table"):
        load(tmp_path, backend("reference"), **option)


def test_inspect_says_that_it_is_the_slow_path(tmp_path: Path) -> None:
    write(tmp_path, "apertus", **PLAIN_ROPE)
    shown = CliRunner().invoke(app, ["inspect", str(tmp_path)])
    assert shown.exit_code == 0 and shown.output.count("slow path") == 1 and "apertus" in shown.output


HEADERS_ONLY = """
import resource, sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "torch" or name.startswith("transformers."):
            raise ImportError(f"{name} is not for reading headers")

sys.meta_path.insert(0, Refuse())
from quire.cli import main
from quire.model.families.table import FAMILIES

FAMILIES.pop(sys.argv.pop(1), None)
sys.argv = ["quire", "inspect", *sys.argv[1:]]
try:
    main()
except SystemExit as ended:
    used = resource.getrusage(resource.RUSAGE_SELF)
    print("ended with", ended.code or 0, "after", used.ru_utime + used.ru_stime)
"""
"""inspect in a process that cannot import what takes long."""


@pytest.mark.sampled(4)
@pytest.mark.parametrize("variant", VARIANTS)
def test_headers_say_what_the_code_says_without_importing_it(variant: str, tmp_path: Path) -> None:
    family, facts = VARIANTS[variant]
    write(tmp_path, family, **facts)
    told, loaded = describe(str(tmp_path)), find_borrowed(tmp_path)
    assert loaded is not None and told.spec == loaded.spec and told.notes == loaded.notes
    run = [sys.executable, "-c", HEADERS_ONLY, family, str(tmp_path), "--device", "cpu"]
    done = subprocess.run(run, capture_output=True, text=True, check=True)
    seconds = float(done.stdout.rpartition("after")[2])
    assert "ended with 0" in done.stdout and "slow path" in done.stdout and seconds < 1.0, done.stdout + done.stderr


def test_without_transformers_the_way_out_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "apertus", **PLAIN_ROPE)
    monkeypatch.setattr(detect, "package", lambda: None)
    with pytest.raises(ModelError, match=r"quire\[transformers\]"):
        describe(str(tmp_path))
