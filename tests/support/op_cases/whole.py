"""Cases of the ops of `quire.ops.reference.whole`."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Generator

from op_cases.reference import attention_case
from op_cases.registry import cases
from op_cases.weights import normal
from quire.core.dtypes import BF16, F32
from quire.ops.layout import KVLayout
from quire.ops.op import Case


@cases("whole_attention")
def whole_attention_cases(g: Generator) -> Iterator[Case]:
    for dtype in (BF16, F32):
        for block_size in (1, 4, 16, 128):
            for heads, d, each, context in ((4, 72, 40, 40), (1, 64, 1, 700), (2, 32, 17, 90), (3, 80, 100, 640)):
                yield _whole_case(g, KVLayout(block_size, heads, d, dtype), each, (context, context))
        yield _whole_case(g, KVLayout(128, 2, 64, dtype), 576, (1100,))
        yield _whole_case(g, KVLayout(64, 2, 8, dtype), 64, (64,) * 9)


def _whole_case(g: Generator, layout: KVLayout, each: int, contexts: tuple[int, ...]) -> Case:
    case = attention_case(g, layout, layout.kv_heads, tuple((1, context) for context in contexts))
    return {
        "q": normal(g, len(contexts), each, layout.kv_heads * layout.head_dim),
        "cache": case["cache"],
        "context": case["context"],
        "block_tables": case["block_tables"],
        "scale": case["spec"].scale,
    }
