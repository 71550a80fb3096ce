"""What encoders of sound exclude."""

from __future__ import annotations

from quire.core.exclusions.exclusion import Exclusion
from quire.core.exclusions.features import GPU, HEARING, RANK_INVARIANT, TENSOR

OF_SPEECH = (
    *(
        Exclusion(a, HEARING, "an encoder of sound is computed by one rank, whole", "leave it out")
        for a in (TENSOR, RANK_INVARIANT)
    ),
    Exclusion(GPU, HEARING, "{family!r} hears on the CPU only", "use --device cpu", "device"),
)
