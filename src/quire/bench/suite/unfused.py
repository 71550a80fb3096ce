"""Fused calls taken apart: what each is made of, one native call after the other, with the same results.

In the process of a benchmark alone, before its engine is loaded. Matrices that lie as one (q, k and v; gate and up)
stay one: how weights lie is decided when they are read, and attention reads what they give as one row.
"""

from __future__ import annotations

from quire.ops.arrays import Host
from quire.ops.cpu.state import Cpu
from quire.ops.op import IMPLEMENTATIONS, impl, load_modules
from quire.ops.weights import Packed


def unfuse() -> None:
    """Register the parts in the place of the whole."""
    load_modules("quire.ops.cpu")
    own = {
        name: IMPLEMENTATIONS[name]["cpu"]
        for name in ("linear", "activation", "gated_activation", "add", "rmsnorm", "layernorm")
    }

    @impl("gated_mlp", "cpu")
    def gated_mlp(
        cpu: Cpu,
        x: Host,
        gate_up: Packed,
        gate_up_bias: Host | None,
        down: Packed,
        down_bias: Host | None,
        kind: str,
    ) -> Host:
        wide = own["linear"](cpu, x, gate_up, gate_up_bias)
        narrow: Host = own["linear"](cpu, own["gated_activation"](cpu, wide, kind), down, down_bias)
        return narrow

    @impl("plain_mlp", "cpu")
    def plain_mlp(
        cpu: Cpu, x: Host, up: Packed, up_bias: Host | None, down: Packed, down_bias: Host | None, kind: str
    ) -> Host:
        wide = own["activation"](cpu, own["linear"](cpu, x, up, up_bias), kind)
        narrow: Host = own["linear"](cpu, wide, down, down_bias)
        return narrow

    @impl("add_layernorm", "cpu")
    def add_layernorm(cpu: Cpu, x: Host, delta: Host, weight: Host, bias: Host | None, eps: float) -> tuple[Host, Host]:
        total = own["add"](cpu, x, delta)
        return total, own["layernorm"](cpu, total, weight, bias, eps)

    @impl("add_rmsnorm", "cpu")
    def add_rmsnorm(cpu: Cpu, x: Host, delta: Host, weight: Host, eps: float) -> tuple[Host, Host]:
        total = own["add"](cpu, x, delta)
        return total, own["rmsnorm"](cpu, total, weight, eps)
