"""What models exclude whose rows read tokens, or blocks of tokens, that an indexer chooses."""

from __future__ import annotations

from quire.core.exclusions.exclusion import Exclusion
from quire.core.exclusions.features import BLOCK_INDEXERS, CONTEXT, SHARED_INDEXERS, STAGES, TREES

OF_SPARSE_ATTENTION = (
    Exclusion(CONTEXT, BLOCK_INDEXERS, "a rank chooses among blocks of which others have the keys", "leave it out"),
    Exclusion(
        TREES,
        BLOCK_INDEXERS,
        "rows choose blocks among all tokens before them, and know no ancestors",
        "leave out topk and speculative_token_tree",
    ),
    Exclusion(
        STAGES,
        SHARED_INDEXERS,
        "a stage may begin with a layer that reads what one of another stage chose",
        "leave it out, or use --tensor-parallel-size",
    ),
)
