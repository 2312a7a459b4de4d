"""Settings for all tests."""

import os

# Before anything imports the hub's client: no test may depend on, or wait for, the network.
os.environ["HF_HUB_OFFLINE"] = "1"

import torch

# Test tensors are small: threads cost more than they give, and pytest-xdist already fills the cores.
torch.set_num_threads(1)
