"""Triton kernels: the cross-entropy of labels with smoothing, and its gradient.

Bound by memory: the forward reads the logits once, the backward reads them once and writes their
gradient. The reference is `plain_cross_entropy` in `loss.py`.
"""

# N labels, V vocabulary

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096
_WARPS = 8


@triton.jit
def _losses_kernel(
    LOGITS, LABELS, LOSSES, LOG_SUMS, V, SMOOTHING, BLOCK: tl.constexpr, SMOOTH: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    start = LOGITS + row * V
    columns = tl.arange(0, BLOCK)
    # By place first, one sum over places at the end.
    most = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    plain = tl.zeros([BLOCK], tl.float32)
    for first in range(0, V, BLOCK):
        inside = first + columns < V
        x = tl.load(start + first + columns, mask=inside, other=float("-inf")).to(tl.float32)
        above = tl.maximum(most, x)
        # exp(-inf - -inf) is no number: a place that has seen nothing has a total of 0.
        safe = tl.where(above == float("-inf"), 0.0, above)
        total = total * tl.exp(most - safe) + tl.exp(x - safe)
        most = above
        if SMOOTH:
            plain += tl.where(inside, x, 0.0)
    top = tl.max(most, 0)
    log_sum = top + tl.log(tl.sum(total * tl.exp(most - top), 0))
    label = tl.load(LABELS + row)
    valid = (label >= 0) & (label < V)
    said = tl.load(start + label, mask=valid, other=float("nan")).to(tl.float32)
    loss = log_sum - said
    if SMOOTH:
        loss = log_sum - (1.0 - SMOOTHING) * said - SMOOTHING * (tl.sum(plain, 0) / V)
    tl.store(LOSSES + row, loss)
    tl.store(LOG_SUMS + row, log_sum)


@triton.jit
def _gradient_kernel(LOGITS, LABELS, LOG_SUMS, INCOMING, OUT, V, SMOOTHING, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < V
    x = tl.load(LOGITS + row * V + columns, mask=inside, other=float("-inf")).to(tl.float32)
    gradient = tl.exp(x - tl.load(LOG_SUMS + row)) - SMOOTHING / V
    gradient -= tl.where(columns == tl.load(LABELS + row), 1.0 - SMOOTHING, 0.0)
    gradient *= tl.load(INCOMING + row)
    tl.store(OUT + row * V + columns, gradient.to(OUT.dtype.element_ty), mask=inside)


def losses_of(logits: Tensor, labels: Tensor, smoothing: float) -> tuple[Tensor, Tensor]:
    """The loss of every label, and the logarithm of the sum that its probability is a share of.

    Args:
        logits: `[N, V]`, contiguous, of at most 32 bits.
        labels: `[N]`, int64; the loss of one outside the vocabulary is no number.
        smoothing: Share of the probability spread over the vocabulary.

    Returns:
        Both `[N]`, in float32.
    """
    num, vocabulary = logits.shape
    losses, log_sums = (logits.new_empty(num, dtype=torch.float32) for _ in range(2))
    _losses_kernel[(num,)](
        logits,
        labels.contiguous(),
        losses,
        log_sums,
        vocabulary,
        smoothing,
        BLOCK=_BLOCK,
        SMOOTH=smoothing > 0,
        num_warps=_WARPS,
    )
    return losses, log_sums


def logit_gradients(
    logits: Tensor, labels: Tensor, log_sums: Tensor, incoming: Tensor, smoothing: float
) -> Tensor:
    """The gradient of the logits, `[N, V]`, for a gradient of every loss, `[N]`."""
    num, vocabulary = logits.shape
    gradient = torch.empty_like(logits)
    _gradient_kernel[(num, triton.cdiv(vocabulary, _BLOCK))](
        logits,
        labels.contiguous(),
        log_sums,
        incoming.float().contiguous(),
        gradient,
        vocabulary,
        smoothing,
        BLOCK=_BLOCK,
        num_warps=_WARPS,
    )
    return gradient
