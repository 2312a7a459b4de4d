"""Settings for all tests."""

import torch

# Test tensors are small: threads cost more than they give, and pytest-xdist already fills the cores.
torch.set_num_threads(1)
