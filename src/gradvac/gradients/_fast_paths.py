"""Fast paths: how a kind of node gives the task gradients of a parameter without being called.

A fast path is one function from a node, the input that is a parameter's, the gradient of its output
and whose the entries are, to a `Use`; None where it does not apply. `FAST_PATHS` says for which
nodes it is. A node without one is called once per task (`_one_backward.py`), which is exact too.
"""

# N entries, T tasks, O outputs, I inputs, D width

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gradvac.gradients._graph import call_node, saved
from gradvac.gradients._kernels import norm_sums
from gradvac.gradients._segments import Owned
from gradvac.gradients._uses import Formed, Lookup, Outer, Use

FastPath = Callable[[Any, int, Tensor, Owned, tuple[int, ...]], Use | None]
"""(node, number of the input, output gradient, owned, shape of the input) -> use."""


def _summed(values: Tensor, owned: Owned, shape: Sequence[int]) -> Formed | None:
    if values.is_complex():  # of a real parameter it would be the real part: the node knows
        return None
    return Formed(owned.sum(values, shape), owned.rows)


# -- matrix products -------------------------------------------------------------------------


def mm(node: Any, edge: int, gradient: Tensor, owned: Owned, _shape: tuple[int, ...]) -> Use | None:
    """`rows @ weight` or `weight @ columns`."""
    return _product(gradient, owned, lambda: saved(node, "self"), lambda: saved(node, "mat2"), edge)


def addmm(
    node: Any, edge: int, gradient: Tensor, owned: Owned, shape: tuple[int, ...]
) -> Use | None:
    """`bias + rows @ weight`."""
    factor = node._saved_beta if edge == 0 else node._saved_alpha
    if factor != 1:
        gradient = gradient * factor
    if edge == 0:
        return _summed(gradient, owned, shape)
    mat1, mat2 = (lambda: saved(node, "mat1")), (lambda: saved(node, "mat2"))
    return _product(gradient, owned, mat1, mat2, edge - 1)


def _product(
    gradient: Tensor,
    owned: Owned,
    first: Callable[[], Tensor],
    second: Callable[[], Tensor],
    edge: int,
) -> Use | None:
    if edge == 1 and (segments := owned.flat()) is not None:
        return Outer(first().conj(), gradient, segments)
    if edge == 0 and (segments := owned.columns()) is not None:
        return Outer(gradient.t(), second().conj().t(), segments)
    return None


def bmm(
    node: Any, edge: int, gradient: Tensor, owned: Owned, _shape: tuple[int, ...]
) -> Use | None:
    """Several products at once, whose rows lie along dimension 1."""
    parts = owned.positions(1)
    if edge != 1 or parts is None:
        return None
    rows = saved(node, "self").conj()
    found = [rows[:, own].mT @ gradient[:, own] for own in parts]
    return Formed(torch.stack(found), owned.rows)


# -- lookups ---------------------------------------------------------------------------------


def embedding(
    node: Any, _edge: int, gradient: Tensor, owned: Owned, shape: tuple[int, ...]
) -> Use | None:
    """Rows of a table by token."""
    segments = owned.flat()
    if segments is None or node._saved_scale_grad_by_freq:
        return None
    tokens = saved(node, "indices").reshape(-1)
    values = gradient.reshape(-1, shape[1])
    padding = node._saved_padding_idx
    if 0 <= padding < shape[0]:
        values = values.masked_fill((tokens == padding)[:, None], 0.0)
    return Lookup(values, tokens, shape[0], segments)


def index(
    node: Any, _edge: int, gradient: Tensor, owned: Owned, shape: tuple[int, ...]
) -> Use | None:
    """`table[tokens]`."""
    tokens = node._saved_indices
    plain = len(tokens) == 1 and tokens[0] is not None and len(shape) == 2
    segments = owned.flat()
    if not plain or segments is None or tokens[0].dtype not in (torch.int64, torch.int32):
        return None
    return Lookup(
        gradient.reshape(-1, shape[1]), tokens[0].reshape(-1).long() % shape[0], shape[0], segments
    )


# -- normalisations --------------------------------------------------------------------------


def layer_norm(
    node: Any, edge: int, gradient: Tensor, owned: Owned, shape: tuple[int, ...]
) -> Use | None:
    """Scale (1) and shift (2) of a layer normalisation."""
    if edge == 2:
        shift = owned.kept.pop("shift", None)
        return _summed(gradient, owned, shape) if shift is None else Formed(shift, owned.rows)
    if edge != 1:
        return None
    x, mean, scale = saved(node, "input"), saved(node, "result1"), saved(node, "result2")
    return _norm(gradient, x, mean, scale, owned, shape)


def rms_norm(
    node: Any, edge: int, gradient: Tensor, owned: Owned, shape: tuple[int, ...]
) -> Use | None:
    """Scale (1) of a fused RMS normalisation."""
    if edge != 1:
        return None
    return _norm(gradient, saved(node, "input"), None, saved(node, "result1"), owned, shape)


def _norm(
    gradient: Tensor,
    x: Tensor,
    mean: Tensor | None,
    scale: Tensor,
    owned: Owned,
    shape: tuple[int, ...],
) -> Use | None:
    segments = owned.flat()
    if len(shape) == 1 and segments is not None and segments.only is None:
        sums = norm_sums(gradient, x, mean, scale, segments)
        if sums is not None:
            owned.kept["shift"] = sums[1]  # the same pass gave it
            return Formed(sums[0], owned.rows)
    dtype = torch.promote_types(x.dtype, torch.float32)
    normal = x.to(dtype) if mean is None else x.to(dtype) - mean
    return _summed(gradient * (normal * scale), owned, shape)


def group_norm(
    node: Any, edge: int, gradient: Tensor, owned: Owned, shape: tuple[int, ...]
) -> Use | None:
    """Scale (1) and shift (2) of a group normalisation of `[B, C, ...]`."""
    if edge == 0 or owned.dim is None or owned.dim > 1:
        return None
    values = gradient
    if edge == 1:
        x, mean, scale = saved(node, "input"), saved(node, "result1"), saved(node, "result2")
        grouped = x.reshape(node._saved_N, node._saved_group, -1)
        normal = ((grouped - mean[..., None]) * scale[..., None]).view(x.shape)
        values = gradient * normal
    return _by_channel(values, owned, shape)


def _by_channel(values: Tensor, owned: Owned, shape: tuple[int, ...]) -> Use | None:
    """Sum `[B, C, ...]` over all but the channel."""
    dtype = torch.promote_types(values.dtype, torch.float32)
    by_row = values.flatten(2).sum(2, dtype=dtype) if values.dim() > 2 else values
    return _summed(by_row, owned.at(by_row.shape), shape)


# -- convolutions ----------------------------------------------------------------------------


def convolution(
    node: Any, edge: int, gradient: Tensor, owned: Owned, shape: tuple[int, ...]
) -> Use | None:
    """Kernel (1) and shift (2), from the rows of each task alone."""
    if edge == 2:
        return _by_channel(gradient, owned, shape) if owned.dim in (0, 1) else None
    parts = owned.positions(0)
    if edge != 1 or parts is None:
        return None
    x, weight = saved(node, "input"), saved(node, "weight")
    options = (
        node._saved_stride,
        node._saved_padding,
        node._saved_dilation,
        node._saved_transposed,
        node._saved_output_padding,
        node._saved_groups,
    )
    out = gradient.new_zeros(owned.num_tasks, *shape)
    for mine, own in zip(out, parts, strict=True):
        if len(own):
            _, kernel, _ = torch.ops.aten.convolution_backward(
                gradient[own], x[own], weight, None, *options, (False, True, False)
            )
            mine.copy_(kernel)
    return Formed(out, owned.rows)


# -- entry by entry --------------------------------------------------------------------------


def add(node: Any, edge: int, gradient: Tensor, owned: Owned, shape: tuple[int, ...]) -> Use | None:
    """A shift that was broadcast: positions, a bias."""
    return _summed(gradient if edge == 0 else gradient * node._saved_alpha, owned, shape)


def sub(node: Any, edge: int, gradient: Tensor, owned: Owned, shape: tuple[int, ...]) -> Use | None:
    """A shift that was subtracted."""
    return _summed(gradient if edge == 0 else gradient * -node._saved_alpha, owned, shape)


def mul(node: Any, edge: int, gradient: Tensor, owned: Owned, shape: tuple[int, ...]) -> Use | None:
    """A scale that was broadcast: a temperature, a hand-written normalisation's weight."""
    other = saved(node, "other" if edge == 0 else "self")
    return _summed(gradient * other.conj(), owned, shape)


def div(node: Any, edge: int, gradient: Tensor, owned: Owned, shape: tuple[int, ...]) -> Use | None:
    """A scale that divides."""
    other = saved(node, "other")
    if gradient.is_complex() or getattr(node, "_saved_rounding_mode", None) is not None:
        return None
    if edge == 0:
        return _summed(gradient / other, owned, shape)
    return _summed(-gradient * saved(node, "self") / (other * other), owned, shape)


def expand(
    _node: Any, _edge: int, gradient: Tensor, owned: Owned, shape: tuple[int, ...]
) -> Use | None:
    """One for all rows: a class token, a soft prompt."""
    return _summed(gradient, owned, shape)


def entrywise(
    node: Any, edge: int, gradient: Tensor, owned: Owned, shape: tuple[int, ...]
) -> Use | None:
    """Any operation on single entries: one call of the node for all tasks.

    Broadcasting is not undone by the node, so that its result still has an entry for every row.
    """
    value = call_node(node, [gradient])[edge]
    if value is None or value.shape != gradient.shape:
        return None
    return _summed(value, owned, shape)


_ENTRYWISE = (
    "Where",
    "Addcmul",
    "Addcdiv",
    "Pow1",
    "Maximum",
    "Minimum",
    "Lerp1",
    "PreluKernel",
    "Atan2",
    "Logaddexp",
    "Hypot",
    "Rsub1",
    "Xlogy",
)

FAST_PATHS: dict[str, FastPath] = {
    **{f"{name}Backward0": entrywise for name in _ENTRYWISE if name[-1] != "1"},
    **{f"{name[:-1]}Backward1": entrywise for name in _ENTRYWISE if name[-1] == "1"},
    "MmBackward0": mm,
    "AddmmBackward0": addmm,
    "BmmBackward0": bmm,
    "EmbeddingBackward0": embedding,
    "IndexBackward0": index,
    "NativeLayerNormBackward0": layer_norm,
    "FusedRmsNormBackward0": rms_norm,
    "NativeGroupNormBackward0": group_norm,
    "ConvolutionBackward0": convolution,
    "AddBackward0": add,
    "SubBackward0": sub,
    "MulBackward0": mul,
    "DivBackward0": div,
    "ExpandBackward0": expand,
}
