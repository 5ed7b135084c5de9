"""Settings of all tests."""

import torch

torch.set_num_threads(1)  # tests run beside each other; more threads only fight for cores
