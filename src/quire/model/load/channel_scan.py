"""A selective scan of single channels of a layer, from what the checkpoint holds."""

from __future__ import annotations

import numpy as np

from quire.core.dtypes import F32
from quire.model.load.placement import Unplaced
from quire.model.load.reader import WeightReader
from quire.model.net.channel_scan import ChannelScanRule
from quire.model.net.parts import Linear, NoNorm, Norm, RmsNorm
from quire.ops.arrays import concat, contiguous, exponential
from quire.ops.convolution import Convolution
from quire.ops.recurrent import ScanSpec


def load_channel_scan(reader: WeightReader, index: int) -> tuple[Linear, ChannelScanRule]:
    """The matrix of the channels of layer `index`, packed, and what follows."""
    sizes = reader.local.channels
    found = [reader.vector(f"channel_{name}", index) for name in ("conv", "decay", "skip")]
    taps, decay, skip = (vector for vector in found if vector is not None)
    conv = Convolution(
        contiguous(taps.reshape(sizes.inner, -1).T), reader.vector("channel_conv", index, "bias"), "silu"
    )
    rates = contiguous(-exponential(decay.reshape(sizes.inner, sizes.state)).T)
    gate, low, pairs, steps = (
        reader.linear(roles, index)
        for roles in (("channel_z",), ("channel_dt",), ("channel_b", "channel_c"), ("channel_steps",))
    )
    scan = ScanSpec(1, sizes.inner, sizes.state, rates, contiguous(skip), None)
    norm, scales = _norms(reader, index)
    rule = ChannelScanRule(conv, scan, gate, low, norm, pairs, scales, sizes.eps, steps)
    return reader.linear(("channel_x",), index), rule


def _norms(reader: WeightReader, index: int) -> tuple[Norm, Unplaced | None]:
    """The norm of what time steps are made of, and the weights of those of B and C; 1 where the file has none."""
    sizes = reader.local.channels
    if not sizes.eps:
        return NoNorm(), None
    found = [reader.vector(f"channel_{name}_scale", index) for name in ("dt", "b", "c")]
    widths = (sizes.rank, sizes.state, sizes.state)
    dt, b, c = (np.ones(width, F32) if weight is None else weight for weight, width in zip(found, widths, strict=True))
    return RmsNorm(dt, sizes.eps), concat([b, c])
