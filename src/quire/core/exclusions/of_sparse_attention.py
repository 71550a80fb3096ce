"""What models exclude whose rows read tokens, or blocks of tokens, that an indexer chooses."""

from __future__ import annotations

from quire.core.exclusions.exclusion import Exclusion
from quire.core.exclusions.features import (
    BLOCK_INDEXERS,
    CONTEXT,
    ENTRIES,
    EXPERT_RANKS,
    GPU,
    KV_FORMAT,
    SHARED_INDEXERS,
    STAGES,
    TENSOR,
    TREES,
)

KV_OF_ENTRIES = Exclusion(KV_FORMAT, ENTRIES, "entries are kept in bf16 or f32", "choose one of these, or auto")
OF_SPARSE_ATTENTION = (
    KV_OF_ENTRIES,
    Exclusion(GPU, ENTRIES, "ops that make and read entries run on the CPU alone", "use --device cpu", "device"),
    *(
        Exclusion(
            a,
            ENTRIES,
            "entries are made of a row's numbers for all heads, and matrices of groups of heads are not cut over ranks",
            "leave it out",
        )
        for a in (TENSOR, CONTEXT, EXPERT_RANKS)
    ),
    Exclusion(
        TREES,
        ENTRIES,
        "entries are made of the tokens before a row, and know no ancestors",
        "leave out topk and speculative_token_tree",
    ),
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
