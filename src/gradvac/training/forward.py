"""What surrounds forward passes: mixed precision, and attention for batches of any shape."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

# Without cuDNN's, which some GPUs prefer: it plans anew for every shape of a batch, which takes ten
# times as long as the step itself.
_FOR_ANY_SHAPE = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@contextmanager
def around_forward(precision: str, device: torch.device) -> Iterator[None]:
    """Autocast if the precision is "bf16", and attention for batches of any shape."""
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16")
    with autocast, any_shape_attention():
        yield


def any_shape_attention() -> AbstractContextManager[None]:
    """Attention by kernels that take every shape as it comes."""
    return sdpa_kernel(_FOR_ANY_SHAPE)
