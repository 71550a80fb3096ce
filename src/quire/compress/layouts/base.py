"""The interface of layouts, and what all of them share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np

from quire.compress.quantize.rounding import over_rows
from quire.core.errors import ConfigError
from quire.ops.lazy import torch
from quire.ops.weights import Weight

if TYPE_CHECKING:
    from torch import Tensor

BITS = {"int4": 4, "int8": 8}
T = TypeVar("T", bound=Hashable)


class Layout(Protocol):
    """A layout of quantized matrices in files. A weight that is not quantized lies as it is in every layout."""

    @property
    def name(self) -> str:
        """The name that recipes give it."""
        ...

    def tensors(self, base: str, weight: Weight, bias: Tensor | None = None) -> dict[str, Tensor]:
        """Return the tensors on disk of the linear layer `base` ("model.layers.0.mlp.up_proj"), names in full.

        `bias` [n] is kept as it is. `ConfigError` for a weight that the layout cannot hold.
        """
        ...

    def config(self, matrices: Mapping[str, Weight]) -> dict[str, Any]:
        """Return `quantization_config` of config.json for the linear layers by their names, unquantized ones included.

        They are the weights whose `tensors` are written, all rows of them, and are read once and in order: a mapping
        may fetch each when it is asked for. `ConfigError` for weights that no one file can hold together.
        """
        ...


def layout_error(layout: str, base: str, reason: str) -> ConfigError:
    """Return an error about a matrix that `layout` cannot hold, for the caller to raise."""
    return ConfigError(f"layout {layout}: {base} {reason}")


def is_unquantized(weight: Weight) -> bool:
    """Tell whether the matrix is not quantized."""
    return weight.scales is None


def unquantized_tensors(base: str, weight: Weight, bias: Tensor | None) -> dict[str, Tensor]:
    """Return the tensors of a matrix that is not quantized."""
    return with_bias(base, {"weight": weight.codes.contiguous()}, bias)


def with_bias(base: str, parts: Mapping[str, Tensor], bias: Tensor | None) -> dict[str, Tensor]:
    """Return the parts by their full names, the bias with them."""
    named = {f"{base}.{part}": t.contiguous() for part, t in parts.items()}
    return named if bias is None else {**named, f"{base}.bias": bias}


def integer_bits(layout: str, base: str, weight: Weight, allowed: tuple[int, ...]) -> int:
    """Return the bits of the codes of a weight of integers; `ConfigError` where it is not that or has other bits."""
    if weight.kind not in BITS:
        raise layout_error(layout, base, f"is {weight.kind}, needs integers")
    if weight.mins is not None:
        raise layout_error(
            layout, base, "has minimums, which are no multiples of its scales; quantize with zero points"
        )
    bits = weight.bits or BITS[weight.kind]
    if bits not in allowed:
        raise layout_error(layout, base, f"has codes of {bits} bits, can have {', '.join(map(str, allowed))}")
    half = 1 << (bits - 1)
    for what, codes in (("codes", weight.codes), ("zeros", weight.zeros)):
        if codes is not None and not -half <= int(codes.min()) <= int(codes.max()) < half:
            raise layout_error(layout, base, f"has {what} outside {-half}..{half - 1}, which {bits} bits do not hold")
    return bits


def group_index(weight: Weight) -> Tensor | None:
    """Return the group of each column [k] int32 in the activations' order; None where groups lie together."""
    if weight.order is None:
        return None
    k = weight.shape[1]
    places = torch.arange(k, dtype=torch.int32) // weight.group
    index = torch.empty_like(places)
    index[weight.order.long()] = places
    return None if torch.equal(index, places) else index


def ordered_codes(weight: Weight) -> Tensor:
    """Return the codes [n, k] with their columns in the activations' order."""
    codes: Tensor = weight.codes
    return codes if weight.order is None else codes[:, weight.order.argsort()]


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack signed codes int8 [r, c] in words int32 [r, ceil(c * bits / 32)], as `quant.packed` reads them."""
    r, c = codes.shape
    out = torch.zeros((r, -(-c * bits // 32)), dtype=torch.int32)

    def work(rows: slice) -> None:
        values = codes[rows].contiguous().view(torch.uint8) + (1 << (bits - 1))  # modulo 256, as a code of 8 bits wants
        out[rows] = (_in_bytes if 8 % bits == 0 else _bit_by_bit)(values, bits).view(torch.int32)

    over_rows(r, bits * c, work)
    return out


def _in_bytes(values: Tensor, bits: int) -> Tensor:
    """Pack `values` uint8 [r, c] of 1, 2, 4 or 8 bits in bytes of whole words: [r, 4 * words] uint8."""
    parts = torch.nn.functional.pad(values, (0, -values.shape[1] % (32 // bits))).view(len(values), -1, 8 // bits)
    data = parts[..., 0].clone()
    for i in range(1, 8 // bits):
        data |= parts[..., i] << bits * i
    return data


def _bit_by_bit(values: Tensor, bits: int) -> Tensor:
    """Pack values of any number of bits as `_in_bytes` does."""
    stream = (values[..., None] >> torch.arange(bits, dtype=torch.uint8) & 1).flatten(1)
    stream = torch.nn.functional.pad(stream, (0, -stream.shape[1] % 32))
    return torch.from_numpy(np.packbits(stream.numpy(), axis=-1, bitorder="little"))


def facts_by_matrix(matrices: Mapping[str, Weight], key: Callable[[Weight], T]) -> dict[str, T | None]:
    """Compute `key` of each quantized matrix, None of the others; each is read once."""
    return {base: None if is_unquantized(weight) else key(weight) for base, weight in matrices.items()}


def most_common(layout: str, facts: Mapping[str, T | None]) -> T:
    """Return the commonest fact of the quantized matrices; `ConfigError` when there is none."""
    counts = Counter(fact for fact in facts.values() if fact is not None)
    if not counts:
        raise ConfigError(f"layout {layout}: no matrix is quantized")
    return counts.most_common(1)[0][0]


def group_of(weight: Weight) -> int:
    """Return the columns of a group as configs give it: -1 for a whole row."""
    return -1 if weight.group == weight.shape[1] else weight.group
