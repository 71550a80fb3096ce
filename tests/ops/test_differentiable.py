"""The differentiable backend: each op equals its definition on its own cases, writes nowhere, and has gradients."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from op_cases import CASES
from op_cases.moe import plain_grouped, random_ids
from op_cases.recurrent import delta_case, delta_spec, scan_case, scan_spec, state_batch
from op_cases.reference import attention_case
from op_runs import close, copied, generator, reference, tensors
from oracle import MODEL_OPS
from quire.core.dtypes import F32, F64
from quire.ops.attention_spec import AttentionSpec
from quire.ops.autograd_cache import AutogradCache
from quire.ops.backend import Ops
from quire.ops.convolution import Convolution, RowLayout
from quire.ops.differentiable import MatrixSite, differentiable
from quire.ops.entries import EntryLayout
from quire.ops.experts import Grouped
from quire.ops.indexer import IndexLayout
from quire.ops.latents import LatentLayout
from quire.ops.layout import KVCache, KVLayout
from quire.ops.op import REGISTRY, Case
from quire.ops.reference.caches import logical
from quire.ops.reference.experts import sort_by_expert
from quire.ops.weights import Packed, Weight, plain_packed

TOLERANCE = 1e-5
OPS = ("activation", "add", "add_layernorm", "add_positions", "add_rmsnorm", "attention", "causal_conv",
       "choose_blocks", "choose_pooled", "choose_tokens", "clamped_swiglu", "clip", "combine", "delta_rule",
       "embedding", "entry_attention", "expert_mlp", "gate_values",
       "gated_activation", "gated_mlp", "gated_rmsnorm", "grouped_linear", "head_linear",
       "index_rope_and_cache", "join_columns", "latent_attention", "latent_rope_and_cache",
       "layernorm", "linear", "lora", "lora_expand", "lora_scale", "match_lengths", "mix_streams", "ngram_rows",
       "norm_spans", "pick_rows", "place_columns",
       "plain_mlp", "pool_entries", "pool_keys", "rmsnorm", "rope_and_cache", "rope_queries", "route",
       "route_by_token", "scale", "scale_by_sigmoid", "scale_by_softplus",
       "scale_choices", "scale_columns", "scale_rows", "sinkhorn_gates", "softcap", "sparse_gate",
       "sort_by_expert", "ssm_scan", "take_columns", "take_rows", "xielu")  # fmt: skip
"""What decoders, encoders, experts, latents and adapters call."""


def plain(value: Any) -> bool:
    """Whether the definition rounds no activations for it."""
    if isinstance(value, Grouped):
        return plain(value.packed.plain)
    if isinstance(value, Packed):
        return plain(value.plain)
    return not isinstance(value, Weight) or value.kind in ("f32", "bf16_f32") or value.activation_bits == 0


def fits(name: str, case: Case) -> bool:
    """Whether the case is of what the backend is for."""
    tree = case.get("tree")
    f32 = "cache" not in case or not name.endswith("_cache") or case["cache"].layout.dtype == F32
    return all(plain(v) for v in case.values()) and f32 and (tree is None or not bool(tree.any()))


def held(cache: KVCache) -> AutogradCache:
    """The same rows, each in its slot."""
    made, size = AutogradCache.of(cache.layout), cache.layout.block_size
    slots = torch.arange(len(cache.keys) * size)
    if isinstance(cache.layout, EntryLayout):
        ends = torch.arange(1, cache.layout.entries + 1) * min(cache.layout.every, size) - 1
        slots = (torch.arange(len(cache.keys))[:, None] * size + ends).flatten()
    if isinstance(cache.layout, IndexLayout):
        made.put(slots, cache.keys.flatten(0, 1).float(), torch.empty(len(slots), 0))
    elif isinstance(cache.layout, LatentLayout):
        made.put(slots, cache.keys.flatten(0, 1).float(), cache.values.flatten(0, 1).float())
    else:
        keys, values = (t.transpose(1, 2).flatten(0, 1) for t in logical(cache, torch.arange(len(cache.keys))))
        made.put(slots, keys, values)
    return made


def arguments(case: Case, ops: Ops, holds: bool) -> Case:
    packed = {k: ops.pack(v) if isinstance(v, Weight) else copied(v) for k, v in case.items()}
    return {k: held(v) if holds and isinstance(v, KVCache) else v for k, v in packed.items()}


@pytest.mark.parametrize("name", OPS)
def test_equals_the_definition_and_writes_nowhere(name: str) -> None:
    ops, definition, count = differentiable(), REGISTRY[name], 0
    for case in CASES[name](generator()):
        if not fits(name, case):
            continue
        count += 1
        args, own = arguments(case, reference(), False), arguments(case, ops, True)
        want = tensors(definition.reference(**args))
        before = [t.clone() for t in tensors(list(own.values()))]
        got = tensors(getattr(ops, name)(**own))
        for t, kept in zip(tensors(list(own.values())), before, strict=True):
            assert torch.equal(t.nan_to_num(), kept.nan_to_num())
        if name == "rope_and_cache":  # the rotated keys are the cache's alone in the definition
            d, hk = case["cache"].layout.head_dim, case["cache"].layout.kv_heads
            got, want = ([t[:, : t.shape[1] - 2 * hk * d] for t in found] for found in (got, want))
        if name.endswith("_and_cache"):
            _, keys, values = own["cache"].rows()
            place, slots = own["cache"].rows()[0], case["slots"]
            filled = held(args["cache"]).rows()
            got += [keys[place[slots]], values[place[slots]]]
            want += [filled[1][slots], filled[2][slots]]
        for g, w in zip(got, want, strict=True):
            close(name, g.float(), w.float(), TOLERANCE)
    assert count > 0


def test_no_op_that_a_decoder_calls_is_left_out() -> None:
    assert set(OPS) == MODEL_OPS


@pytest.mark.parametrize("kind", ["delta", "channels", "mamba2", "mamba1"])
def test_gradients_of_recurrences(kind: str) -> None:
    """Those of finite differences, of rows and of the state they begin with."""
    ops, g, batch = differentiable(), generator(), state_batch([3, 2], [0, -1], [[(2, 1)], [(2, 0)]])
    if kind in ("delta", "channels"):
        spec: Any = delta_spec(g, 1, 2, 3, 2, kind == "channels")
        case, name, inputs = delta_case(g, spec, [3, 2], kind == "channels"), "delta_rule", ("qkv", "gates", "decay")
    else:
        spec = scan_spec(g, 1, 4, 3, selective=kind == "mamba1")
        case, name, inputs = scan_case(g, spec, [3, 2], apart=True), "ssm_scan", ("x", "bc", "dt")
    doubled = {field: getattr(spec, field).double() for field in ("a", "dt_bias")}
    spec, states = replace(spec, **doubled), case["states"][:2].double().requires_grad_()
    given = tuple(None if case[part] is None else case[part].double().requires_grad_() for part in inputs)

    def recur(states: Tensor, *rows: Tensor | None) -> tuple[Tensor, Tensor]:
        found: tuple[Tensor, Tensor] = getattr(ops, name)(*rows, states, batch, spec)
        return found

    assert torch.autograd.gradcheck(recur, (states, *given))


@pytest.mark.sampled(5)
@pytest.mark.parametrize("extras", ["", "softcap", "alibi", "bias", "sinks"])
@pytest.mark.parametrize("window", [0, 3, -2])
def test_gradients_of_attention(extras: str, window: int) -> None:
    """Those of finite differences, of queries, keys and values."""
    ops, g = differentiable(), generator()
    case = attention_case(g, KVLayout(1, 2, 4, F32), 4, ((5, 5), (3, 3)), window, extras=extras)
    spec: AttentionSpec = case["spec"]
    rows = torch.randn(8, 8 * 4, generator=g, dtype=torch.float64).requires_grad_()
    slots, still = torch.arange(8), torch.zeros(9, 2, 0, dtype=torch.float64)
    tables = torch.tensor([[0, 1, 2, 3, 4], [5, 6, 7, 0, 0]], dtype=torch.int32)
    lengths = torch.tensor([5, 3], dtype=torch.int32)

    def attend(qkv: Tensor) -> Tensor:
        cache = AutogradCache.of(KVLayout(1, 2, 4, F64))
        turned = ops.rope_and_cache(qkv, slots, still, slots, cache, None, 1.0)
        found: Tensor = ops.attention(turned, cache, torch.tensor([0, 5, 8]), lengths, tables, spec)
        return found

    assert torch.autograd.gradcheck(attend, (rows,))


@pytest.mark.parametrize("gated", [False, True])
def test_gradients_of_a_convolution(gated: bool) -> None:
    """Those of finite differences, of rows, weights and bias; a second chunk reads rows of the first."""
    ops, g, n = differentiable(), generator(), 8
    rows, weight, bias = (
        torch.randn(shape, generator=g, dtype=torch.float64).requires_grad_()
        for shape in ((7, 3 * n if gated else n), (3, n), (n,))
    )
    tables, chunks = torch.tensor([[3, 1, 0]], dtype=torch.int32), ((0, 4), (4, 7))

    def convolve(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        cache, found = AutogradCache.of(RowLayout.of(4, n, F64)), []
        for first, last in chunks:
            at = torch.arange(first, last)
            slots = tables[0, at // 4].long() * 4 + at % 4
            paged = torch.tensor([0, last - first]), torch.tensor([last]), tables
            conv = Convolution(weight, bias, "silu", gated)
            found.append(ops.causal_conv(x[first:last], cache, slots, paged, conv))
        return torch.cat(found)

    assert torch.autograd.gradcheck(convolve, (rows, weight, bias))


def test_rows_over_the_same_keys_see_all_of_them() -> None:
    """As cross attention asks for them: each row a sequence of its own."""
    ops, g, n, m = differentiable(), generator(), 6, 6
    cache = AutogradCache.of(KVLayout(1, 1, 8, F32))
    keys, values = torch.randn(m, 1, 8, generator=g), torch.randn(m, 1, 8, generator=g)
    cache.put(torch.arange(m), keys, values)
    q = torch.randn(n, 8, generator=g)
    got = ops.attention(
        torch.cat((q, torch.zeros(n, 16)), 1), cache, torch.arange(n + 1), torch.full((n,), m),
        torch.arange(m).expand(n, m), AttentionSpec(0.3),
    )  # fmt: skip
    want = (q @ keys[:, 0].t() * 0.3).softmax(-1) @ values[:, 0]
    assert torch.allclose(got, want, atol=1e-6)


def test_observers_see_the_input_of_every_product_and_experts_their_own_rows() -> None:
    ops, g, seen = differentiable(), generator(), list[tuple[str, int | None, int | None, Tensor]]()
    ops.observers.append(lambda *what: seen.append(what))
    x = torch.randn(5, 16, generator=g)
    ops.site = MatrixSite(("q", "k"), 3)
    ops.linear(x, ops.pack(Weight("f32", torch.randn(4, 16, generator=g))), None)
    assert [(role, layer, expert) for role, layer, expert, _ in seen] == [("q", 3, None), ("k", 3, None)]
    assert all(torch.equal(rows, x) for *_, rows in seen)
    seen.clear()
    ops.site = MatrixSite(("expert_down",), 1)
    made = plain_grouped(g, "f32", 4, 16, 16, 0, False)
    assert made.packed.plain is not None
    grouped = Grouped(ops.pack(made.packed.plain), 4, 16, None)
    ids = random_ids(g, 5, 2, 4)
    tokens, _, offsets = sort_by_expert(ids, 4)
    ops.grouped_linear(x, grouped, tokens, offsets)
    assert [expert for _, _, expert, _ in seen] == sorted(set(ids.flatten().tolist()))
    for _, _, expert, rows in seen:
        assert torch.equal(rows, x[(ids == expert).any(1)])


def test_gradients_reach_a_matrix_unrounded_and_quantized_ones_are_frozen() -> None:
    ops, g = differentiable(), generator()
    numbers = torch.randn(6, 32, generator=g).bfloat16().float().requires_grad_()
    x = torch.randn(3, 32, generator=g)
    ops.linear(x, ops.pack_exact(numbers), None).sum().backward()
    assert numbers.grad is not None and torch.allclose(numbers.grad, x.sum(0).expand(6, 32), atol=1e-6)
    codes = torch.randint(-8, 8, (6, 32), generator=g, dtype=torch.int8)
    frozen = Weight("int4", codes, torch.rand(6, 1, generator=g), None, 32)
    x.requires_grad_()
    out = ops.linear(x, plain_packed(frozen), None)
    assert torch.equal(out, x @ frozen.dequantize().t())
    (back,) = torch.autograd.grad(out.sum(), x)
    assert torch.allclose(back, frozen.dequantize().sum(0).expand(3, 32), atol=1e-5)


def test_a_paged_cache_and_branching_drafts_are_refused() -> None:
    ops = differentiable()
    case = attention_case(generator(), KVLayout(1, 1, 8, F32), 1, ((2, 2),))
    with pytest.raises(TypeError, match="AutogradCache"):
        ops.attention(**case)
    with pytest.raises(ValueError, match="branches"):
        ops.attention(**case | {"cache": held(case["cache"]), "tree": torch.tensor([1, 3])})
