"""A selective scan of a layer, from what the checkpoint holds."""

from __future__ import annotations

import numpy as np

from quire.core.dtypes import F32
from quire.model.load.reader import WeightReader
from quire.model.net.parts import Linear, scaled
from quire.model.net.scan import GatedNorm, Scan
from quire.ops.arrays import Host, to_numpy
from quire.ops.convolution import Convolution
from quire.ops.recurrent import ScanSpec


def load_scan(reader: WeightReader, index: int) -> tuple[Linear, Scan]:
    """The matrix of x, B and C of layer `index`, packed, and what follows."""
    sizes = reader.local.scan
    z, x, b, c, dt = sizes.factors
    taps, decay, skip, bias = (
        to_numpy(vector)
        for name in ("conv", "decay", "skip", "bias")
        if (vector := reader.vector(f"scan_{name}", index)) is not None
    )
    by_channel = np.repeat(np.array([x, b, c], F32), [sizes.inner, sizes.pairs, sizes.pairs])
    biases = reader.vector("scan_conv", index, "bias")
    conv = Convolution(
        np.ascontiguousarray(_own_channels(reader, taps.reshape(len(taps), -1)).T * by_channel),
        None if biases is None else _own_channels(reader, to_numpy(biases)),
        "silu",
    )
    scan = ScanSpec(
        sizes.heads, sizes.head_dim, sizes.state, -np.exp(decay), np.ascontiguousarray(skip),
        np.ascontiguousarray(bias), sizes.groups, sizes.low, sizes.high,
    )  # fmt: skip
    gate, steps = (scaled(reader.linear((role,), index), factor) for role, factor in (("scan_z", z), ("scan_dt", dt)))
    scale, span = reader.vector("scan_scale", index), sizes.inner // sizes.groups
    norm = GatedNorm(scale, span, sizes.gate_first, sizes.eps)
    return reader.linear(("scan_x", "scan_b", "scan_c"), index), Scan(conv, scan, gate, steps, norm)


def _own_channels(reader: WeightReader, channels: Host) -> Host:
    """What [channels, ...] of the convolution is of a rank's x, B and C."""
    whole, rows, before = reader.opened.spec.scan, list[Host](), 0
    for role, size in (("scan_x", whole.inner), ("scan_b", whole.pairs), ("scan_c", whole.pairs)):
        own = reader.share.cut(role, reader.opened.spec, size)
        rows.append(channels[before + own.start : before + own.stop])
        before += size
    return np.concatenate(rows)
