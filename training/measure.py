"""The cheap checks that run during training."""

import torch
from torch import Tensor
from torch.nn import functional

from batches import IGNORED, Row, padded
from model import Llama

ROWS_PER_BATCH = 100


@torch.no_grad()
def wrong_names(model: Llama, rows: list[Row], device: torch.device) -> set[str]:
    """Return the names whose greedy answer would differ.

    Greedy decoding gives an answer exactly when every token of it is the likeliest after the ones before it,
    so one pass over the finished sequences decides it.
    """
    wrong: set[str] = set()
    ordered = sorted(rows, key=lambda row: len(row.prompt) + len(row.answer))
    for start in range(0, len(ordered), ROWS_PER_BATCH):
        chunk = ordered[start : start + ROWS_PER_BATCH]
        tokens, targets = (part.to(device) for part in padded([[row] for row in chunk]))
        wanted = targets != IGNORED
        with torch.autocast(device.type, torch.bfloat16):
            scores = model.logits(model(tokens)[wanted])
        missed = torch.zeros_like(wanted)
        missed[wanted] = scores.argmax(-1) != targets[wanted]
        wrong.update(row.name for row, bad in zip(chunk, missed.any(1).tolist(), strict=True) if bad)
    return wrong


@torch.no_grad()
def heldout_loss(model: Llama, blocks: Tensor, device: torch.device) -> float:
    """Return the mean loss per token on blocks of unseen text."""
    rows = blocks.long().view(-1, 512).to(device)
    with torch.autocast(device.type, torch.bfloat16):
        scores = model.logits(model(rows)[:, :-1])
    return functional.cross_entropy(scores.float().flatten(0, 1), rows[:, 1:].flatten()).item()
