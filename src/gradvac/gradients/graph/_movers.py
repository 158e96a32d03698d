"""Operations that may move entries from one row to another.

How rows lie behind an operation is learned only if it cannot change with the data, or with what the
parameters become: the rows lie along a dimension that the operation leaves alone. Behind any other
operation, and behind one that is not known here, owners are measured every step.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any

from gradvac.gradients.graph._graph import Graph, is_python_function

ANY = range(64)  # dimensions

# Operations whose effect depends on the sizes of the batch: they regroup entries, or add some.
VIEWS = frozenset(f"{name}Backward0" for name in ("View", "UnsafeView", "ReshapeAlias", "Squeeze"))
STRETCHERS = frozenset(f"{name}Backward0" for name in ("Cat", "Repeat", "ConstantPadNd"))


def moves_along(graph: Graph, position: int, are_rows: Sequence[bool]) -> Sequence[int]:
    """The dimensions of a node's output along which it may move or mix entries.

    Args:
        graph: The graph.
        position: Of the node.
        are_rows: Which of its inputs hold rows.
    """
    name, node = graph.names[position], graph.nodes[position]
    if is_python_function(node):
        return () if name in _HOOKS else ANY
    kind = re.sub(r"^torch::autograd::|Backwards?\d*$", "", name)
    if kind in _KEEPERS:
        return ()
    if kind in ENTRYWISE:
        return _broadcast(graph, position, are_rows)
    if kind in _PRODUCTS:
        return _contracted(graph, position, are_rows)
    if any(are_rows[1:]) and kind in _WITH_WEIGHTS:  # a weight made of rows serves all of them
        return ANY
    if kind in _WITHIN_ROWS or kind.startswith(_OVER_SPACE):
        return ANY[1:]
    return _BY_SETTING[kind](node) if kind in _BY_SETTING else ANY


def _broadcast(graph: Graph, position: int, are_rows: Sequence[bool]) -> Sequence[int]:
    """Dimensions along which an input serves several entries, whose gradients are added up."""
    shape, dims = graph.shape(position), set[int]()
    for child, holds_rows in zip(graph.children(position), are_rows, strict=True):
        if holds_rows:
            input_shape = graph.shape(*child)
            inner = (*(1 for _ in range(len(shape) - len(input_shape))), *input_shape)
            dims |= {d for d, size in enumerate(inner) if size == 1 or size != shape[d]}
    return tuple(dims)


def _contracted(graph: Graph, position: int, are_rows: Sequence[bool]) -> Sequence[int]:
    """Dimensions that the gradient of a factor is a sum over: a permutation may be a matrix."""
    last = len(graph.shape(position)) - 1
    *added, first, second = are_rows
    broadcast = _broadcast(graph, position, (*added, False, False))
    return (*broadcast, *(last for _ in range(first)), *(last - 1 for _ in range(second)))


def _given(name: str) -> Callable[[Any], Sequence[int]]:
    """The dimensions that an operation was told; none: any."""

    def read(node: Any) -> Sequence[int]:
        value = getattr(node, f"_saved_{name}")
        dims = (value,) if isinstance(value, int) else value
        return [d if d < 1 << 63 else d - (1 << 64) for d in dims] or ANY

    return read


def _after_the_first_index(node: Any) -> Sequence[int]:
    given = [d for d, index in enumerate(node._saved_indices) if index is not None]
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


_HOOKS = frozenset(  # Python functions that hand on what they get
    f"{name}Backward"
    for name in ("BackwardHookFunction", "RegisterPostBackwardFunction")  # hooks of FSDP2, too
)
ENTRYWISE = frozenset(
    (
        *("Abs", "Acos", "Acosh", "Add", "Addcdiv", "Addcmul", "Alias", "Angle", "Asin", "Asinh"),
        *("Atan", "Atan2", "Atanh", "Celu", "Clamp", "ClampMax", "ClampMin", "Clone", "Complex"),
        *("Conj", "ConjPhysical", "Copy", "Copysign", "Cos", "Cosh", "Deg2Rad", "Digamma", "Div"),
        *("Elu", "Erf", "Erfc", "Erfinv", "Exp", "Exp2", "Expand", "Expm1"),
        *("FakeQuantizePerTensorAffineCachemask", "Fmax", "Fmin", "Fmod", "Frac", "FusedDropout"),
        *("Gelu", "Hardshrink", "Hardsigmoid", "Hardswish", "Hardtanh", "Hypot", "LeakyRelu"),
        *("Lerp", "Lgamma", "Log", "Log10", "Log1P", "Log2", "LogSigmoid", "Logaddexp"),
        *("Logaddexp2", "Logit", "MaskedFill", "Maximum", "Minimum", "Mish", "Mul", "NanToNum"),
        *("NativeDropout", "Neg", "Polar", "Pow", "PreluKernel", "Reciprocal", "Relu", "Remainder"),
        *("Repeat", "Round", "RreluWithNoise", "Rsqrt", "Rsub", "Sgn", "Sigmoid", "Silu", "Sin"),
        *("Sinc", "Sinh", "Softplus", "Softshrink", "SpecialEntr", "Sqrt", "Sub", "Tan", "Tanh"),
        *("Threshold", "ToCopy", "Tril", "Triu", "Where", "Xlogy"),
    )
)
# What is one entry above belongs to one row, and so does all that it was made of.
_KEEPERS = frozenset(
    (
        *("Amax", "Amin", "Aminmax", "BinaryCrossEntropy", "BinaryCrossEntropyWithLogits"),
        *("CtcLoss", "CudnnCtcLoss", "HuberLoss", "Kthvalue", "LinalgVectorNorm", "Logsumexp"),
        *("Max", "Mean", "Median", "Min", "Mode", "MseLoss", "MultiMarginLoss"),
        *("MultilabelMarginLoss", "Nanmedian", "Nansum", "NllLoss", "NllLoss2D", "Norm", "Permute"),
        *("Prod", "ReshapeAlias", "Select", "SmoothL1Loss", "SoftMarginLoss", "Squeeze", "Std"),
        *("StdMean", "Sum", "T", "Transpose", "Unbind", "UnsafeView", "Unsqueeze", "Var"),
        *("VarMean", "View", "ViewAsComplex", "ViewAsReal"),
    )
)
_PRODUCTS = frozenset(("Mm", "Addmm", "Bmm", "Baddbmm"))
_WITHIN_ROWS = frozenset(
    f"ScaledDotProduct{name}"
    for name in (
        *("FlashAttention", "FlashAttentionForCpu", "EfficientAttention", "CudnnAttention"),
        "FusedAttentionOverrideable",
    )
) | {"Convolution", "NativeGroupNorm"}
_OVER_SPACE = (
    *("AvgPool", "MaxPool", "AdaptiveAvgPool", "AdaptiveMaxPool", "FractionalMaxPool"),
    *("Upsample", "ReflectionPad", "ReplicationPad", "GridSampler"),
)
_WITH_WEIGHTS = frozenset(
    (
        *("Convolution", "NativeGroupNorm", "NativeLayerNorm", "FusedRmsNorm"),
        *("NativeBatchNorm", "CudnnBatchNorm", "MiopenBatchNorm"),
        *("MkldnnRnnLayer", "CudnnRnn"),
    )
)
_BY_SETTING: dict[str, Callable[[Any], Sequence[int]]] = {
    **{
        kind: _given("dim")
        for kind in (
            *("IndexSelect", "IndexAdd", "IndexCopy", "IndexReduce"),
            *("Gather", "Scatter", "ScatterAdd", "ScatterReduce", "SliceScatter", "SelectScatter"),
            *("Sort", "Topk", "Slice", "Split", "SplitWithSizes", "UnsafeSplit"),
            *(
                "UnsafeSplitWithSizes",
                "Stack",
                "Cat",
                "Glu",
                "Softmax",
                "LogSoftmax",
                "SafeSoftmax",
            ),
            *(
                "Cumsum",
                "Cumprod",
                "Cummax",
                "Cummin",
                "Logcumsumexp",
                "FftC2C",
                "FftC2R",
                "FftR2C",
            ),
        )
    },
    "Flip": _given("dims"),
    "Roll": _given("dims"),
    "Unfold": _given("dimension"),
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
