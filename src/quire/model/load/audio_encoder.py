"""The encoder of a model that hears, from what the checkpoint holds."""

from __future__ import annotations

from dataclasses import replace

from quire.model.load.encoder import load_keys_values, load_layers
from quire.model.load.parts import load_norm
from quire.model.load.placement import Unplaced
from quire.model.load.reader import WeightReader
from quire.model.net.audio_encoder import AudioEncoder, Convolution
from quire.model.net.parts import Linear
from quire.ops.arrays import as_f32, to_numpy


def load_audio_encoder(reader: WeightReader, still: Unplaced) -> AudioEncoder:
    """The encoder, packed and on its device; `still`: a rope table without columns, there."""
    spec = reader.opened.spec
    positions = reader.vector("encoder_positions")
    assert positions is not None, "the claim requires it"
    return AudioEncoder(
        ops=reader.ops,
        spec=spec,
        convolutions=(_convolution(reader, "encoder_conv1", 1), _convolution(reader, "encoder_conv2", 2)),
        positions=to_numpy(positions),
        layers=load_layers(reader),
        final_norm=reader.place(load_norm(reader, "encoder_final_norm")),
        keys_values=load_keys_values(reader, spec.heads * spec.head_dim, still),
        dtype=reader.form.dtype,
    )


def read_by_another(encoder: AudioEncoder, reader: WeightReader, still: Unplaced) -> AudioEncoder:
    """The encoder of another model, whose output the decoder of `reader` reads too: windows that both are given are
    encoded once."""
    spec = reader.opened.spec
    return replace(encoder, keys_values=load_keys_values(reader, spec.heads * spec.head_dim, still))


def _convolution(reader: WeightReader, role: str, stride: int) -> Convolution:
    """The convolution `role` as a matrix over the numbers of neighbouring rows, channel by channel."""
    weight, bias = reader.vector(role), reader.vector(role, part="bias")
    assert weight is not None, "the claim requires it"
    packed = reader.ops.pack_exact(as_f32(weight).reshape(len(weight), -1))
    return Convolution(reader.place(Linear(packed, bias)), stride)
