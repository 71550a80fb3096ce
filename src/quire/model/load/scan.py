"""A selective scan of a layer, from what the checkpoint holds."""

from __future__ import annotations

from collections.abc import Sequence

from quire.model.load.reader import WeightReader
from quire.model.net.parts import Linear, scaled
from quire.model.net.scan import GatedNorm, Scan
from quire.ops.arrays import AnyArray, concat, contiguous, exponential
from quire.ops.convolution import Convolution
from quire.ops.recurrent import ScanSpec


def load_scan(reader: WeightReader, index: int) -> tuple[Linear, Scan]:
    """The matrix of x, B and C of layer `index`, packed, and what follows.

    Tensors of torch stay such, so that gradients reach what lies on disk.
    """
    sizes = reader.local.scan
    z, *by_part, dt = sizes.factors
    found = [reader.vector(f"scan_{name}", index) for name in ("conv", "decay", "skip", "bias")]
    taps, decay, skip, bias = (vector for vector in found if vector is not None)
    biases = reader.vector("scan_conv", index, "bias")
    conv = Convolution(
        contiguous(_own_channels(reader, taps.reshape(len(taps), -1), by_part).T),
        None if biases is None else _own_channels(reader, biases),
        "silu",
    )
    scan = ScanSpec(
        sizes.heads, sizes.head_dim, sizes.state, -exponential(decay), contiguous(skip), contiguous(bias),
        sizes.groups, sizes.low, sizes.high,
    )  # fmt: skip
    gate, steps = (scaled(reader.linear((role,), index), factor) for role, factor in (("scan_z", z), ("scan_dt", dt)))
    scale, span = reader.vector("scan_scale", index), sizes.inner // sizes.groups
    norm = GatedNorm(scale, span, sizes.gate_first, sizes.eps)
    return reader.linear(("scan_x", "scan_b", "scan_c"), index), Scan(conv, scan, gate, steps, norm)


def _own_channels(reader: WeightReader, channels: AnyArray, factors: Sequence[float] = (1.0,) * 3) -> AnyArray:
    """What [channels, ...] of the convolution is of a rank's x, B and C, each times its factor."""
    whole, rows, before = reader.opened.spec.scan, list[AnyArray](), 0
    sizes = (("scan_x", whole.inner), ("scan_b", whole.pairs), ("scan_c", whole.pairs))
    for (role, size), factor in zip(sizes, factors, strict=True):
        own = reader.share.cut(role, reader.opened.spec, size)
        rows.append(channels[before + own.start : before + own.stop] * factor)
        before += size
    return concat(rows)
