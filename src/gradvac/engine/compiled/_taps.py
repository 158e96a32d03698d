"""Taps: parameters whose gradients a compiled region leaves to be formed outside of it.

A compiled region is one node of the autograd graph: what it computes inside cannot be separated by
task. So a product with a weight, `y = x @ W`, is computed inside from a detached `W`, and the node
of a tap outside takes its place: the region's backward hands it the gradient of `y`, and `x`. Both
come as gradients of placeholders, `output` and `operand`, which are inputs of the region and are
never read, so that nothing is held longer than the region itself holds it.

Without an aligner, the tap's own backward forms the gradient of the weight; a fast path
(`gradients/uses`) forms it by task.
"""

# N entries, O outputs, I inputs, V rows of a table

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from gradvac.engine.graph import ANCHOR, TAPS


@lru_cache(maxsize=64)
def _zero(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.zeros((), dtype=dtype, device=device)


def _placeholder(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of this shape without memory."""
    return _zero(dtype, device).expand(tuple(shape))


def _flat(values: Tensor) -> Tensor:
    return values.reshape(-1, values.shape[-1])


class GradvacProduct(Function):
    """Stands for a weight and a bias: `x @ W.T + b`."""

    @staticmethod
    def forward(
        ctx: Any,
        _anchor: Tensor,
        weight: Tensor,
        _bias: Tensor | None,
        output: Sequence[int],
        operand: Sequence[int],
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        device = weight.device
        return _placeholder(output, dtype, device), _placeholder(operand, dtype, device)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None, x: Tensor | None) -> tuple[Any, ...]:
        weight = bias = None
        if gradient is not None and x is not None:
            gradient, x = _flat(gradient), _flat(x)
            if ctx.needs_input_grad[1]:
                weight = gradient.t() @ x
            if ctx.needs_input_grad[2]:
                bias = gradient.sum(0)
        return None, weight, bias, None, None, None


class GradvacLookup(Function):
    """Stands for a table `[V, D]` whose rows are looked up by token."""

    @staticmethod
    def forward(
        ctx: Any,
        _anchor: Tensor,
        table: Tensor,
        padding: int,
        output: Sequence[int],
        tokens: Sequence[int],
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.padding, ctx.num_rows = padding, table.shape[0]
        device = table.device
        return _placeholder(output, table.dtype, device), _placeholder(tokens, TOKENS, device)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None, tokens: Tensor | None) -> tuple[Any, ...]:
        table = None
        if gradient is not None and tokens is not None:
            table = torch.ops.aten.embedding_dense_backward(
                gradient, tokens.long(), ctx.num_rows, ctx.padding, False
            )
        return None, table, None, None, None


assert {f"{tap.__name__}Backward" for tap in (GradvacProduct, GradvacLookup)} == TAPS

TOKENS = torch.float64  # gradients are no integers: tokens are handed on as these, exactly


class _Product(Function):
    """A product inside a region; its weight is detached."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, *_taps: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        product = F.linear(_flat(x), weight, bias)
        # As in torch's own products, not a view: the next operation may write over it.
        shape = (*x.shape[:-1], weight.shape[0])
        shaped: Tensor = torch.ops.aten._unsafe_view(product, shape)
        return shaped

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        inner = gradient.matmul(weight) if ctx.needs_input_grad[0] else None
        return inner, None, None, gradient, x


class _Lookup(Function):
    """A lookup inside a region; its table is detached."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, table: Tensor, *_taps: Tensor) -> Tensor:
        ctx.save_for_backward(tokens)
        return F.embedding(tokens, table)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        (tokens,) = ctx.saved_tensors
        return None, None, gradient, tokens.to(TOKENS)


# Functions that a graph can call by name.


def product_tap(*given: Any) -> Any:
    """Placeholders for the output and the operand of a product."""
    return GradvacProduct.apply(ANCHOR, *given)


def lookup_tap(*given: Any) -> Any:
    """Placeholders for the output and the tokens of a lookup."""
    return GradvacLookup.apply(ANCHOR, *given)


def tapped_product(*given: Any) -> Any:
    """`(x, weight, bias, output, operand)`: the product."""
    return _Product.apply(*given)


def tapped_lookup(*given: Any) -> Any:
    """`(tokens, table, output, operand)`: rows of the table."""
    return _Lookup.apply(*given)


def seen_product(x: Tensor, weight: Tensor, bias: Tensor | None, *taps: Tensor) -> Tensor:
    """The same with nodes that everybody knows: gradients of the output reach its placeholder."""
    product = F.linear(x, weight)
    return (product if bias is None else product + bias) + taps[0]


def seen_lookup(tokens: Tensor, table: Tensor, *taps: Tensor) -> Tensor:
    """The same with nodes that everybody knows."""
    return F.embedding(tokens, table) + taps[0]
