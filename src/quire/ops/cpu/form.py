"""Packed matrices as files hold them (`quire.ops.weights.PackedForm`); what comes back from a file is never trusted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import numpy as np

from quire.core.dtypes import I32
from quire.ops.arrays import Host
from quire.ops.cpu.matrix import Numbers, assemble, part_sizes, take_apart
from quire.ops.cpu.pack_sparse import SPARSE, TWO_OF_FOUR, holds_blocks
from quire.ops.cpu.packing_samples import layout_digest, numbers
from quire.ops.cpu.state import Cpu
from quire.ops.facts import LANES
from quire.ops.kinds import KINDS
from quire.ops.weights import MOST, SUPER, Packed, PackedFacts, Weight


class CpuForm:
    """The file form of the native layouts, as `cpu` packs them."""

    def __init__(self, cpu: Cpu) -> None:
        self._cpu, self.narrows = cpu, cpu.bf16_bits == 12

    @property
    def label(self) -> str:
        """Bits of bf16 matrices if they are 12, and `--sparse` if not "auto"; its default, "off", is named, too."""
        sparse = "" if self._cpu.sparse == "auto" else f"-sparse-{self._cpu.sparse}"
        return ("-12" if self.narrows else "") + sparse

    def digest(self, quantized: Iterable[Callable[[Host], Weight]]) -> str:
        """Implement `PackedForm`."""
        return layout_digest(self._cpu, [quantize(numbers()) for quantize in quantized])

    def describe(self, packed: Packed) -> tuple[PackedFacts, dict[str, Host]]:
        """Implement `PackedForm`."""
        (wide, bits), parts = take_apart(packed)
        return PackedFacts(packed.kind, packed.n, packed.k, packed.group, wide, bits), parts

    def restore(self, facts: PackedFacts, parts: Mapping[str, Host]) -> Packed:
        """Implement `PackedForm`."""
        kind, n, k, group, wide, bits = facts
        _check_facts(facts)
        _check_sizes(facts, {name: part.nbytes for name, part in parts.items()})
        parts = dict(parts)
        if "order" in parts:
            parts["order"] = parts["order"].view(I32)
            if not np.array_equal(np.sort(parts["order"]), np.arange(k)):
                raise ValueError(f"the order of a matrix of shape [{n}, {k}] is no permutation")
        packed = assemble(kind, (n, k), group, Numbers(wide, bits), parts)
        if kind in TWO_OF_FOUR.values() and bits != 8:
            raise ValueError(f"a {kind} matrix of shape [{n}, {k}] has activations of {bits} bits")
        if kind in SPARSE.values() and not (bits == 8 and holds_blocks(self._cpu, packed)):
            raise ValueError(f"a {kind} matrix of shape [{n}, {k}] has blocks that do not end where they should")
        return packed


def _check_facts(facts: PackedFacts) -> None:
    """`ValueError` for facts that no matrix has."""
    name, n, k, group, wide, bits = facts
    if name not in KINDS or min(n, k) < 1 or bits not in MOST:
        raise ValueError(f"there is a matrix of kind {name}, shape [{n}, {k}], {bits} bits")
    kind = KINDS[name]
    if group not in (kind.groups or (0,)):
        raise ValueError(f"there is a matrix of kind {name}, shape [{n}, {k}], group {group}")
    if group and k % max(group, SUPER if kind.multiples else 1):
        raise ValueError(f"there is a matrix of shape [{n}, {k}] in groups of {group}")
    if (name == "fp8" and not (wide and bits == 16)) or (kind.multiples and (wide or bits != 8)):
        raise ValueError(f"there is a {name} matrix of shape [{n}, {k}], with scales or activations that it has not")


def _check_sizes(facts: PackedFacts, sizes: Mapping[str, int]) -> None:
    """`ValueError` for parts of sizes that those of such a matrix have not; blocks without zeros have any."""
    name, n, k, group, wide, _ = facts
    allowed, needed = part_sizes(name, (n, k), group, wide), {"codes", *KINDS[name].always}
    if name in SPARSE.values() and "codes" in sizes and not sizes["codes"] % -(-n // LANES):
        allowed["codes"] = (sizes["codes"],)
    if not needed <= set(sizes) or any(size not in allowed.get(part, ()) for part, size in sizes.items()):
        raise ValueError(f"a {name} matrix of shape [{n}, {k}] has parts of {sizes} bytes")
