"""What every test starts from."""

import torch

# torch's threads spin; beside the native pool on a small machine they made one test 50 times slower.
torch.set_num_threads(1)
