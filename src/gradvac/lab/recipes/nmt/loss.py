"""The cross-entropy of labels, with smoothing, in few passes over the logits.

There are a hundred times as many logits as anything else in a batch, so that time and memory of the
loss are those of its passes over them.
"""

# N labels, V vocabulary

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gradvac.utils.devices import triton_module

_KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def cross_entropy(logits: Tensor, labels: Tensor, smoothing: float) -> Tensor:
    """Like `F.cross_entropy` of every label, `[N]`, in float32 or better."""
    if logits.is_cuda and logits.dtype in _KERNEL_DTYPES and _kernels() is not None:
        losses: Tensor = _KernelLoss.apply(logits, labels, smoothing)
        return losses
    return plain_cross_entropy(logits, labels, smoothing)


def _kernels() -> Any:
    return triton_module("gradvac.lab.recipes.nmt.triton_kernels")


class _KernelLoss(torch.autograd.Function):
    """A pass over the logits in each direction, which keeps them: a backward may run again."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, smoothing: float) -> Tensor:
        logits = logits.contiguous()
        losses: Tensor
        losses, log_sums = _kernels().smoothed_losses(logits, labels, smoothing)
        ctx.save_for_backward(logits, labels, log_sums)
        ctx.smoothing = smoothing
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        gradient = _kernels().logit_gradients(*ctx.saved_tensors, gradients[0], ctx.smoothing)
        return gradient, None, None


def plain_cross_entropy(logits: Tensor, labels: Tensor, smoothing: float) -> Tensor:
    """The same in torch operations.

    `F.cross_entropy` has, under autocast, a copy of the log-probabilities in float32, a gradient of
    the labels' and one of the smoothing, each `[N, V]`, and their sum.
    """
    log_probs = logits.log_softmax(-1, dtype=logits.dtype)
    losses: Tensor = _SmoothedLoss.apply(log_probs, labels, smoothing)
    return losses


class _SmoothedLoss(torch.autograd.Function):
    """-(1 - smoothing) of the label's log-probability - smoothing of the mean of all."""

    @staticmethod
    def forward(ctx: Any, log_probs: Tensor, labels: Tensor, smoothing: float) -> Tensor:
        kind = torch.promote_types(log_probs.dtype, torch.float32)
        ctx.save_for_backward(labels)
        ctx.shape, ctx.dtype, ctx.smoothing = log_probs.shape, log_probs.dtype, smoothing
        of_labels = log_probs.gather(1, labels[:, None])[:, 0].to(kind)
        if not smoothing:
            return -of_labels
        return (smoothing - 1) * of_labels - smoothing * log_probs.mean(1, dtype=kind)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (labels,) = ctx.saved_tensors
        incoming = gradients[0]
        rest = (incoming * (-ctx.smoothing / ctx.shape[1])).to(ctx.dtype)
        gradient = rest[:, None].expand(ctx.shape).contiguous()
        label = (incoming * (ctx.smoothing - 1)).to(ctx.dtype)
        return gradient.scatter_add_(1, labels[:, None], label[:, None]), None, None


@cache
def max_logits(device: torch.device) -> int:
    """How many logits may be held at once: a quarter of a GPU's memory."""
    if device.type != "cuda":
        return 1 << 27
    # In float32: the logits and their gradient; without kernels, their logarithms too, with theirs.
    bytes_each = 16 if _kernels() is None else 8
    return int(torch.cuda.get_device_properties(device).total_memory // 4 // bytes_each)
