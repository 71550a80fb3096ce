"""Latent attention: its ops on every instruction set, and models with it against transformers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

from model_variants import LATENT_GROUPS as GROUPS
from model_variants import LATENT_SIZES as SIZES
from model_variants import LATENTS as VARIANTS
from op_cases import CASES, of_module
from op_cases.mla import beside_others, latent_case
from op_runs import UNITS_HERE, close, copied, generator, ops_of, reference, run
from oracle import BACKENDS, backend, edit_config, logits, random_model, relative_error, write
from paged_model import CUTS, TOLERANCE, Paged, assert_left_out, load, prompt
from paged_model import ops as ops
from quire.core.dtypes import BF16, F32, Dtype
from quire.core.errors import ConfigError, ModelError
from quire.model.describe import describe
from quire.model.disk.hf_config import HfConfig
from quire.model.families.mixtures import deepseek_v3
from quire.model.families.names import naked
from quire.model.families.row import Family
from quire.model.families.table import FAMILIES
from quire.model.load.roles import ROLES
from quire.model.mixers.layer_mixers import kv_bytes_per_token
from quire.ops.backend import Ops
from quire.ops.latents import LatentHeads, LatentLayout

__all__ = ["ops"]
OPS = of_module("mla")


@pytest.mark.parametrize("isa", UNITS_HERE)
@pytest.mark.parametrize("name", OPS)
def test_equals_the_reference(name: str, isa: str) -> None:
    for case in CASES[name](generator()):
        exact = "cache" not in case or case["cache"].layout.dtype == F32
        for found, expected in zip(run(ops_of(isa), name, case), run(reference(), name, case), strict=True):
            close(f"{name}/{isa}", found, expected, 2e-5 if exact else 2e-2)


@pytest.mark.parametrize("isa", UNITS_HERE)
@pytest.mark.parametrize(("sinks", "window"), [(False, 0), (True, 0), (True, 33), (False, 600)])
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_a_row_does_not_depend_on_the_batch(dtype: Dtype, sinks: bool, window: int, isa: str) -> None:
    ops, rows = ops_of(isa), ((40, 1100), (3, 3), (1, 700))
    case = latent_case(generator(), LatentLayout(16, 1, 16, dtype, rank=32), 6, 24, rows, sinks, window)
    ops.begin_step()
    whole = ops.latent_attention(**case).clone()
    begin = 0
    for s, (count, context) in enumerate(rows):
        for first, last in ((0, 1), (count // 2, count), (count - 1, count)):
            ops.begin_step()
            at = slice(begin + first, begin + last)
            part = ops.latent_attention(
                case["latent"][at], case["q"][at], case["cache"],
                torch.tensor([0, last - first], dtype=torch.int32),
                torch.tensor([context - count + last], dtype=torch.int32),
                case["block_tables"][s : s + 1].contiguous(), case["reads"],
            )  # fmt: skip
            assert torch.equal(part, whole[at]), (s, first, last)
        begin += count


@pytest.mark.parametrize("isa", UNITS_HERE)
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_a_sink_takes_its_share_of_a_row(dtype: Dtype, isa: str) -> None:
    """With one token the softmax is 1 / (1 + exp(sink - score)), and the head's result the latent times that."""
    case = latent_case(generator(), LatentLayout(16, 1, 16, dtype, rank=32), 3, 24, ((1, 1),), sinks=True)
    ops, reads = ops_of(isa), case["reads"]
    with_sinks, without = (
        run(ops, "latent_attention", case | {"reads": one})[0].view(3, 32)
        for one in (reads, replace(reads, sinks=None))
    )
    row = case["block_tables"][0, 0]
    token = torch.cat((case["cache"].values[row, 0], case["cache"].keys[row, 0])).float()
    query = torch.cat((case["latent"].view(3, 32), case["q"].view(3, 24)[:, -16:]), 1)
    share = torch.sigmoid(query @ token * reads.scale - reads.sinks)
    close(isa, with_sinks, without * share[:, None], 2e-5 if dtype == F32 else 2e-2)


@pytest.mark.parametrize("isa", [*UNITS_HERE, "reference"])
def test_a_row_reads_its_window_as_if_there_were_nothing_before_it(isa: str) -> None:
    ops, window = reference() if isa == "reference" else ops_of(isa), 64
    case = latent_case(generator(), LatentLayout(16, 1, 16, F32, rank=32), 3, 24, ((1, 256),), window=window)
    short = case | {
        "reads": replace(case["reads"], window=0),
        "block_tables": case["block_tables"][:, 12:].contiguous(),
    }
    want = run(ops, "latent_attention", short | {"context": torch.tensor([window], dtype=torch.int32)})[0]
    close(isa, run(ops, "latent_attention", case)[0], want, 2e-5)


def test_chosen_tokens_have_no_window() -> None:
    case = latent_case(generator(), LatentLayout(16, 1, 16, F32, rank=32), 3, 24, ((1, 5),), window=3)
    chosen = replace(case["reads"], chosen=torch.zeros((1, 2), dtype=torch.int32))
    with pytest.raises(Exception, match="latent_attention: chosen tokens have no window"):
        ops_of("auto").latent_attention(**case | {"reads": chosen})


def test_sinks_are_one_for_each_head() -> None:
    case = latent_case(generator(), LatentLayout(16, 1, 16, F32, rank=32), 3, 24, ((1, 5),), sinks=True)
    for wrong in (torch.zeros(2), torch.zeros(3, dtype=torch.float64)):
        with pytest.raises(ValueError, match="latent_attention sinks"):
            ops_of("auto").latent_attention(**case | {"reads": replace(case["reads"], sinks=wrong)})


@pytest.mark.parametrize("isa", [*UNITS_HERE, "reference"])
@pytest.mark.parametrize("size", [1, 16])
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_blocks_may_lie_apart(dtype: Dtype, size: int, isa: str) -> None:
    """As they do where layers of other groups have the rest of a block."""
    ops = reference() if isa == "reference" else ops_of(isa)
    layout = LatentLayout(size, 1, 16, dtype, rank=32)
    case = latent_case(generator(), layout, 6, 24, ((40, 600), (1, 70)))
    apart, others = beside_others(case["cache"])
    ops.begin_step()
    want = ops.latent_attention(**case).clone()
    ops.begin_step()
    assert torch.equal(ops.latent_attention(**case | {"cache": apart}), want)
    written = {
        "q": case["q"], "kv": torch.randn(41, 48, generator=generator(2)), "table": torch.rand(50, 2, 8),
        "positions": torch.arange(41, dtype=torch.int32), "slots": torch.randperm(2 * 41, generator=generator(3))[:41],
        "heads": LatentHeads(6, torch.rand(32)),
    }  # fmt: skip
    for cache in (case["cache"], apart):
        ops.begin_step()
        ops.latent_rope_and_cache(**{name: copied(value) for name, value in written.items()}, cache=cache)
    for kept, held in ((case["cache"].keys, apart.keys), (case["cache"].values, apart.values)):
        assert torch.equal(kept.nan_to_num(), held.nan_to_num()) and not kept.isnan().all()
    assert all(bool((part == 255).all()) for part in others)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_transformers_however_cut(variant: str, ops: Ops, tmp_path: Path) -> None:
    family, facts = VARIANTS[variant]
    oracle = write(tmp_path, family, **facts)
    sequences = [prompt(19, 1), prompt(7, 2), prompt(1, 3)]
    want = [logits(oracle, s) for s in sequences]
    for block_size in (1, 16):
        model = load(tmp_path, ops, block_size=block_size)
        for name, cut in CUTS.items():
            for got, expected in zip(Paged(model, sequences).run(cut), want, strict=True):
                assert relative_error(got, expected) <= TOLERANCE, (block_size, name)


def with_sinks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> PreTrainedModel:
    """Write a DeepSeek-V3 whose heads have sinks, which its row is told of; its attention in transformers is that of
    gpt-oss, which reads them."""
    module = "transformers.models.{0}.modeling_{0}.eager_attention_forward".format
    monkeypatch.setattr(module("deepseek_v3"), eager_attention_forward)
    oracle = random_model("deepseek_v3", **SIZES, **GROUPS)
    g = generator(4)
    for layer in oracle.model.layers:
        layer.self_attn.sinks = torch.nn.Parameter(torch.randn(oracle.config.num_attention_heads, generator=g) * 2)
    oracle.save_pretrained(folder)

    def row(config: HfConfig) -> Family:
        own = deepseek_v3(config)
        return replace(
            own,
            names={**own.names, "sinks": "self_attn.sinks"},
            required=(*own.required, "sinks"),
            rewrites=(*naked(("self_attn",), ("sinks",)), *own.rewrites),
        )

    monkeypatch.setitem(FAMILIES, "deepseek_v3", row)
    return oracle


def test_logits_of_a_model_with_sinks_equal_transformers_however_cut(
    ops: Ops, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    oracle = with_sinks(tmp_path, monkeypatch)
    sequences = [prompt(19, 1), prompt(7, 2), prompt(1, 3)]
    want = [logits(oracle, s) for s in sequences]
    for cut in CUTS.values():
        for got, expected in zip(Paged(load(tmp_path, ops), sequences).run(cut), want, strict=True):
            assert relative_error(got, expected) <= TOLERANCE
    for layer in oracle.model.layers:
        layer.self_attn.sinks.data.fill_(-torch.inf)
    assert relative_error(logits(oracle, sequences[0]), want[0]) > 100 * TOLERANCE


@pytest.mark.sampled(5)
@pytest.mark.parametrize("variant", VARIANTS)
def test_dummy_weights_and_reports_fit(variant: str, tmp_path: Path) -> None:
    family, facts = VARIANTS[variant]
    oracle = write(tmp_path, family, **facts)
    found, made = describe(str(tmp_path)), describe(str(tmp_path), load_format="dummy")
    moe = found.spec.moe
    unused = 2 * moe.idle * sum(moe.sparse)  # matrices that transformers has for what is no expert
    assert made.parameters == found.parameters and made.tensors + unused == found.tensors
    tied = found.spec.tied_head * found.spec.vocab_size * found.spec.embed_width
    numbers = sum(p.numel() for p in oracle.state_dict().values()) - unused * moe.intermediate * found.spec.hidden
    assert found.parameters == numbers - tied
    sizes = [int(torch.Size(ROLES[r].shape(found.spec)).numel()) * ROLES[r].copies(found.spec) for r in found.roles]
    assert 0.98 * found.parameters <= sum(sizes) - tied <= found.parameters
    (got,) = Paged(load(tmp_path, backend("reference"), load_format="dummy"), [prompt(9, 1)]).run([[9]])
    assert bool(torch.isfinite(got).all())


def test_a_token_costs_a_latent_and_a_rotated_key(tmp_path: Path) -> None:
    write(tmp_path, "deepseek_v3", **SIZES, **GROUPS)
    model = load(tmp_path, backend("reference"))
    assert sum(layout.bytes_per_token for parts in model.layouts for layout in parts) == 3 * (32 + 8) * 4
    assert kv_bytes_per_token(model.spec, BF16) == describe(str(tmp_path)).kv_bytes_per_token == 3 * (32 + 8) * 2
    cache = model.decoder.ops.allocate_cache(model.layouts[0][0], 5)
    assert (cache.keys.nbytes + cache.values.nbytes) == 5 * 16 * model.layouts[0][0].bytes_per_token
    with pytest.raises(ConfigError, match="latents are kept in"):
        load(tmp_path, backend("reference"), kv_cache_dtype="int8")


@pytest.mark.skipif("cpu" not in BACKENDS, reason="quire._native is not built")
@pytest.mark.parametrize("options", [{"dtype": "float32"}, {"dtype": "bfloat16"}, {"quantization": "int8"}])
def test_native_logits_are_bit_equal_however_cut(options: dict[str, Any], tmp_path: Path) -> None:
    whole_groups = {"q_lora_rank": 64, "v_head_dim": 24, "num_attention_heads": 8}
    write(tmp_path, "deepseek_v3", **SIZES | GROUPS | whole_groups, dtype=torch.bfloat16)
    model = load(tmp_path, backend("cpu"), **options)
    assert model.report["kv_b"][0] == ("f32" if options.get("dtype") == "float32" else "bf16")
    sequences = [prompt(19, 1), prompt(7, 2), prompt(1, 3)]
    want = Paged(model, sequences).run(CUTS["whole"])
    for seed, cut in enumerate(CUTS.values()):
        for got, expected in zip(Paged(model, sequences, seed).run(cut), want, strict=True):
            assert torch.equal(got, expected)
    assert_left_out(Paged(model, [sequences[0][:9]]), want[0][:9], exact=True)


def test_layers_that_predict_ahead_are_left_out(tmp_path: Path) -> None:
    write(tmp_path, "deepseek_v3", **SIZES | GROUPS | {"num_hidden_layers": 3})
    edit_config(tmp_path, num_hidden_layers=2, num_nextn_predict_layers=1)
    model = load(tmp_path, backend("reference"))
    assert len(model.decoder.layers) == 2
    assert not any("are ignored" in note for note in model.notes)
    edit_config(tmp_path, num_hidden_layers=2, num_nextn_predict_layers=0)
    assert any("layers 2 " in note and "are ignored" in note for note in describe(str(tmp_path)).notes)


@pytest.mark.parametrize(
    ("field", "value"),
    [("moe_layer_freq", 2), ("n_group", 3), ("kv_lora_rank", 24), ("topk_group", 9), ("num_experts_per_tok", 7)],
)
def test_what_cannot_be_computed_is_refused(field: str, value: int, tmp_path: Path) -> None:
    write(tmp_path, "deepseek_v3", **SIZES, **GROUPS)
    edit_config(tmp_path, **{field: value})
    with pytest.raises(ModelError, match=field if field != "num_experts_per_tok" else "n_group"):
        describe(str(tmp_path))
