"""Operations that may move entries from one row to another.

How rows lie behind an operation is learned only if it cannot change with the data, or with what the
parameters become: the rows lie along a dimension that the operation leaves alone. Behind any other
operation, and behind one that is not known here, owners are measured every step.
"""

from collections.abc import Callable, Sequence
from typing import Any

from gradvac.gradients.graph import Graph, indexed_dims

ANY = range(64)  # dimensions

# Operations whose effect depends on the sizes of the batch: they regroup entries.
VIEWS = frozenset(("View", "UnsafeView", "ReshapeAlias", "Squeeze"))


def moves_along(graph: Graph, position: int, edges: Sequence[int]) -> Sequence[int]:
    """The dimensions of a node's output along which it may move or mix entries.

    Args:
        graph: The graph.
        position: Of the node.
        edges: Which of its inputs hold rows.
    """
    kind, node = graph.kind(position), graph.nodes[position]
    if not callable(node):  # a Python function
        return ANY
    if kind in _KEEPERS:
        return ()
    if kind in ENTRYWISE:
        return _broadcast(graph, position, edges)
    if kind in PRODUCTS:
        return _contracted(graph, position, edges)
    if any(edges) and kind in _WITH_WEIGHTS:  # a weight made of rows serves all of them
        return ANY
    if kind in _WITHIN_ROWS or kind.startswith(_OVER_SPACE):
        return ANY[1:]
    return _BY_SETTING[kind](node) if kind in _BY_SETTING else ANY


def _broadcast(graph: Graph, position: int, edges: Sequence[int]) -> Sequence[int]:
    """Dimensions along which an input serves several entries, whose gradients are added up."""
    shape, dims = graph.shape(position), set[int]()
    for edge in edges:
        input_shape = graph.shape(*graph.children(position)[edge])
        inner = (*(1 for _ in range(len(shape) - len(input_shape))), *input_shape)
        dims |= {d for d, size in enumerate(inner) if size == 1 or size != shape[d]}
    return tuple(dims)


def _contracted(graph: Graph, position: int, edges: Sequence[int]) -> Sequence[int]:
    """Dimensions that the gradient of a factor is a sum over: a permutation may be a matrix."""
    last = len(graph.shape(position)) - 1
    *added, first, second = range(len(graph.children(position)))
    broadcast = _broadcast(graph, position, [edge for edge in edges if edge in added])
    summed_over = {first: last, second: last - 1}
    return (*broadcast, *(dim for factor, dim in summed_over.items() if factor in edges))


def told_dims(node: Any, *names: str) -> list[int]:
    """The dimensions that an operation was told."""
    dims: list[int] = []
    for name in names:
        value = getattr(node, f"_saved_{name}")
        dims += (value,) if isinstance(value, int) else value or ()
    return [d if d < 1 << 63 else d - (1 << 64) for d in dims]


def _along(name: str) -> Callable[[Any], Sequence[int]]:
    """Along the dimensions that an operation was told; none: any."""
    return lambda node: told_dims(node, name) or ANY


def _after_the_first_index(node: Any) -> Sequence[int]:
    given = indexed_dims(node)
    is_together = given and given[-1] - given[0] < len(given)
    return ANY[given[0] :] if is_together else ANY  # apart: their dimension becomes the first


def _padded(node: Any) -> Sequence[int]:
    return range(-(len(node._saved_pad) // 2), 0)


def _normalised(node: Any) -> Sequence[int]:
    return range(-len(node._saved_normalized_shape), 0)


def _by_channel(node: Any) -> Sequence[int]:
    return [d for d in ANY if d != 1] if node._saved_training else ()


def _recurrent(node: Any) -> Sequence[int]:
    if len(getattr(node, "_saved_batch_sizes", ())):  # packed
        return ANY
    # On a CPU, time has become the first dimension by then.
    return (1, 2) if hasattr(node, "_saved_batch_sizes") and node._saved_batch_first else (0, 2)


def _kinds(names: str) -> frozenset[str]:
    return frozenset(names.split())


# Python functions that hand on what they get; hooks of FSDP2, too
HOOKS = _kinds("BackwardHookFunctionBackward RegisterPostBackwardFunctionBackward")
ENTRYWISE = _kinds(
    """
    Abs Acos Acosh Add Addcdiv Addcmul Alias Angle Asin Asinh Atan Atan2 Atanh Celu Clamp
    ClampMax ClampMin Clone Complex Conj ConjPhysical Copy Copysign Cos Cosh Deg2Rad Digamma Div
    Elu Erf Erfc Erfinv Exp Exp2 Expand Expm1 FakeQuantizePerTensorAffineCachemask Fmax Fmin
    Fmod Frac FusedDropout Gelu Hardshrink Hardsigmoid Hardswish Hardtanh Hypot LeakyRelu Lerp
    Lgamma Log Log10 Log1P Log2 LogSigmoid Logaddexp Logaddexp2 Logit MaskedFill Maximum Minimum
    Mish Mul NanToNum NativeDropout Neg Polar Pow PreluKernel Reciprocal Relu Remainder Repeat
    Round RreluWithNoise Rsqrt Rsub Sgn Sigmoid Silu Sin Sinc Sinh Softplus Softshrink
    SpecialEntr Sqrt Sub Tan Tanh Threshold ToCopy Tril Triu Where Xlogy
    """
)
# What is one entry above belongs to one row, and so does all that it was made of.
_KEEPERS = _kinds(
    """
    Amax Amin Aminmax BinaryCrossEntropy BinaryCrossEntropyWithLogits CtcLoss CudnnCtcLoss
    HuberLoss Kthvalue LinalgVectorNorm Logsumexp Max Mean Median Min Mode MseLoss
    MultiMarginLoss MultilabelMarginLoss Nanmedian Nansum NllLoss NllLoss2D Norm Permute Prod
    ReshapeAlias Select SmoothL1Loss SoftMarginLoss Squeeze Std StdMean Sum T Transpose Unbind
    UnsafeView Unsqueeze Var VarMean View ViewAsComplex ViewAsReal
    """
)
PRODUCTS = _kinds("Mm Addmm Bmm Baddbmm")
_WITHIN_ROWS = _kinds(
    """
    ScaledDotProductFlashAttention ScaledDotProductFlashAttentionForCpu
    ScaledDotProductEfficientAttention ScaledDotProductCudnnAttention
    ScaledDotProductFusedAttentionOverrideable Convolution NativeGroupNorm
    """
)
_OVER_SPACE = (
    *("AvgPool", "MaxPool", "AdaptiveAvgPool", "AdaptiveMaxPool", "FractionalMaxPool"),
    *("Upsample", "ReflectionPad", "ReplicationPad", "GridSampler"),
)
_WITH_WEIGHTS = _kinds(
    """
    Convolution NativeGroupNorm NativeLayerNorm FusedRmsNorm NativeBatchNorm CudnnBatchNorm
    MiopenBatchNorm MkldnnRnnLayer CudnnRnn
    """
)
_ALONG_DIM = _kinds(
    """
    IndexSelect IndexAdd IndexCopy IndexReduce Gather Scatter ScatterAdd ScatterReduce
    SliceScatter SelectScatter Sort Topk Slice Split SplitWithSizes UnsafeSplit
    UnsafeSplitWithSizes Stack Cat Glu Softmax LogSoftmax SafeSoftmax Cumsum Cumprod Cummax
    Cummin Logcumsumexp FftC2C FftC2R FftR2C
    """
)
_BY_SETTING: dict[str, Callable[[Any], Sequence[int]]] = {
    **dict.fromkeys(_ALONG_DIM, _along("dim")),
    "Flip": _along("dims"),
    "Roll": _along("dims"),
    "Unfold": _along("dimension"),
    "Index": _after_the_first_index,
    "UnsafeIndex": _after_the_first_index,
    "ConstantPadNd": _padded,
    "NativeLayerNorm": _normalised,
    "FusedRmsNorm": _normalised,
    "NativeBatchNorm": _by_channel,
    "CudnnBatchNorm": _by_channel,
    "MiopenBatchNorm": _by_channel,
    "PixelShuffle": lambda _: (-3, -2, -1),
    "PixelUnshuffle": lambda _: (-3, -2, -1),
    "MkldnnRnnLayer": _recurrent,
    "CudnnRnn": _recurrent,
    "ThnnFusedLstmCell": lambda _: (-1,),
    "ThnnFusedGruCell": lambda _: (-1,),
}
