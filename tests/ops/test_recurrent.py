"""Layers with a recurrent state: definitions, transformers' own functions, and bits that no cut changes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from op_cases import CASES, of_module
from op_cases.recurrent import (
    delta_case,
    delta_spec,
    ints,
    scan_case,
    scan_spec,
    state_batch,
)
from op_cases.weights import normal
from op_runs import UNITS_HERE, close, generator, native, ops_of, reference, run
from op_runs import pytestmark as pytestmark
from over_torch import arrays
from quire.core.config import DeviceConfig
from quire.ops.backend import open_backend
from quire.ops.op import REGISTRY, Case
from quire.ops.recurrent import DeltaSpec, ScanSpec
from recurrent_walks import KINDS, ROWS, check_history

OPS = of_module("recurrent")
BACKENDS = ["reference", *UNITS_HERE]


def ops_named(name: str) -> Any:
    return reference() if name == "reference" else ops_of(name)


@pytest.mark.parametrize("isa", UNITS_HERE)
@pytest.mark.parametrize("name", OPS)
def test_equals_the_reference(name: str, isa: str) -> None:
    for case in CASES[name](generator()):
        for found, expected in zip(run(ops_of(isa), name, case), run(reference(), name, case), strict=True):
            close(f"{name}/{isa}", found, expected, REGISTRY[name].tolerance)


# transformers' own functions


def delta_parts(case: Case) -> tuple[Tensor, ...]:
    """Queries, keys, values, logarithms of decays, and beta, as transformers' functions take them."""
    spec: DeltaSpec = case["spec"]
    sizes = (spec.key_heads * spec.key_dim,) * 2 + (spec.value_heads * spec.value_dim,)
    q, k, v = case["qkv"].split(sizes, 1)
    q, k = (part.view(1, len(part), spec.key_heads, spec.key_dim) for part in (q, k))
    nv, rate = spec.value_heads, -spec.a
    given = (case["gates"][:, nv:] if case["decay"] is None else case["decay"]) + spec.dt_bias
    given = given.view(len(given), nv, -1)
    if spec.lower_bound < 0:
        g = spec.lower_bound * torch.sigmoid(rate[:, None] * given)
    else:
        g = -rate[:, None] * F.softplus(given)
    beta = case["gates"][:, :nv].sigmoid()
    return (
        q,
        k,
        v.view(1, len(v), nv, spec.value_dim),
        g[None] if case["decay"] is not None else g[None, ..., 0],
        beta[None],
    )


@pytest.mark.parametrize("name", BACKENDS)
def test_the_delta_rule_is_that_of_qwen3_next(name: str) -> None:
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

    g = generator(3)
    case = delta_case(g, delta_spec(g, 2, 4, 32, 48), [50])
    case["batch"] = state_batch([50], [1], [[(50, 0)]])
    q, k, v, decay, beta = delta_parts(case)
    want, state = torch_recurrent_gated_delta_rule(
        q, k, v, g=decay, beta=beta, initial_state=case["states"][1:2], output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    states, out = run(ops_named(name), "delta_rule", case)[:2]
    close("o", out, want[0].flatten(1), 1e-5)
    close("state", states[0], state[0], 1e-5)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("bound", [0.0, -5.0])
def test_the_delta_rule_with_decays_of_channels_is_kimis(name: str, bound: float) -> None:
    from transformers.models.kimi_linear.modeling_kimi_linear import recurrent_kimi_delta_attention

    g = generator(4)
    case = delta_case(g, delta_spec(g, 3, 3, 32, 32, True, lower_bound=bound), [40], True)
    case["batch"] = state_batch([40], [2], [[(40, 2)]])
    q, k, v, decay, beta = delta_parts(case)
    want, state = recurrent_kimi_delta_attention(
        q, k, v, decay, beta, case["states"][2:3].clone(), True, use_qk_l2norm_in_kernel=True
    )
    states, out = run(ops_named(name), "delta_rule", case)[:2]
    close("o", out, want[0].flatten(1), 1e-5)
    close("state", states[2], state[0], 1e-5)


@pytest.mark.parametrize("name", BACKENDS)
def test_a_scan_is_that_of_mamba_2(name: str) -> None:
    from transformers.models.nemotron_h.modeling_nemotron_h import mamba2_chunk_scan

    g, heads, p, n, t = generator(5), 6, 16, 24, 50
    case = scan_case(g, scan_spec(g, heads, p, n, 2, low=0.02), [t])
    case["batch"] = state_batch([t], [1], [[(t, 0)]])
    spec: ScanSpec = case["spec"]
    x, b, c = case["x"].split((heads * p, 2 * n, 2 * n), 1)
    want, state = mamba2_chunk_scan(
        x.reshape(1, t, heads, p), case["dt"][None], spec.a, b.reshape(1, t, 2, n), c.reshape(1, t, 2, n), 16, D=spec.d,
        dt_bias=spec.dt_bias, initial_states=case["states"][1:2].transpose(2, 3), dt_softplus=True,
        dt_limit=(0.02, float("inf")), return_final_states=True,
    )  # fmt: skip
    states, out = run(ops_named(name), "ssm_scan", case)[:2]
    close("y", out, want.view(t, heads * p), 1e-5)
    close("state", states[0], state[0].transpose(1, 2), 1e-5)


@pytest.mark.parametrize("name", BACKENDS)
def test_a_scan_with_decays_of_channels_is_that_of_mamba_1(name: str) -> None:
    from transformers.models.mamba.modeling_mamba import mamba_selective_state_update

    g, inner, n, t = generator(6), 48, 16, 20
    case = scan_case(g, scan_spec(g, 1, inner, n, selective=True), [t], apart=True)
    case["batch"] = state_batch([t], [1], [[(t, 0)]])
    spec: ScanSpec = case["spec"]
    state, rows = case["states"][1].transpose(1, 2).clone(), []
    for x, bc, dt in zip(case["x"], case["bc"], case["dt"], strict=True):
        rows.append(mamba_selective_state_update(
            state, x[None], dt[None], spec.a.t(), bc[None, :n], bc[None, n:], spec.d, dt_bias=spec.dt_bias,
            dt_softplus=True,
        ))  # fmt: skip
    states, out = run(ops_named(name), "ssm_scan", case)[:2]
    close("y", out, torch.cat(rows), 1e-5)
    close("state", states[0, 0], state[0].t(), 1e-5)


@pytest.mark.parametrize("name", BACKENDS)
def test_gated_norms_are_those_of_the_families(name: str) -> None:
    from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearRMSNormGated
    from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHRMSNormGated
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated

    g = generator(7)
    x, z = normal(g, 9, 96), normal(g, 9, 96)
    per_head = {"silu": Qwen3NextRMSNormGated(24, eps=1e-6), "sigmoid": KimiLinearRMSNormGated(24, eps=1e-6)}
    with torch.no_grad():
        for gate, norm in per_head.items():
            norm.weight.copy_(normal(g, 24))
            case = {"x": x, "z": z, "weight": norm.weight, "span": 24, "gate": gate, "gate_first": False, "eps": 1e-6}
            close(
                gate,
                run(ops_named(name), "gated_rmsnorm", case)[0],
                norm(x.view(-1, 24), z.view(-1, 24)).view(9, 96),
                1e-6,
            )
        grouped = NemotronHRMSNormGated(96, 48, eps=1e-5)
        grouped.weight.copy_(normal(g, 96))
        case = {"x": x, "z": z, "weight": grouped.weight, "span": 48, "gate": "silu", "gate_first": True, "eps": 1e-5}
        close("groups", run(ops_named(name), "gated_rmsnorm", case)[0], grouped(x, z), 1e-6)


# Bits


@pytest.mark.parametrize("isa", UNITS_HERE)
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=12, deadline=None, database=None, derandomize=True)
@given(seed=st.integers(0, 2**20))
def test_no_cut_no_batch_and_no_store_changes_a_bit(kind: str, isa: str, seed: int) -> None:
    """Sequences in steps of any rows, beside others; rows behind a stored state are computed again, as drafts are."""
    check_history(ops_of(isa), kind, seed, 60)


@pytest.mark.parametrize("threads", [1, 3, 5])
@pytest.mark.parametrize("kind", KINDS)
def test_threads_change_no_bit(kind: str, threads: int) -> None:
    name, case_of = KINDS[kind]
    case = case_of(generator(2), [3, 50, 1, 20])
    expected = run(ops_of("auto"), name, case)
    assert native is not None
    native.set_threads(threads)
    try:
        found = run(ops_of("auto"), name, case)
    finally:
        native.set_threads(2)
    assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("isa", UNITS_HERE)
@pytest.mark.parametrize("kind", KINDS)
def test_states_may_lie_apart(kind: str, isa: str) -> None:
    """As they do where a slot holds the states of all layers."""
    name, case_of = KINDS[kind]
    case = case_of(generator(8), [2, 5])
    together = case["states"].clone()
    apart = torch.full((len(together), 3, *together.shape[1:]), torch.nan)
    apart[:, 1] = together
    ops = ops_of(isa)
    ops.begin_step()
    want = getattr(ops, name)(**case | {"states": together})[1].clone()
    ops.begin_step()
    found = getattr(ops, name)(**case | {"states": apart[:, 1]})[1]
    assert torch.equal(found, want) and torch.equal(apart[:, 1], together) and apart[:, ::2].isnan().all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_replay_reads_what_its_arrays_hold_then(kind: str) -> None:
    name, case_of = KINDS[kind]
    ops = open_backend(DeviceConfig(device="cpu", threads=2))
    first, second = ({k: arrays(v) for k, v in case_of(generator(seed), [4, 3]).items()} for seed in (1, 2))
    second["batch"] = arrays(state_batch([2, 5], [3, -1], [[(1, 3), (2, 0)], [(0, 1)]]))
    second["spec"] = first["spec"]
    want_states = second["states"].copy()
    ops.begin_step()
    want = getattr(ops, name)(**second | {"states": want_states})[1].copy()
    recording = ops.record(lambda: getattr(ops, name)(**first)[1])
    for field in ("cu_q", "source", "counts", "target"):
        getattr(first["batch"], field)[...] = getattr(second["batch"], field)
    for part in (*ROWS[name], "states"):
        if first[part] is not None:
            first[part][...] = second[part]
    assert np.array_equal(recording.run(), want) and np.array_equal(first["states"], want_states)


# Refusals


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cu_q": ints([0, 2, 4])}, "number of rows"),
        ({"cu_q": ints([0, 4, 3])}, "ascend"),
        ({"source": ints([0, 9])}, "read lies outside"),
        ({"source": ints([-2, 0])}, "read lies outside"),
        ({"target": ints([[9, -1], [-1, -1]])}, "stored lies outside"),
        ({"counts": ints([[3, 0], [0, 0]])}, "more rows than there are"),
        ({"counts": ints([0, 0])}, "counts"),
    ],
)
def test_a_batch_that_names_what_is_not_there_is_refused(change: dict[str, Tensor], message: str) -> None:
    g = generator()
    case = delta_case(g, delta_spec(g, 1, 1, 8, 8), [2, 1]) | {"states": torch.zeros(3, 1, 8, 8)}
    good = state_batch([2, 1], [0, 1], [[(2, 0)], [(1, 1)]])
    ops_of("auto").delta_rule(**case | {"batch": good})
    with pytest.raises(ValueError, match=message):
        ops_of("auto").delta_rule(**case | {"batch": replace(good, **change)})


def test_layers_whose_sizes_do_not_fit_are_refused() -> None:
    g, ops = generator(), ops_of("auto")
    case = delta_case(g, delta_spec(g, 1, 3, 8, 8), [2])
    for change in (
        {"key_heads": 2},
        {"key_heads": 0},
        {"value_dim": 9},
        {"a": torch.zeros(2)},
        {"dt_bias": torch.zeros(24)},
    ):
        with pytest.raises(ValueError, match="delta_rule"):
            ops.delta_rule(**case | {"spec": replace(case["spec"], **change)})
    scan = scan_case(g, scan_spec(g, 4, 8, 8, 2), [2])
    for wrong in ({"groups": 3}, {"a": torch.zeros(8, 8)}, {"d": torch.zeros(3)}, {"state": 0}):
        with pytest.raises(ValueError, match="ssm_scan"):
            ops.ssm_scan(**scan | {"spec": replace(scan["spec"], **wrong)})
    x, weight = torch.zeros(2, 12), torch.ones(4)
    for args in (
        (x, x[:1], weight, 4, "silu"),
        (x, x, weight, 5, "silu"),
        (x, x, weight, 4, "gelu"),
        (x, x, weight, 6, "silu"),
    ):
        with pytest.raises(ValueError, match="gated_rmsnorm"):
            ops.gated_rmsnorm(*args, False, 1e-6)
