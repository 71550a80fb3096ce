"""The trial of a model whose code is transformers': does it run cut into steps over keys and values alone?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from quire.core.dtypes import F32
from quire.core.errors import ModelError
from quire.model.batch import Batch
from quire.model.transformers_backend.attention_bridge import INTERFACE, AttentionSite, Bridge
from quire.model.transformers_backend.detect import TransformersModel
from quire.ops.arrays import to_torch

TRIAL = [[4, 3], [1, 1], [1, 1], [1, 0], [1, 0]]
"""How the trial cuts its two sequences into steps: state kept outside the cache is lost between them."""
TRIAL_ERROR = {F32: 1e-3}
TRIAL_ERROR_16_BIT = 5e-2


def forward(model: Any, batch: Batch) -> Tensor:
    """Logits f32 [R, V] of the rows `batch.logit_rows`, by the modules of `model`."""
    rows = to_torch(batch.logit_rows).long()
    out = model(
        input_ids=to_torch(batch.tokens)[None].long(),
        position_ids=to_torch(batch.positions)[None].long(),
        use_cache=False,
        logits_to_keep=rows,
    ).logits[0]
    return out.float().contiguous()  # type: ignore[no-any-return]


def try_out(found: TransformersModel, model: Any, bridge: Bridge) -> None:
    """Run two short sequences whole, by transformers' own attention, and cut into steps by ours: they must agree.

    Whatever a model keeps from token to token beside keys and values, or adds to scores behind our back, shows here.
    """
    lengths = [sum(cut[s] for cut in TRIAL) for s in range(2)]
    made = torch.Generator().manual_seed(1)
    tokens = [torch.randint(3, found.spec.vocab_size, (n,), generator=made) for n in lengths]
    name, where = type(model).__name__, found.folder
    try:
        with torch.no_grad():
            want = [model(input_ids=t[None], use_cache=False).logits[0].float() for t in tokens]
            model.set_attn_implementation(INTERFACE)
            got: list[list[Tensor]] = [[], []]
            for batch, counts in _batches(tokens, bridge.block_size):
                bridge.ops.begin_step()
                step = bridge.ops.place(batch)
                bridge.begin(step)
                for rows, part in zip(got, torch.split(forward(model, step), counts), strict=True):
                    rows.append(part)
    except ModelError as error:
        raise ModelError(f"{where}: {name} cannot run over our cache: {error.message}") from None
    except Exception as error:
        raise ModelError(f"{where}: {name} failed on a trial run: {type(error).__name__}: {error}") from None
    bridge.spare.clear()
    if not bridge.sites:
        raise ModelError(f"{where}: {name} never called its attention through transformers' attention interface")
    errors = torch.cat([
        (torch.cat(g) - w).norm(dim=-1) / w.norm(dim=-1) for g, w in zip(got, want, strict=True)
    ])  # fmt: skip
    wide = found.dtype in TRIAL_ERROR
    worst = float(errors.max() if wide else errors.median())
    if not worst <= TRIAL_ERROR.get(found.dtype, TRIAL_ERROR_16_BIT):
        raise ModelError(
            f"{where}: {name} cannot run over our cache: cut into steps its logits differ by {worst:.1e} from those of "
            "whole sequences, so it depends on more than keys, values and positions"
        )


def _batches(tokens: list[Tensor], size: int) -> Iterator[tuple[Batch, list[int]]]:
    """The steps of `TRIAL`, each sequence in blocks of its own."""
    blocks = [-(-len(t) // size) for t in tokens]
    tables = torch.zeros(2, max(blocks), dtype=torch.int32)
    tables[0, : blocks[0]] = torch.arange(blocks[0])
    tables[1, : blocks[1]] = torch.arange(blocks[1]) + blocks[0]
    done = [0, 0]
    for counts in TRIAL:
        at = [torch.arange(d, d + n) for d, n in zip(done, counts, strict=True)]
        done = [d + n for d, n in zip(done, counts, strict=True)]
        yield (
            Batch(
                tokens=torch.cat([t[p] for t, p in zip(tokens, at, strict=True)]).int(),
                positions=torch.cat(at).int(),
                slots=torch.cat([tables[s, p // size].long() * size + p % size for s, p in enumerate(at)]),
                cu_q=torch.tensor([0, counts[0], sum(counts)], dtype=torch.int32),
                context=torch.tensor(done, dtype=torch.int32),
                block_tables=tables,
                logit_rows=torch.arange(sum(counts), dtype=torch.int32),
            ),
            counts,
        )


def check_windows(found: TransformersModel, sites: list[AttentionSite]) -> None:
    """A layer that config.json calls sliding must have said so: the trial is shorter than any window."""
    kinds = getattr(found.config, "layer_types", None) or ()
    for site, kind in zip(sites, kinds, strict=False):
        if kind == "sliding_attention" and not site.attend.window:
            raise ModelError(f"{found.folder}: layer {site.index} is sliding_attention, but its code names no window")
