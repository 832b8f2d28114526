"""One thread: small matrices on shared cores are slower with more."""

import torch

torch.set_num_threads(1)
