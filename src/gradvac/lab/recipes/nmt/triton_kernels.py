"""Triton kernels: attention within short packed sentences, and cross-entropy with smoothing.

Attention: kernels made for long texts work on tiles of 128 tokens, of which a sentence fills a
quarter. Here one program computes a head of a sentence, in tiles of few tokens, and reads queries,
keys and values where the product left them. The reference is the padded form in `model.py`.

Cross-entropy is bound by memory: the forward reads the logits once, the backward reads them once
and writes their gradient. The reference is `plain_cross_entropy` in `loss.py`.
"""

# N tokens of all, or labels, B sentences, H heads, W width of a head, V vocabulary

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from gradvac.lab.recipes.nmt.model import split_qkv

# Tokens of a tile and warps of a program, forward and backward: the fastest for sentences of 30
# tokens, on an H200.
_FORWARD = {"TILE": 32, "num_warps": 1}
_BACKWARD = {"TILE": 64, "num_warps": 4}
_LOG2_E = 1.4426950408889634
_BLOCK, _WARPS = 4096, 8  # of the loss: logits of a row at a time


@triton.jit
def _read(START, first, num, step, TILE: tl.constexpr, WIDTH: tl.constexpr):
    """Tokens from `first` on, `[TILE, WIDTH]`; 0 behind the sentence's end."""
    tokens = first + tl.arange(0, TILE)
    places = tokens.to(tl.int64)[:, None] * step + tl.arange(0, WIDTH)[None, :]
    return tl.load(START + places, mask=(tokens < num)[:, None], other=0.0)


@triton.jit
def _write(START, values, first, num, step, TILE: tl.constexpr, WIDTH: tl.constexpr):
    tokens = first + tl.arange(0, TILE)
    places = tokens.to(tl.int64)[:, None] * step + tl.arange(0, WIDTH)[None, :]
    tl.store(START + places, values.to(START.dtype.element_ty), mask=(tokens < num)[:, None])


@triton.jit
def _visible(query, key, num_keys, CAUSAL: tl.constexpr, TILE: tl.constexpr):
    """Which keys a query sees, `[TILE, TILE]`."""
    keys = key + tl.arange(0, TILE)[None, :]
    seen = keys < num_keys
    if CAUSAL:
        seen = seen & (keys <= query + tl.arange(0, TILE)[:, None])
    return seen


@triton.jit
def _sentence(ENDS, sentence):
    start = tl.load(ENDS + sentence)
    return start.to(tl.int64), tl.load(ENDS + sentence + 1) - start


@triton.jit
def _attend_kernel(
    Q,
    K,
    V,
    OUT,
    SUMS,
    Q_ENDS,
    K_ENDS,
    q_step,
    k_step,
    scale,
    num_tokens,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    sentence, head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    q_start, q_num = _sentence(Q_ENDS, sentence)
    k_start, k_num = _sentence(K_ENDS, sentence)
    q_from, k_from = q_start * q_step + head * WIDTH, k_start * k_step + head * WIDTH
    for query in range(0, q_num, TILE):
        q = _read(Q + q_from, query, q_num, q_step, TILE, WIDTH)
        most = tl.full([TILE], float("-inf"), tl.float32)
        total = tl.zeros([TILE], tl.float32)
        seen = tl.zeros([TILE, WIDTH], tl.float32)
        reach = tl.minimum(k_num, query + TILE) if CAUSAL else k_num
        for key in range(0, reach, TILE):  # every query sees key 0, so that `most` is finite
            k = _read(K + k_from, key, k_num, k_step, TILE, WIDTH)
            v = _read(V + k_from, key, k_num, k_step, TILE, WIDTH)
            scores = tl.dot(q, tl.trans(k)) * scale
            scores = tl.where(_visible(query, key, k_num, CAUSAL, TILE), scores, float("-inf"))
            higher = tl.maximum(most, tl.max(scores, 1))
            shares, shrink = tl.exp2(scores - higher[:, None]), tl.exp2(most - higher)
            total = total * shrink + tl.sum(shares, 1)
            seen = seen * shrink[:, None] + tl.dot(shares.to(v.dtype), v)
            most = higher
        total = tl.where(total > 0, total, 1.0)  # no keys: nothing is seen
        out = OUT + q_start * HEADS * WIDTH + head * WIDTH
        _write(out, seen / total[:, None], query, q_num, HEADS * WIDTH, TILE, WIDTH)
        tokens = query + tl.arange(0, TILE)
        sums = SUMS + head * num_tokens + q_start + tokens
        tl.store(sums, most + tl.log2(total), mask=tokens < q_num)


@triton.jit
def _read_queries(
    Q, DO, OUT, SUMS, query, num, q_step, step, TILE: tl.constexpr, WIDTH: tl.constexpr
):
    """Queries, gradients of what they saw, products of the two, and logarithms of sums."""
    q = _read(Q, query, num, q_step, TILE, WIDTH)
    do = _read(DO, query, num, step, TILE, WIDTH)
    out = _read(OUT, query, num, step, TILE, WIDTH)
    tokens = query + tl.arange(0, TILE)
    sums = tl.load(SUMS + tokens, mask=tokens < num, other=0.0)
    return q, do, tl.sum(do.to(tl.float32) * out.to(tl.float32), 1), sums


@triton.jit
def _shares(q, k, v, do, inner, sums, visible, scale):
    """Attention's shares, and the gradients of its scores."""
    shares = tl.where(visible, tl.exp2(tl.dot(q, tl.trans(k)) * scale - sums[:, None]), 0.0)
    change = shares * (tl.dot(do, tl.trans(v)) - inner[:, None])
    return shares.to(q.dtype), change.to(q.dtype)


@triton.jit
def _attend_backward_kernel(
    Q,
    K,
    V,
    OUT,
    SUMS,
    DO,
    DQ,
    DK,
    DV,
    Q_ENDS,
    K_ENDS,
    q_step,
    k_step,
    scale,
    natural_scale,
    num_tokens,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    sentence, head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    q_start, q_num = _sentence(Q_ENDS, sentence)
    k_start, k_num = _sentence(K_ENDS, sentence)
    q_from, k_from = q_start * q_step + head * WIDTH, k_start * k_step + head * WIDTH
    step: tl.constexpr = HEADS * WIDTH
    out_from = q_start * step + head * WIDTH
    Q, DQ, DO, OUT = Q + q_from, DQ + q_from, DO + out_from, OUT + out_from
    K, V, DK, DV = K + k_from, V + k_from, DK + k_from, DV + k_from
    SUMS = SUMS + head * num_tokens + q_start
    if q_num + k_num == 0:  # many rows of a batch of static shape are empty
        return
    if q_num <= TILE and k_num <= TILE:
        q, do, inner, sums = _read_queries(Q, DO, OUT, SUMS, 0, q_num, q_step, step, TILE, WIDTH)
        k = _read(K, 0, k_num, k_step, TILE, WIDTH)
        v = _read(V, 0, k_num, k_step, TILE, WIDTH)
        visible = _visible(0, 0, k_num, CAUSAL, TILE)
        shares, change = _shares(q, k, v, do, inner, sums, visible, scale)
        _write(DQ, tl.dot(change, k) * natural_scale, 0, q_num, q_step, TILE, WIDTH)
        _write(DK, tl.dot(tl.trans(change), q) * natural_scale, 0, k_num, k_step, TILE, WIDTH)
        _write(DV, tl.dot(tl.trans(shares), do), 0, k_num, k_step, TILE, WIDTH)
    else:
        for query in range(0, q_num, TILE):
            q, do, inner, sums = _read_queries(
                Q, DO, OUT, SUMS, query, q_num, q_step, step, TILE, WIDTH
            )
            dq = tl.zeros([TILE, WIDTH], tl.float32)
            reach = tl.minimum(k_num, query + TILE) if CAUSAL else k_num
            for key in range(0, reach, TILE):
                k = _read(K, key, k_num, k_step, TILE, WIDTH)
                v = _read(V, key, k_num, k_step, TILE, WIDTH)
                visible = _visible(query, key, k_num, CAUSAL, TILE)
                shares, change = _shares(q, k, v, do, inner, sums, visible, scale)
                dq += tl.dot(change, k)
            _write(DQ, dq * natural_scale, query, q_num, q_step, TILE, WIDTH)
        for key in range(0, k_num, TILE):
            k = _read(K, key, k_num, k_step, TILE, WIDTH)
            v = _read(V, key, k_num, k_step, TILE, WIDTH)
            dk = tl.zeros([TILE, WIDTH], tl.float32)
            dv = tl.zeros([TILE, WIDTH], tl.float32)
            for query in range(key if CAUSAL else 0, q_num, TILE):
                q, do, inner, sums = _read_queries(
                    Q, DO, OUT, SUMS, query, q_num, q_step, step, TILE, WIDTH
                )
                visible = _visible(query, key, k_num, CAUSAL, TILE)
                shares, change = _shares(q, k, v, do, inner, sums, visible, scale)
                dk += tl.dot(tl.trans(change), q)
                dv += tl.dot(tl.trans(shares), do)
            _write(DK, dk * natural_scale, key, k_num, k_step, TILE, WIDTH)
            _write(DV, dv, key, k_num, k_step, TILE, WIDTH)


def attend_short(
    qkv: Tensor, kv: Tensor | None, q_ends: Tensor, k_ends: Tensor, *, causal: bool
) -> Tensor:
    """Attention within sentences that lie one after the other, `[N, H, W]`.

    Args:
        qkv: Queries, and without `kv` keys and values too, `[N, 1 or 3, H, W]`.
        kv: Keys and values, `[M, 2, H, W]`.
        q_ends: Ends of the queries' sentences, int32 `[B + 1]`, starting with 0.
        k_ends: The same of keys and values.
        causal: A query sees the keys up to its own place.
    """
    seen: Tensor = _Attend.apply(qkv, kv, q_ends, k_ends, causal)
    return seen


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        qkv: Tensor,
        kv: Tensor | None,
        q_ends: Tensor,
        k_ends: Tensor,
        causal: bool,
    ) -> Tensor:
        qkv = qkv.contiguous()
        kv = None if kv is None else kv.contiguous()
        q, k, v = split_qkv(qkv, kv)
        num, heads, width = q.shape
        seen = torch.empty_like(q, memory_format=torch.contiguous_format)
        sums = q.new_empty(heads, num, dtype=torch.float32)
        ctx.grid, ctx.scale = (heads * (len(q_ends) - 1),), width**-0.5
        ctx.sizes = {"HEADS": heads, "WIDTH": width, "CAUSAL": causal}
        steps = (q.stride(0), k.stride(0), ctx.scale * _LOG2_E)
        _attend_kernel[ctx.grid](
            q, k, v, seen, sums, q_ends, k_ends, *steps, num, **ctx.sizes, **_FORWARD
        )
        ctx.save_for_backward(qkv, kv, seen, sums, q_ends, k_ends)
        return seen

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        qkv, kv, seen, sums, q_ends, k_ends = ctx.saved_tensors
        d_qkv = torch.empty_like(qkv)
        d_kv = None if kv is None else torch.empty_like(kv)
        (q, k, v), (dq, dk, dv) = split_qkv(qkv, kv), split_qkv(d_qkv, d_kv)
        steps = (q.stride(0), k.stride(0), ctx.scale * _LOG2_E, ctx.scale)
        grads = (gradients[0].contiguous(), dq, dk, dv)
        options = {**ctx.sizes, **_BACKWARD}
        _attend_backward_kernel[ctx.grid](
            q, k, v, seen, sums, *grads, q_ends, k_ends, *steps, len(q), **options
        )
        return d_qkv, d_kv, None, None, None


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
    logit = tl.load(start + label, mask=valid, other=float("nan")).to(tl.float32)
    loss = log_sum - logit
    if SMOOTH:
        loss = log_sum - (1.0 - SMOOTHING) * logit - SMOOTHING * (tl.sum(plain, 0) / V)
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


def smoothed_losses(logits: Tensor, labels: Tensor, smoothing: float) -> tuple[Tensor, Tensor]:
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
