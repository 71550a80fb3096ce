"""The GPU backend: kernels in Triton (Tillet et al. 2019) behind the ops' definitions. Importing this imports no torch.

`*_kernels.py` hold the kernels, the other modules what checks tensors and launches them: `@impl(op, "triton")`, with a
`Gpu` (`gpu.py`) as first argument. Every module of this folder is imported when the backend is chosen, and Triton with
them.

Activations have the dtype of the embedding table (bf16, fp16 or f32), and an op returns rows in the dtype of those it
was given; it computes in f32 inside. Three exceptions: `take_rows` returns f32, so that the last norm, the head and the
logits are f32; `linear` of an f32 matrix returns f32 (a router's choice is all or nothing); what an op's definition
gives as integers stays so. Norm weights, biases, rope tables and adapters are f32. Weights are multiplied as they are
packed: f32 rows are rounded to the weight's 16-bit type first.

Shapes of a step never depend on data, and nothing waits for the host, so that a step can be captured in a CUDA graph:
sizes that only the device knows are read by the kernels.
"""

from __future__ import annotations

import importlib

from quire.core.config import DeviceConfig
from quire.ops.choice import HOST, BackendFacts


def unit(device: DeviceConfig) -> tuple[str, int]:
    """The GPU's name. Imports torch."""
    return importlib.import_module("quire.ops.triton.gpu").open_gpu().name, 1


OTHERS = {"linear": ("cublas", "cusparselt")}
DEVICE = BackendFacts("cuda", unit, extra="gpu", needs="a GPU", lacks=HOST, others=OTHERS)
