"""Fast paths: how a kind of node gives the task gradients of a parameter without being called.

A fast path is one function from a `NodeInput`, an input of a node that is made of a parameter, to a
`Contribution`; None where it does not apply. `FAST_PATHS` says for which nodes it is. A node
without one is called once per task (`builder.py`), which is exact too. Linear layers,
normalisations and scales mostly do not come here: `plain_junctions.py` builds them together.
"""

# N entries, T tasks, O outputs, I inputs, D width

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gradvac.engine.contributions import (
    Built,
    Contribution,
    ExpertProducts,
    Lookup,
    OuterProduct,
)
from gradvac.engine.graph import RUN, Graph, aside, call_node, saved
from gradvac.engine.junctions import ParameterPath
from gradvac.engine.kernels import Owned, Segments, wide


@dataclass(slots=True)
class NodeInput:
    """An input of a node, in a backward."""

    graph: Graph
    position: int  # of the node
    node: Any
    gradient: Tensor  # of the node's output
    owned: Owned  # whose its entries are
    edge: int = 0  # number of the input
    path: ParameterPath = (-1, 0, False)  # down from it

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the input: that of what lies below it, where asking a parameter is fast."""
        position, number, is_transposed = self.path
        shape = self.graph.shape(position, number)
        return (*shape[:-2], *shape[:-3:-1]) if is_transposed else shape

    @property
    def operand(self) -> Tensor | None:
        """What a tap was handed beside the gradient."""
        return self.graph.operands.get(self.position)

    def summed(self, values: Tensor) -> Contribution | None:
        """Values like the output's, summed down to what was broadcast."""
        if values.is_complex():  # of a real parameter it would be the real part: the node knows
            return None
        return Built(self.owned.sum(values, self.shape), self.owned.rows)

    def summed_by_channel(self, values: Tensor) -> Contribution | None:
        """Values `[B, C, ...]`, summed over all but the channel."""
        dtype = wide(values.dtype)
        by_row = values.flatten(2).sum(2, dtype=dtype) if values.dim() > 2 else values
        owned = self.owned._replace(shape=by_row.shape)
        return replace(self, owned=owned).summed(by_row)


# -- matrix products -------------------------------------------------------------------------


def mm(at: NodeInput) -> Contribution | None:
    """`rows @ weight` or `weight @ columns`."""
    return _product(at, at.edge, "self", "mat2")


def addmm(at: NodeInput) -> Contribution | None:
    """`bias + rows @ weight`."""
    factor = at.node._saved_beta if at.edge == 0 else at.node._saved_alpha
    if factor != 1:
        at = replace(at, gradient=at.gradient * factor)
    return _product(at, at.edge - 1, "mat1", "mat2") if at.edge else at.summed(at.gradient)


def _product(at: NodeInput, factor: int, first: str, second: str) -> Contribution | None:
    if factor == 1 and (segments := at.owned.flat()) is not None:
        return OuterProduct(saved(at.node, first).conj(), at.gradient, segments)
    if factor == 0 and (segments := at.owned.along(len(at.owned.shape) - 1)) is not None:
        return OuterProduct(at.gradient.t(), saved(at.node, second).conj().t(), segments)
    return None


def bmm(at: NodeInput) -> Contribution | None:
    """Several products at once, whose rows lie along dimension 1."""
    segments = at.owned.along(1)
    if at.edge != 1 or segments is None or segments.only is not None:
        return None
    rows, parts = saved(at.node, "self").conj(), segments.entries_by_task(at.gradient.shape[1])
    products = [rows[:, positions].mT @ at.gradient[:, positions] for positions in parts]
    return Built(torch.stack(products), at.owned.rows)


def grouped_product(at: NodeInput) -> Contribution | None:
    """Weights of experts (1), whose rows come one expert after the other: by task and expert."""
    ends, segments = saved(at.node, "offs"), at.owned.flat()
    is_usual = at.edge == 1 and len(at.shape) == 3 and at.gradient.dim() == 2 and ends is not None
    if not is_usual or segments is None or segments.only is not None:
        return None
    return ExpertProducts(saved(at.node, "self"), at.gradient, ends, segments, at.graph.experts)


# -- lookups ---------------------------------------------------------------------------------


def embedding(at: NodeInput) -> Contribution | None:
    """Rows of a table by token; also from the gradients of all tasks, one after the other."""
    segments = at.owned.flat()
    if segments is None or at.node._saved_scale_grad_by_freq:
        return None
    return _lookup(at, segments, saved(at.node, "indices"), at.node._saved_padding_idx)


def _lookup(at: NodeInput, segments: Segments, tokens: Tensor, padding: int) -> Contribution:
    num_rows, width = at.shape
    tokens, values = tokens.reshape(-1).long(), at.gradient.reshape(-1, width)
    if len(values) > len(tokens):
        tokens = tokens.repeat(len(values) // len(tokens))
    if 0 <= padding < num_rows:
        values = values.masked_fill((tokens == padding)[:, None], 0.0)
    return Lookup(values, tokens, num_rows, segments)


def index(at: NodeInput) -> Contribution | None:
    """`table[tokens]`."""
    tokens, segments, shape = saved(at.node, "indices"), at.owned.flat(), at.shape
    is_lookup = len(tokens) == 1 and tokens[0] is not None and len(shape) == 2
    if not is_lookup or segments is None or tokens[0].dtype not in (torch.int64, torch.int32):
        return None
    return _lookup(at, segments, tokens[0].long() % shape[0], padding=-1)


# -- normalisations --------------------------------------------------------------------------


def layer_norm(at: NodeInput) -> Contribution | None:
    """Scale (1) and shift (2) of a layer normalisation."""
    if at.edge == 2:
        return at.summed(at.gradient)
    return _norm(at, saved(at.node, "result1"), saved(at.node, "result2")) if at.edge == 1 else None


def rms_norm(at: NodeInput) -> Contribution | None:
    """Scale (1) of a fused RMS normalisation."""
    return _norm(at, None, saved(at.node, "result1")) if at.edge == 1 else None


def _norm(at: NodeInput, mean: Tensor | None, scale: Tensor) -> Contribution | None:
    x = saved(at.node, "input")
    dtype = wide(x.dtype)
    normal = x.to(dtype) if mean is None else x.to(dtype) - mean
    return at.summed(at.gradient * (normal * scale))


def group_norm(at: NodeInput) -> Contribution | None:
    """Scale (1) and shift (2) of a group normalisation of `[B, C, ...]`."""
    if at.edge == 0 or at.owned.dim is None or at.owned.dim > 1:
        return None
    if at.edge == 2:
        return at.summed_by_channel(at.gradient)
    x, mean, scale = saved(at.node, "input"), saved(at.node, "result1"), saved(at.node, "result2")
    grouped = x.reshape(at.node._saved_N, at.node._saved_group, -1)
    normal = ((grouped - mean[..., None]) * scale[..., None]).view(x.shape)
    return at.summed_by_channel(at.gradient * normal)


def batch_norm(at: NodeInput) -> Contribution | None:
    """Scale (1) and shift (2) of a batch normalisation `[B, C, ...]` by running statistics."""
    if at.edge == 0 or at.node._saved_training or at.owned.dim != 0:
        return None
    if at.edge == 2:
        return at.summed_by_channel(at.gradient)
    x, mean = saved(at.node, "input"), saved(at.node, "running_mean")
    eps = at.node._saved_epsilon if hasattr(at.node, "_saved_epsilon") else at.node._saved_eps
    scale = (saved(at.node, "running_var") + eps).rsqrt()  # cuDNN has its own name for it
    view = (-1, *[1] * (x.dim() - 2))
    normal = (x.to(wide(x.dtype)) - mean.view(view)) * scale.view(view)
    return at.summed_by_channel(at.gradient * normal)


# -- convolutions ----------------------------------------------------------------------------


def convolution(at: NodeInput) -> Contribution | None:
    """Kernel (1) and shift (2), from the rows of each task alone."""
    if at.edge == 2:
        return at.summed_by_channel(at.gradient) if at.owned.dim in (0, 1) else None
    segments = at.owned.along(0)
    if at.edge != 1 or segments is None or segments.only is not None:
        return None
    x, weight, node = saved(at.node, "input"), saved(at.node, "weight"), at.node
    options = (
        node._saved_stride,
        node._saved_padding,
        node._saved_dilation,
        node._saved_transposed,
        node._saved_output_padding,
        node._saved_groups,
    )
    out = at.gradient.new_zeros(segments.num_tasks, *at.shape)
    for mine, positions in zip(out, segments.entries_by_task(len(x)), strict=True):
        if len(positions):
            _, kernel, _ = torch.ops.aten.convolution_backward(
                at.gradient[positions], x[positions], weight, None, *options, (False, True, False)
            )
            mine.copy_(kernel)
    return Built(out, at.owned.rows)


# -- compiled regions ------------------------------------------------------------------------


def tapped_weight(at: NodeInput) -> Contribution | None:
    """Weight (1) and shift (2) of a product."""
    if at.edge == 2:
        return at.summed(at.gradient)
    segments = at.owned.flat()
    if segments is None or at.operand is None:
        return None
    gradient = at.gradient.reshape(-1, at.gradient.shape[-1])
    x = at.operand.reshape(len(gradient), -1)
    return OuterProduct(gradient, x, segments)


def tapped_table(at: NodeInput) -> Contribution | None:
    """Rows of a table (1) by token."""
    segments = at.owned.flat()
    if segments is None or at.operand is None:
        return None
    _, (padding, _), _ = at.node.metadata[RUN]
    return _lookup(at, segments, at.operand.long(), padding)


# -- entry by entry --------------------------------------------------------------------------


def add(at: NodeInput) -> Contribution | None:
    """A shift that was broadcast: positions, a bias."""
    return at.summed(at.gradient if at.edge == 0 else at.gradient * at.node._saved_alpha)


def mul(at: NodeInput) -> Contribution | None:
    """A scale that was broadcast: a temperature, a hand-written normalisation's weight."""
    return at.summed(at.gradient * saved(at.node, "other" if at.edge == 0 else "self").conj())


def expanded(at: NodeInput) -> Contribution | None:
    """One for all rows: a class token, a soft prompt."""
    return at.summed(at.gradient)


def repeated(at: NodeInput) -> Contribution | None:
    """The same, once or several times for every row, one after the other in dimension 0."""
    owned, shape, gradient = at.owned, at.shape, at.gradient
    is_alike = len(shape) == gradient.dim() and gradient.shape[1:] == shape[1:]
    if not is_alike or owned.dim != 0 or owned.tiled or owned.rows.only is not None:
        return None
    times = gradient.shape[0] // shape[0]
    if times % owned.rows.num_rows:
        return None
    values = gradient.reshape(times, *shape)
    return replace(at, owned=Owned(values.shape, owned.rows)).summed(values)


def entrywise(at: NodeInput) -> Contribution | None:
    """Any operation on single entries: one call of the node for all tasks.

    Broadcasting is not undone by the node, so that its result still has an entry for every row.
    """
    value = aside(lambda: call_node(at.node, [at.gradient]), at.gradient)[at.edge]
    if value is None or value.shape != at.gradient.shape:
        return None
    return at.summed(value)


FAST_PATHS: dict[str, Callable[[NodeInput], Contribution | None]] = {
    "MmBackward0": mm,
    "AddmmBackward0": addmm,
    "BmmBackward0": bmm,
    "GroupedMmBackward0": grouped_product,
    "EmbeddingBackward0": embedding,
    "IndexBackward0": index,
    "NativeLayerNormBackward0": layer_norm,
    "FusedRmsNormBackward0": rms_norm,
    "NativeGroupNormBackward0": group_norm,
    "NativeBatchNormBackward0": batch_norm,
    "CudnnBatchNormBackward0": batch_norm,
    "ConvolutionBackward0": convolution,
    "GradvacProductBackward": tapped_weight,
    "GradvacLookupBackward": tapped_table,
    "AddBackward0": add,
    "SubBackward0": entrywise,
    "MulBackward0": mul,
    "DivBackward0": entrywise,
    "ExpandBackward0": expanded,
    "RepeatBackward0": repeated,
    "WhereBackward0": entrywise,
    "AddcmulBackward0": entrywise,
    "AddcdivBackward0": entrywise,
    "PowBackward1": entrywise,
    "MaximumBackward0": entrywise,
    "MinimumBackward0": entrywise,
    "LerpBackward1": entrywise,
    "PreluKernelBackward0": entrywise,
    "RsubBackward1": entrywise,
}
