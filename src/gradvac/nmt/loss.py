"""The cross-entropy of labels, with smoothing, in few passes over the logits.

There are a hundred times as many logits as anything else in a batch, so that time and memory of the
loss are those of its passes over them.
"""

# N labels, V vocabulary

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def cross_entropy(logits: Tensor, labels: Tensor, smoothing: float) -> Tensor:
    """Like `F.cross_entropy` of every label, `[N]`, in float32 or better.

    That one has, under autocast, a copy of the log-probabilities in float32, a gradient of the
    labels' and one of the smoothing, each `[N, V]`, and their sum.
    """
    chances = logits.log_softmax(-1, dtype=logits.dtype)
    losses: Tensor = _SmoothedLoss.apply(chances, labels, smoothing)
    return losses


class _SmoothedLoss(torch.autograd.Function):
    """-(1 - smoothing) of the label's log-probability - smoothing of the mean of all."""

    @staticmethod
    def forward(ctx: Any, chances: Tensor, labels: Tensor, smoothing: float) -> Tensor:
        kind = torch.promote_types(chances.dtype, torch.float32)
        ctx.save_for_backward(labels)
        ctx.shape, ctx.dtype, ctx.smoothing = chances.shape, chances.dtype, smoothing
        said = chances.gather(1, labels[:, None])[:, 0].to(kind)
        if not smoothing:
            return -said
        return (smoothing - 1) * said - smoothing * chances.mean(1, dtype=kind)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (labels,) = ctx.saved_tensors
        incoming = gradients[0]
        rest = (incoming * (-ctx.smoothing / ctx.shape[1])).to(ctx.dtype)
        gradient = rest[:, None].expand(ctx.shape).contiguous()
        label = (incoming * (ctx.smoothing - 1)).to(ctx.dtype)
        return gradient.scatter_add_(1, labels[:, None], label[:, None]), None, None


def compiled_cross_entropy(logits: Tensor, labels: Tensor, smoothing: float) -> Tensor:
    """The same as a kernel for each direction, made when it is first needed, on a GPU."""
    work = _compile() if logits.is_cuda else cross_entropy
    return work(logits, labels, smoothing)


def _plain(logits: Tensor, labels: Tensor, smoothing: float) -> Tensor:
    return F.cross_entropy(logits, labels, reduction="none", label_smoothing=smoothing)


@cache
def _compile() -> Callable[[Tensor, Tensor, float], Tensor]:
    compiled: Callable[[Tensor, Tensor, float], Tensor] = torch.compile(_plain)
    return compiled


@cache
def most_logits(device: torch.device, *, is_compiled: bool) -> int:
    """How many logits may be held at once: a quarter of a GPU's memory."""
    if device.type != "cuda":
        return 1 << 27
    # The logits, their logarithms and the gradients of both, in float32; compiled, in bf16 alone.
    bytes_each = 8 if is_compiled else 16
    return int(torch.cuda.get_device_properties(device).total_memory // 4 // bytes_each)
