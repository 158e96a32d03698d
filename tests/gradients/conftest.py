"""Settings of the engine tests."""

import pytest
import torch

# The tensors are tiny: a second thread would only wait.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _same_draws() -> None:
    """Whatever ran before, and in whichever process."""
    torch.manual_seed(0)
