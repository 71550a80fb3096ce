"""How a router chooses experts (Shazeer et al. 2017), as config.json says it; the op `route` does it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Routing:
    """How a router chooses `top_k` of `experts` and weighs them.

    `score`: "softmax" over all experts, "sigmoid" of each, or "sparsemixer" (Phi-3.5-MoE, Liu et al. 2023: two experts,
    each weighed by a softmax over the logits within 2 * `jitter` of the best of those left). `renormalize`: weights of
    the chosen sum to 1 (a softmax over their logits alone is the same). `scale` multiplies weights. `groups` > 1:
    experts in equal groups, of which those with the `top_groups` largest sums of their best `group_best` scores take
    part (DeepSeek-V2 and V3).
    """

    experts: int
    top_k: int
    score: str = "softmax"
    renormalize: bool = False
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1
    group_best: int = 1
    jitter: float = 0.0
