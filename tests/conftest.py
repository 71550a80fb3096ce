"""What every test starts from."""

import os

import torch

# Triton reads it when a kernel is defined: kernels then run as Python, on CPU tensors. `make gpu-check` sets it to 0.
os.environ.setdefault("TRITON_INTERPRET", "1")

# torch's threads spin; beside the native pool on a small machine they made one test 50 times slower.
torch.set_num_threads(1)
