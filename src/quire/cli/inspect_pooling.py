"""What `quire inspect` says of models that make vectors or classes alone."""

from __future__ import annotations

from quire.cli.show import Rows
from quire.model.describe import ModelFacts

ROWS = {
    "mean": "the mean of all tokens",
    "cls": "the first token",
    "last": "the last token",
    "splade": "weights of the vocabulary (SPLADE)",
}
SHOWN = 8
"""Names of classes that are shown."""


def pooling_rows(found: ModelFacts) -> Rows:
    """How a text becomes a vector or classes; nothing of a model that also writes text."""
    pooling, spec = found.pooling, found.spec
    if pooling.generates and not pooling.labels:
        return []
    seen = "those before and behind it" if spec.bidirectional else "those before it"
    rows = [("tokens that one sees", seen), ("pooling", ROWS[pooling.kind])]
    if pooling.dense:
        rows.append(("dense layers", ", ".join(f"{d.width} ({d.activation or 'linear'})" for d in pooling.dense)))
    if pooling.labels:
        more = f" and {len(pooling.labels) - SHOWN} more" if len(pooling.labels) > SHOWN else ""
        rows.append(("classes", ", ".join(pooling.labels[:SHOWN]) + more))
        rows.append(("pairs", "as the tokenizer joins them" if pooling.pairs else "one text behind the other"))
    else:
        kept = f"the first {pooling.cut} of " if pooling.cut else ""
        how = "of length 1" if pooling.normalize else "as they come"
        rows.append(("vector", f"{kept}{pooling.width} numbers, {how}"))
    if pooling.dimensions:
        rows.append(("shorter vectors", ", ".join(map(str, pooling.dimensions))))
    rows.append(("longest text", f"{pooling.longest or spec.max_position:,} tokens"))
    for name, prompt in pooling.prompts.items():
        usual = " (the usual one)" if name == pooling.prompt else ""
        rows.append((f"prompt {name}", f"{prompt!r}{usual}"))
    return [*rows, *([("refused", pooling.refused)] if pooling.refused else [])]
