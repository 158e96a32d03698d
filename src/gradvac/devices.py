"""What lets a GPU run ahead of the host: index tensors that are moved once, and Triton kernels."""

from collections.abc import Sequence
from functools import cache, lru_cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor


def index_on(values: Sequence[int] | Tensor, device: torch.device) -> Tensor:
    """An int64 tensor of `values` on `device`; the same tensor each time, never to be written.

    A copy from ordinary host memory makes the host wait for the device and cannot be part of a CUDA
    graph. Steps use the same few index lists over and over, so each is moved once.
    """
    if isinstance(values, Tensor):
        if values.device == device:
            return values
        if values.device.type != "cpu":
            return values.to(device, non_blocking=True)
        return _cached(values.to(torch.int64).contiguous().numpy().tobytes(), device)
    return _cached(torch.tensor(list(values), dtype=torch.int64).numpy().tobytes(), device)


@lru_cache(maxsize=256)
def _cached(content: bytes, device: torch.device) -> Tensor:
    if not content:
        return torch.zeros(0, dtype=torch.int64, device=device)
    values = torch.frombuffer(bytearray(content), dtype=torch.int64)
    if device.type == "cuda":  # from pinned memory the copy does not make the host wait
        values = values.pin_memory()
    return values.to(device, non_blocking=True)


@cache
def triton_module(name: str) -> Any:
    """A module of Triton kernels by its full name, or None where Triton is not installed."""
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "triton":
            raise
        return None
