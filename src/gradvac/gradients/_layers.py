"""Layers whose weight gradients are formed task by task inside one backward.

Each is a custom `autograd.Function` (it survives activation checkpointing; forward hooks do not)
that computes the input gradient as usual and states what its parameters receive. The parameters
stay inputs of the Function, so that a plain `loss.backward()` on an attached model works as ever.
`tokens` are leaves that only tell the engine when all uses of a component have arrived.
"""

# B rows, N = B * (positions) entries, T tasks, D width

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from gradvac.gradients._contributions import Formed, Lookup, Outer, RowSum, Sliced
from gradvac.gradients._kernels import triton_kernels

if TYPE_CHECKING:
    from gradvac.gradients._site import Site

Gradients = tuple[Tensor | None, ...]


class LinearTasks(torch.autograd.Function):
    """`nn.Linear`."""

    @staticmethod
    def forward(
        ctx: Any, site: Site, x: Tensor, weight: Tensor, bias: Tensor | None, *tokens: Tensor
    ) -> Tensor:
        x, (low_weight, low_bias) = site.cast(x, weight, bias)
        ctx.site, ctx.rows, ctx.num_tokens = site, site.rows(x), len(tokens)
        ctx.save_for_backward(x, low_weight)
        return _no_view(F.linear(x, low_weight, low_bias))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Gradients:
        x, weight = ctx.saved_tensors
        gy = grads[0].to(weight.dtype)
        flat, flat_x = gy.reshape(-1, gy.shape[-1]), x.reshape(-1, x.shape[-1])
        gx = gy @ weight if ctx.needs_input_grad[1] else None
        settle = ctx.site.settling(ctx)
        gw = settle(2, lambda: Outer(flat, flat_x))
        gb = settle(3, lambda: RowSum(flat, flat.shape[1:]))
        return None, gx, gw, gb, *(None,) * ctx.num_tokens


class EmbeddingTasks(torch.autograd.Function):
    """`nn.Embedding`."""

    @staticmethod
    def forward(
        ctx: Any, site: Site, tokens: Tensor, weight: Tensor, padding: int | None, *leaves: Tensor
    ) -> Tensor:
        ctx.site, ctx.rows, ctx.num_tokens = site, site.rows(tokens), len(leaves)
        ctx.padding, ctx.vocabulary = padding, weight.shape[0]
        ctx.save_for_backward(tokens)
        return _no_view(F.embedding(tokens, weight))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Gradients:
        (tokens,) = ctx.saved_tensors
        gy = grads[0].reshape(tokens.numel(), -1)
        tokens = tokens.reshape(-1)
        if ctx.padding is not None:
            gy = gy * (tokens != ctx.padding)[:, None]
        gw = ctx.site.settling(ctx)(2, lambda: Lookup(gy, tokens, ctx.vocabulary))
        return None, None, gw, None, *(None,) * ctx.num_tokens


class NormTasks(torch.autograd.Function):
    """`nn.LayerNorm` and `nn.RMSNorm`."""

    @staticmethod
    def forward(
        ctx: Any,
        site: Site,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        kind: tuple[tuple[int, ...], float, bool],
        *tokens: Tensor,
    ) -> Tensor:
        shape, eps, is_rms = kind
        if torch.is_autocast_enabled(x.device.type):
            x = x.float()  # as autocast does for normalisations
        if is_rms:
            dims = tuple(range(-len(shape), 0))
            power = x.to(torch.promote_types(x.dtype, torch.float32)).square()
            scale = power.mean(dims, keepdim=True).add(eps).rsqrt()
            mean, y = torch.zeros_like(scale), (x * scale).to(x.dtype) * weight
        else:
            y, mean, scale = torch.native_layer_norm(x, shape, weight, bias, eps)
        ctx.site, ctx.rows, ctx.num_tokens = site, site.rows(x), len(tokens)
        ctx.shape, ctx.is_rms = shape, is_rms
        ctx.save_for_backward(x, mean, scale, weight)
        return _no_view(y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Gradients:
        x, mean, scale, weight = ctx.saved_tensors
        settle = ctx.site.settling(ctx)
        rest = (None,) * (1 + ctx.num_tokens)
        kernels = triton_kernels() if x.is_cuda and len(ctx.shape) == 1 else None
        if kernels is not None and (x.shape[-1] > kernels.WIDEST or x.dtype == torch.float64):
            kernels = None
        if kernels is not None and settle.segments is not None:
            flat = [t.reshape(-1, t.shape[-1]) for t in (grads[0].to(x.dtype), x, mean, scale)]
            gx, dw, db = kernels.norm_backward(*flat, weight, settle.segments, ctx.is_rms)
            gw = settle(2, lambda: Formed(dw))
            gb = settle(3, lambda: Formed(db))
            return None, gx.view(x.shape), gw, gb, *rest

        gy = grads[0].to(x.dtype)
        normal = ((x - mean) * scale).to(x.dtype)
        if ctx.is_rms:
            inner = gy * weight
            dims = tuple(range(-len(ctx.shape), 0))
            gx = (inner - normal * (inner * normal).mean(dims, keepdim=True)) * scale
        else:
            native: Callable[..., Any] = torch.ops.aten.native_layer_norm_backward
            gx = native(gy, x, ctx.shape, mean, scale, weight, None, [True, False, False])[0]
        size = weight.numel()
        gw = settle(2, lambda: RowSum((gy * normal).reshape(-1, size), weight.shape))
        gb = settle(3, lambda: RowSum(gy.reshape(-1, size), weight.shape))
        return None, gx.to(x.dtype), gw, gb, *rest


class GroupNormTasks(torch.autograd.Function):
    """`nn.GroupNorm`: the scale and shift of every channel."""

    @staticmethod
    def forward(
        ctx: Any,
        site: Site,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        kind: tuple[int, float],
        *tokens: Tensor,
    ) -> Tensor:
        if torch.is_autocast_enabled(x.device.type):
            x = x.float()
        groups, eps = kind
        grouped = x.reshape(x.shape[0], groups, -1)
        mean = grouped.mean(-1, keepdim=True)
        scale = grouped.var(-1, correction=0, keepdim=True).add(eps).rsqrt()
        ctx.site, ctx.rows, ctx.num_tokens = site, site.rows(x), len(tokens)
        ctx.groups = groups
        ctx.save_for_backward(x, mean, scale, weight)
        return _no_view(F.group_norm(x, groups, weight, bias, eps))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Gradients:
        x, mean, scale, weight = ctx.saved_tensors
        gy = grads[0].to(x.dtype)
        channels = (1, -1, *(1,) * (x.dim() - 2))
        shape = (x.shape[0], ctx.groups, -1)
        normal = (x.reshape(shape) - mean) * scale
        inner = (gy * weight.view(channels)).reshape(shape)
        gx = inner - inner.mean(-1, keepdim=True)
        gx = (gx - normal * (inner * normal).mean(-1, keepdim=True)) * scale
        positions = tuple(range(2, x.dim()))

        def per_row(values: Tensor) -> Tensor:
            return values.sum(positions) if positions else values

        settle = ctx.site.settling(ctx)
        gw = settle(2, lambda: RowSum(per_row(gy * normal.view_as(x)), weight.shape))
        gb = settle(3, lambda: RowSum(per_row(gy), weight.shape))
        return None, gx.view(x.shape), gw, gb, None, *(None,) * ctx.num_tokens


class ConvTasks(torch.autograd.Function):
    """`nn.Conv1d`, `nn.Conv2d`, `nn.Conv3d` with zero padding."""

    @staticmethod
    def forward(
        ctx: Any,
        site: Site,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        module: nn.modules.conv._ConvNd,
        *tokens: Tensor,
    ) -> Tensor:
        x, (low_weight, low_bias) = site.cast(x, weight, bias)
        ctx.site, ctx.rows, ctx.num_tokens = site, site.rows(x), len(tokens)
        where = (module.stride, module.padding, module.dilation)
        ctx.geometry = (*map(list, where), False, [0] * (x.dim() - 2), module.groups)
        ctx.save_for_backward(x, low_weight)
        return _no_view(torch.convolution(x, low_weight, low_bias, *ctx.geometry))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Gradients:
        x, weight = ctx.saved_tensors
        gy = grads[0].to(weight.dtype)

        def run(entries: Tensor | None, wanted: list[bool]) -> tuple[Tensor, Tensor, Tensor]:
            own_gy, own_x = (gy, x) if entries is None else (gy[entries], x[entries])
            call: Callable[..., Any] = torch.ops.aten.convolution_backward
            result: tuple[Tensor, Tensor, Tensor] = call(
                own_gy, own_x, weight, None, *ctx.geometry, wanted
            )
            return result

        gx = run(None, [True, False, False])[0] if ctx.needs_input_grad[1] else None
        positions = tuple(range(2, gy.dim()))
        settle = ctx.site.settling(ctx)
        gw = settle(2, lambda: Sliced(x.shape[0], lambda own: run(own, [False, True, False])[1]))
        gb = settle(3, lambda: RowSum(gy.sum(positions), gy.shape[1:2]))
        return None, gx, gw, gb, None, *(None,) * ctx.num_tokens


def _no_view(y: Tensor) -> Tensor:
    """The same tensor, to be modified in place by whoever comes next (`nn.ReLU(inplace=True)`).

    Many operations return a reshaped view of what they computed, and autograd refuses to have views
    that come from a Function overwritten.
    """
    result: Tensor = torch.ops.aten._unsafe_view(y, y.shape) if y._is_view() else y
    return result


def _linear(site: Site, module: nn.Linear, input: Tensor) -> Tensor:
    return _apply(LinearTasks, site, _with_batch(site, input), module.weight, module.bias)


def _embedding(site: Site, module: nn.Embedding, input: Tensor) -> Tensor:
    tokens = site.broadcast()(input, input.dim() + 1)
    return _apply(EmbeddingTasks, site, tokens, module.weight, module.padding_idx)


def _layer_norm(site: Site, module: nn.LayerNorm, input: Tensor) -> Tensor:
    kind = (tuple(module.normalized_shape), module.eps, False)
    return _apply(NormTasks, site, _with_batch(site, input), module.weight, module.bias, kind)


def _rms_norm(site: Site, module: nn.RMSNorm, input: Tensor) -> Tensor:
    eps = torch.finfo(input.dtype).eps if module.eps is None else module.eps
    kind = (tuple(module.normalized_shape), eps, True)
    return _apply(NormTasks, site, _with_batch(site, input), module.weight, None, kind)


def _group_norm(site: Site, module: nn.GroupNorm, input: Tensor) -> Tensor:
    kind = (module.num_groups, module.eps)
    return _apply(GroupNormTasks, site, input, module.weight, module.bias, kind)


def _conv(site: Site, module: nn.modules.conv._ConvNd, input: Tensor) -> Tensor:
    return _apply(ConvTasks, site, input, module.weight, module.bias, module)


def _with_batch(site: Site, x: Tensor) -> Tensor:
    return site.broadcast()(x, x.dim()) if x.shape[0] == 1 else x


def _apply(function: type[torch.autograd.Function], site: Site, *args: object) -> Tensor:
    result: Tensor = function.apply(site, *args, *site.tokens)
    return result


def _always(module: nn.Module) -> bool:  # noqa: ARG001
    return True


def _has_plain_padding(module: nn.Module) -> bool:
    return module.padding_mode == "zeros" and not isinstance(module.padding, str)


HANDLERS: list[tuple[type[nn.Module], Callable[..., Tensor], Callable[[Any], bool]]] = [
    (nn.Linear, _linear, _always),
    (
        nn.Embedding,
        _embedding,
        lambda m: m.max_norm is None and not m.scale_grad_by_freq and not m.sparse,
    ),
    (nn.LayerNorm, _layer_norm, _always),
    (nn.RMSNorm, _rms_norm, _always),
    (nn.GroupNorm, _group_norm, _always),
    (nn.Conv1d, _conv, _has_plain_padding),
    (nn.Conv2d, _conv, _has_plain_padding),
    (nn.Conv3d, _conv, _has_plain_padding),
]


def find_handler(module: nn.Module) -> Callable[..., Tensor] | None:
    """The layer that computes what `module.forward` computes, or None.

    A module with another `forward` computes something else, and is not ours to replace; nor is one
    whose weight is no parameter but computed from others.
    """
    if module._parameters.get("weight") is None:
        return None
    runs = getattr(module.forward, "__func__", None)
    for kind, handler, fits in HANDLERS:
        if isinstance(module, kind) and runs is kind.forward and fits(module):
            return handler
    return None
