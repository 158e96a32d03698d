"""Settings of the engine tests."""

import torch

# The tensors are tiny: a second thread would only wait.
torch.set_num_threads(1)
