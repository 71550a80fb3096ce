"""Memory of an image while it is encoded, from the shape of a tower."""

from __future__ import annotations

from quire.model.spec import ModelSpec

FLOAT = 4
PIECE = 768
"""The most rows that go through a layer together: what lies between its matrices then stays in the caches, and the
memory of an image of any size is that of its stream, queries, keys and values, and of one piece. Encoding 2,304 rows
of so400m's shape takes 5 % longer with 384, and 3 % with all at once."""


def scratch_bytes(tower: ModelSpec, rows: int) -> int:
    """Bytes of what lies between pixels and the features of an image of `rows` rows: for each of its patches the
    numbers of its pixels, twice; of the stream, its queries, keys and values, what it attended to, and two layers that
    are kept; and of one piece what goes through a layer.
    """
    patches = rows * tower.patches.merge**2
    piece = min(patches, PIECE) * (4 * tower.hidden + 2 * tower.intermediate)
    return FLOAT * (piece + patches * (2 * 3 * tower.patches.size**2 * tower.patches.frames + 7 * tower.hidden))
