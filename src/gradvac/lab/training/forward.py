"""What surrounds forward passes: mixed precision, and attention for batches of any shape."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

# Not cuDNN's, which some GPUs prefer: it plans anew for every shape of a batch, which takes ten
# times as long as the step itself. Not the one without masks either: Hugging Face's models leave
# out a mask that hides nothing, but not while a CUDA graph is recorded, and the recorded step would
# not be the one that was verified.
_FOR_ANY_SHAPE = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@contextmanager
def around_forward(precision: str, device: torch.device) -> Iterator[None]:
    """Autocast if the precision is "bf16", and attention for batches of any shape."""
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16")
    with autocast, any_shape_attention(device):
        yield


def any_shape_attention(device: torch.device) -> AbstractContextManager[None]:
    """On a GPU, attention by kernels that take every shape as it comes."""
    return nullcontext() if device.type == "cpu" else sdpa_kernel(_FOR_ANY_SHAPE)
