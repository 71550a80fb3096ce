"""Memory of a picture while it is encoded, from the shape of a tower."""

from __future__ import annotations

from quire.model.spec import ModelSpec

FLOAT = 4


def scratch_bytes(tower: ModelSpec, rows: int) -> int:
    """Of what lies between pixels and the features of a picture of `rows` rows: for each of its patches the numbers of
    its pixels, twice; of the stream, its queries, keys and values, what it attended to, and two layers that are kept.

    Matrices are multiplied with pieces of some rows (`tower.PIECE`), whose memory is that of steps.
    """
    patches = rows * tower.patches.merge**2
    return FLOAT * patches * (2 * 3 * tower.patches.size**2 * tower.patches.frames + 7 * tower.hidden)
