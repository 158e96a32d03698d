"""What lets a GPU run ahead of the host: index tensors that are moved once, and Triton kernels."""

from array import array
from collections.abc import Sequence
from functools import cache
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
    return _cached(array("q", values).tobytes(), device)


_MOST_CACHED = 256
_CACHE: dict[tuple[bytes, torch.device], Tensor] = {}  # the latest used last
RECORDED: list[object] = []  # what CUDA graphs read whenever they are replayed


def _cached(content: bytes, device: torch.device) -> Tensor:
    key, is_recorded = (content, device), is_captured(device)
    index = _CACHE.pop(key, None)
    if index is None:
        values = torch.frombuffer(bytearray(content), dtype=torch.int64) if content else _NOTHING
        if device.type == "cuda":  # from pinned memory the copy does not make the host wait
            values = values.pin_memory()
        index = values.to(device, non_blocking=True)
        if is_recorded:  # the copy is a part of the graph: there is nothing to be read outside it
            RECORDED.append((values, index))
            return index
    elif is_recorded:
        RECORDED.append(index)
    _CACHE[key] = index
    if len(_CACHE) > _MOST_CACHED:
        del _CACHE[next(iter(_CACHE))]
    return index


_NOTHING = torch.zeros(0, dtype=torch.int64)


def is_captured(device: torch.device) -> bool:
    """Whether a CUDA graph is being recorded: there is no waiting for the device then."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


@cache
def triton_module(name: str) -> Any:
    """A module of Triton kernels by its full name, or None where Triton is not installed."""
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "triton":
            raise
        return None
