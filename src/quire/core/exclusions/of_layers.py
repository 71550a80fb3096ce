"""What models exclude whose layers differ in size, are given more than the stream, or have several streams."""

from __future__ import annotations

from quire.core.exclusions.exclusion import Exclusion
from quire.core.exclusions.features import (
    CONTEXT,
    CPU_OFFLOAD,
    DFLASH,
    EAGLE,
    EAGLE3,
    EXPERTS_ON_DISK,
    FULLY_SHARD,
    LAYER_INPUTS,
    LAYERS_ON_DISK,
    MEDUSA,
    MTP,
    PASSING,
    RANK_INVARIANT,
    SEQUENCE_PARALLEL,
    STAGES,
    STREAMS,
    TURNS,
    UNLIKE_LAYERS,
)

HEADS = (MEDUSA, EAGLE, EAGLE3, DFLASH, MTP)
"""What drafts from hidden rows of the model."""
OUT = "leave it out"
OF_LAYERS = (
    Exclusion(SEQUENCE_PARALLEL, STREAMS, "layers join streams of all rows of a step", OUT),
    *(
        Exclusion(a, LAYER_INPUTS, "what layers are given of tokens is made of all rows of a step", OUT)
        for a in (CONTEXT, SEQUENCE_PARALLEL)
    ),
    Exclusion(RANK_INVARIANT, STREAMS, "layers join their streams themselves, and runs of a sum are kept apart", OUT),
    Exclusion(
        SEQUENCE_PARALLEL, PASSING, "what passes a layer by has all rows of a step, and would need a rank's own", OUT
    ),
    Exclusion(STAGES, STREAMS, "one stream goes between stages, not several", OUT),
    *(
        Exclusion(a, STREAMS, "heads that draft read one stream, not several", "use ngram, suffix, draft_model, self")
        for a in HEADS
    ),
    *(
        Exclusion(a, TURNS, "layers that run several times would be kept as often", OUT)
        for a in (LAYERS_ON_DISK, EXPERTS_ON_DISK, CPU_OFFLOAD, FULLY_SHARD)
    ),
    Exclusion(CONTEXT, UNLIKE_LAYERS, "states of attention that ranks exchange have the size of one head", OUT),
)
