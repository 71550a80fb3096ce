"""What every test starts from."""

import atexit
import os
import shutil
import tempfile

import torch

# Triton reads it when a kernel is defined: kernels then run as Python, on CPU tensors. `make gpu-check` sets it to 0.
os.environ.setdefault("TRITON_INTERPRET", "1")

# torch's threads spin; beside the native pool on a small machine they made one test 50 times slower.
torch.set_num_threads(1)

# What quire keeps for later starts must not land among the user's caches, nor be found from an earlier run.
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="quire-tests-")
atexit.register(shutil.rmtree, os.environ["XDG_CACHE_HOME"], ignore_errors=True)
