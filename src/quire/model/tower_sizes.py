"""How vision towers read images, and what joins them to a decoder, as parts of a `ModelSpec`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Patches:
    """How a vision tower reads an image: squares of pixels, each of which becomes a row (Dosovitskiy et al. 2021).

    `size`: pixels of a side, 0 = there is no tower; `frames`: how often a patch holds the image, one behind the other
    (towers that read films); `merge`: patches of a side that become one row later, whose rows follow each other.
    `grid`: (rows, columns) of learned positions, (0, 0) = none, which an image of other sizes meets by `positions`, a
    key of LEARNED in vision.patch_positions; `first`: rows before the patches, with a position each, which lie `behind`
    those of patches in the file; `start`: the number of the first line and column, where heads turn by them.
    `window`: patches of a side of what a row sees in layers that do not see all. `scale`: what rows behind the last
    layer are multiplied by, before they are standardized where a file says by what; 0 = they are not.
    """

    size: int = 0
    frames: int = 1
    merge: int = 1
    grid: tuple[int, int] = (0, 0)
    positions: str = "same"
    first: int = 0
    window: int = 0
    scale: float = 0.0
    behind: bool = False
    start: int = 0


@dataclass(frozen=True)
class Connector:
    """What brings a tower's rows to the width of a decoder, the spec's `hidden` (Liu et al. 2023, LLaVA).

    `width`: numbers of the tower's rows, those of several layers side by side; `merge`: patches of a side that become
    one row; `normed`: numbers that are normed together, 0 = no norm; `read`: those that the first matrix reads;
    `middle`: between two matrices, 0 = there is one. Layers are those of further features.
    """

    width: int = 0
    merge: int = 1
    normed: int = 0
    read: int = 0
    middle: int = 0


NO_TOWER, NO_CONNECTOR = Patches(), Connector()
