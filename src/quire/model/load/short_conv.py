"""A short convolution of a layer, from what the checkpoint holds."""

from __future__ import annotations

from quire.model.load.reader import WeightReader
from quire.model.net.parts import Linear
from quire.model.net.short_conv import ShortConv
from quire.ops.arrays import contiguous
from quire.ops.convolution import Convolution


def load_short_conv(reader: WeightReader, index: int) -> tuple[Linear, ShortConv]:
    """The matrix of both gates and of what is convolved of layer `index`, packed, and what follows."""
    weight = reader.vector("conv", index)
    assert weight is not None
    taps = contiguous(weight.reshape(reader.local.conv.width, -1).T)  # torch's stay such, for gradients
    conv = Convolution(taps, reader.vector("conv", index, "bias"), gated=True)
    return reader.linear(("conv_write", "conv_read", "conv_x"), index), ShortConv(conv)
