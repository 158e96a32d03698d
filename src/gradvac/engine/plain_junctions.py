"""Plain junctions wait, and those of one shape are built together: the usual way of a step.

Most junctions of most models are linear layers, normalisations, scales or shifts. They are found
once per plan. On a CPU a step that is small enough reads what their nodes saved before the pass,
and is handed their output gradients when it is over; in other steps they are built on the way, as
many at once as may wait. The fast paths of `GradientBuilder` do the same one by one, for whatever
is not plain, and are the reference.
"""

# N entries, T tasks, n junctions that are alike, O outputs, I inputs, D width

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from gradvac.engine.graph import LEAF, Graph, saved
from gradvac.engine.junctions import Junction, ParameterPath
from gradvac.engine.kernels import (
    Segments,
    are_norms_in_place,
    are_products_in_place,
    norm_sums,
    outer_products,
)
from gradvac.utils.native import native

# Of the operands of a junction that is built together with others, and of all of them, where that
# takes copies. Without a GPU only calls are saved, which copies soon outweigh.
_JOINED_BYTES = ((1 << 17, 1 << 22), (3 << 24, 1 << 29))

Target = nn.Parameter | ParameterPath
"""What task gradients are those of: a parameter, or a node between it and the junction."""
Parts = Sequence[Tensor]
"""What some junctions that are alike have of one kind."""
Sums = tuple[Tensor, Tensor | None]
"""Task gradients of weights `[n, T, ...]`, and of shifts `[n, T, D]` where there are any."""


class Kind(NamedTuple):
    """An operation whose junctions are plain."""

    weight: int  # its edge
    shift: int  # likewise; -1: it has none
    saved: tuple[str, ...] | None  # by the node, the operand first; None: a tap, which is handed it
    build: "Build"  # task gradients of some junctions that are alike
    is_in_place: Callable[["Arrived"], bool]  # a kernel reads its operands where they lie


@dataclass(eq=False, slots=True, kw_only=True)
class PlainJunction:
    """A junction of a plain kind.

    Attributes:
        number: Of the junction.
        position: Of its node.
        kind: Its operation.
        weight: What its output gradient is multiplied for; of a shift alone, the shift.
        weight_bytes: Of the weight, if it is a parameter.
        shift: What is added to its output.
        width: Of its output.
        inner: Of the operand that its node saved or is handed; 0: it has none.
        is_transposed: Task gradients of the weight are gradient^T x, not x^T gradient.
        operand_bytes: Of what it needs to be built, by entry.
        like: Equal for junctions that are alike.
        made: Shapes of weight and shift (position, output) where they are made of parameters.
        is_used_again: One of its parameters has other uses: only uses of the same parameters are
            alike, and they add up.
    """

    number: int
    position: int
    kind: Kind
    weight: Target
    weight_bytes: int
    shift: Target | None
    width: int
    inner: int
    is_transposed: bool
    operand_bytes: int
    like: Hashable
    made: dict[tuple[int, int], tuple[int, ...]]
    is_used_again: bool = False

    def fits(self, graph: Graph) -> bool:
        """Whether what is made of parameters has the sizes it had: a slice of one may not."""
        made = self.made.items()
        return not made or all(graph.shape(*output) == shape for output, shape in made)

    @property
    def targets(self) -> list[Target]:
        """Weight and shift."""
        return [self.weight] if self.shift is None else [self.weight, self.shift]

    def read(self, graph: Graph, *, is_early: bool) -> tuple[Tensor, ...] | None:
        """What its node saved; None where that must wait for the pass, or is not plain."""
        node, names = graph.nodes[self.position], self.kind.saved
        if names is None:
            operand = graph.operands.get(self.position)
            return None if operand is None else (operand.reshape(-1, operand.shape[-1]),)
        if "mat1" in names and not node._saved_alpha == node._saved_beta == 1:
            return None
        values = []
        for name in names:
            raw_name, value_name = _ATTRIBUTES[name]
            is_kept = getattr(node, raw_name).unpack_hook is None  # else a checkpoint, the host
            if is_early and not is_kept:
                return None
            values.append(getattr(node, value_name) if is_kept else saved(node, name))
        return tuple(values)


class Arrived(NamedTuple):
    """What a junction needs to be built."""

    junction: PlainJunction
    saved: tuple[Tensor, ...]
    gradient: Tensor
    segments: Segments

    @property
    def first(self) -> Tensor:
        """What its output gradient is multiplied with; that itself where it is only summed."""
        return self.saved[0] if self.saved else self.gradient

    @property
    def nbytes(self) -> int:
        """Of its operands."""
        return self.gradient.nbytes + (self.saved[0].nbytes if self.saved else 0)

    @property
    def is_large(self) -> bool:
        """Building it together with others would cost more than it saves."""
        if self.nbytes <= _JOINED_BYTES[self.gradient.is_cuda][0]:
            return False
        return not self.junction.kind.is_in_place(self)


@dataclass
class Alike:
    """Junctions whose operands are alike, and what they need to be built."""

    junctions: list[PlainJunction]
    gradients: list[Tensor]
    saved: list[list[Tensor]]  # the first of each, the second of each, ...
    segments: Segments

    @property
    def num_at_once(self) -> int:
        """How many are built together."""
        saved = tuple([of_all[0] for of_all in self.saved])
        first = Arrived(self.junctions[0], saved, self.gradients[0], self.segments)
        most = _JOINED_BYTES[first.gradient.is_cuda][1]
        return 1 if first.is_large else max(1, most // max(1, first.nbytes))

    def take(self, num: int) -> "Alike":
        """Some of them, which are no longer here."""
        saved = [of_all[:num] for of_all in self.saved]
        taken = Alike(self.junctions[:num], self.gradients[:num], saved, self.segments)
        self.junctions, self.gradients = self.junctions[num:], self.gradients[num:]
        self.saved = [of_all[num:] for of_all in self.saved]
        return taken


class BuiltStack(NamedTuple):
    """Task gradients of some weights, or shifts, that are alike."""

    targets: Sequence[Target]
    stack: Tensor  # [n, T, P]
    segments: Segments


class PlainJunctions:
    """The plain junctions of a plan.

    Args:
        graph: A graph of its structure.
        junctions: Of the plan.

    Attributes:
        by_number: The plain ones.
        gradient_bytes: Of the gradient of one task, as far as it is built in any case.
        parameter_bytes: Of all that the plan reaches.
        kept_share: What the forward keeps, and a pass frees, by byte of what they are built from.
    """

    def __init__(self, graph: Graph, junctions: Sequence[Junction]) -> None:
        num_uses = Counter(p for junction in junctions for p in junction.parameters)
        found = [_plain(graph, number, junction) for number, junction in enumerate(junctions)]
        self.by_number = {one.number: one for one in found if one is not None}
        kinds: dict[Hashable, int] = {}
        # Of a table that is only looked up, most rows have no task gradients.
        built = {p for junction in junctions if not junction.ends for p in junction.parameters}
        for one in self.by_number.values():
            parameters = [end for end in one.targets if isinstance(end, nn.Parameter)]
            built.update(parameters)
            if any(num_uses[parameter] > 1 for parameter in parameters):
                one.is_used_again, one.like = True, (one.like, *map(id, one.targets))
            one.like = kinds.setdefault(one.like, len(kinds))
        self.gradient_bytes = sum(parameter.nbytes for parameter in built)
        self.parameter_bytes = sum(parameter.nbytes for parameter in num_uses)
        self.kept_share = graph.kept_bytes(num_uses) / max(1, self.operand_bytes(graph))

    def operand_bytes(self, graph: Graph) -> int:
        """Of what all of them need to be built."""
        every, shape = self.by_number.values(), graph.shape
        return sum([one.operand_bytes * math.prod(shape(one.position)[:-1]) for one in every])


_ATTRIBUTES = {
    name: (f"_raw_saved_{name}", f"_saved_{name}")
    for name in ("mat1", "self", "other", "input", "result1", "result2")
}


def _plain(graph: Graph, number: int, junction: Junction) -> PlainJunction | None:
    """A junction as a plain one; None if it is not."""
    position, name = junction.position, graph.names[junction.position]
    kind = _SCALES[junction.edges[0]] if name == "MulBackward0" else _KINDS.get(name)
    paths = dict(zip(junction.edges, junction.paths, strict=True))
    if kind is None or kind.weight not in paths or {*paths} - {kind.weight, kind.shift}:
        return None
    is_empty = 0 in graph.shape(*paths[kind.weight][:2])
    if graph.is_complex(position) or is_empty:
        return None
    edges = (kind.weight, kind.shift)
    weight, shift = (target_of(graph, paths[edge]) if edge in paths else None for edge in edges)
    shapes = [graph.shape(*paths[edge][:2]) if edge in paths else None for edge in edges]
    width, is_transposed = graph.shape(position)[-1], paths[kind.weight][2]
    if weight is None or shift is weight or shapes[1] not in (None, (width,)):
        return None
    inner = width if kind.saved else 0
    if kind.build is _build_products:
        assert shapes[0] is not None
        inner = math.prod(shapes[0]) // max(1, width)
        is_transposed ^= kind.saved is None
    elif shapes[0] != (width,) or width == 1:  # which may be broadcast in another batch
        return None
    ends = (weight, shift)
    return PlainJunction(
        number=number,
        position=position,
        kind=kind,
        weight=weight,
        weight_bytes=weight.nbytes if isinstance(weight, Tensor) else 0,
        shift=shift,
        width=width,
        inner=inner,
        is_transposed=is_transposed,
        operand_bytes=(width + inner) * graph.described(position)[0].dtype.itemsize,
        like=(name, kind, is_transposed, *shapes, *(isinstance(e, nn.Parameter) for e in ends)),
        made={path[:2]: graph.shape(*path[:2]) for path in ends if isinstance(path, tuple)},
    )


def target_of(graph: Graph, path: ParameterPath) -> Target:
    """What a path leads to."""
    if graph.names[path[0]] != LEAF:
        return path
    parameter: nn.Parameter = graph.nodes[path[0]].variable
    return parameter


def group_alike(every: Sequence[Arrived]) -> list[Alike]:
    """Junctions by what can be built together."""
    groups: dict[Hashable, Alike] = {}
    for one in every:
        gradient, first = one.gradient, one.first
        kind = (one.junction.like, gradient.shape, first.shape, gradient.dtype, first.dtype)
        key = (*kind, id(one.segments))
        if key not in groups:
            groups[key] = Alike([], [], [[] for _ in one.saved], one.segments)
        group = groups[key]
        group.junctions.append(one.junction)
        group.gradients.append(gradient)
        for values, value in zip(group.saved, one.saved, strict=True):
            values.append(value)
    return list(groups.values())


def build_together(groups: Sequence[Alike]) -> Iterator[BuiltStack]:
    """Build some junctions, those that are alike as one; they are let go of on the way."""
    for group in groups:
        num = group.num_at_once
        while group.junctions:
            yield from _build(group.take(num))


def _build(part: Alike) -> Iterator[BuiltStack]:
    first, segments, num = part.junctions[0], part.segments, len(part.junctions)
    built, rows = _build_natively(part), segments
    if first.is_used_again:
        rows, num = segments.repeated(num, are_same=True), 1
    if built is None:
        built = first.kind.build(first, part.gradients, part.saved, rows)
    weights, shifts = built
    targets = part.junctions[:num]
    stack = weights.reshape(num, segments.num_tasks, -1)
    yield BuiltStack([one.weight for one in targets], stack, segments)
    if shifts is not None:
        yield BuiltStack([s for one in targets if (s := one.shift) is not None], shifts, segments)


def _build_natively(part: Alike) -> Sums | None:
    kernels, first, segments = native(), part.junctions[0], part.segments
    if kernels is None or part.gradients[0].is_cuda or first.kind.build is _build_sums:
        return None
    x, *statistics = part.saved
    given = (part.gradients, segments.tasks, segments.num_tasks)
    ends = (first.shift is not None, first.is_used_again)
    built: Sums | None
    if first.kind.build is _build_products:
        built = kernels.products(x, *given, first.is_transposed, *ends)
    else:
        *mean, scale = statistics or [[]]
        built = kernels.scales(x, mean[0] if mean else [], scale, *given, *ends)
    return built


def _build_products(
    junction: PlainJunction, gradients: Parts, saved: Sequence[Parts], segments: Segments
) -> Sums:
    inputs = _flat(junction, saved[0], saved[0][0].shape[-1])
    gradients = _flat(junction, gradients, junction.width)
    of_left = junction.is_transposed
    pairs = (gradients, inputs) if of_left else (inputs, gradients)
    sums_of = 0 if junction.shift is None else 1 if of_left else 2
    return outer_products(*pairs, segments, sums_of)


def _build_norms(
    junction: PlainJunction, gradients: Parts, saved: Sequence[Parts], segments: Segments
) -> Sums:
    inputs, *mean, scales = saved
    means = _flat(junction, mean[0], 1) if mean else []
    values = _flat(junction, gradients, junction.width), _flat(junction, inputs, junction.width)
    by_scale, by_shift = norm_sums(*values, means, _flat(junction, scales, 1), segments)
    return by_scale, None if junction.shift is None else by_shift


def _build_scales(
    junction: PlainJunction, gradients: Parts, saved: Sequence[Parts], segments: Segments
) -> Sums:
    (factors,), width = saved, junction.width
    is_whole = factors[0].shape == gradients[0].shape  # else it was broadcast
    if is_whole and are_norms_in_place(factors[0], width):  # with nothing to normalise
        values = _flat(junction, gradients, width), _flat(junction, factors, width)
        ones = values[0][0].new_ones(len(values[0][0]), 1, dtype=torch.float32)
        return norm_sums(*values, [], [ones] * len(values[0]), segments)
    pairs = zip(gradients, factors, strict=True)
    products = _flat(junction, [gradient * factor for gradient, factor in pairs], width)
    joined = products[0][None] if len(products) == 1 else torch.stack([*products])
    return segments.sum(joined), None


def _build_sums(
    junction: PlainJunction, gradients: Parts, _: Sequence[Parts], segments: Segments
) -> Sums:
    values = _flat(junction, gradients, junction.width)
    if are_norms_in_place(values[0], junction.width):  # the shifts of normalisations
        ones = [values[0].new_ones(len(values[0]), 1, dtype=torch.float32)] * len(values)
        sums = norm_sums(values, values, ones, ones, segments)[1]
        assert sums is not None
        return sums, None
    joined = values[0][None] if len(values) == 1 else torch.stack([*values])
    return segments.sum(joined), None


def _flat(junction: PlainJunction, parts: Parts, width: int) -> Parts:
    """As matrices; of weights that are used again, those of all uses as one."""
    flat = [part if part.dim() == 2 else part.reshape(-1, width) for part in parts]
    return [torch.cat(flat)] if junction.is_used_again and len(flat) > 1 else flat


def _is_product_in_place(one: Arrived) -> bool:
    return are_products_in_place(one.first, one.junction.width, one.segments)


def _is_norm_in_place(one: Arrived) -> bool:
    return are_norms_in_place(one.first, one.junction.width)


Build = Callable[[PlainJunction, Parts, Sequence[Parts], Segments], Sums]

_NORM = ("input", "result1", "result2")
_KINDS = {
    "AddmmBackward0": Kind(2, 0, ("mat1",), _build_products, _is_product_in_place),
    "MmBackward0": Kind(1, -1, ("self",), _build_products, _is_product_in_place),
    "GradvacProductBackward": Kind(1, 2, None, _build_products, _is_product_in_place),
    "NativeLayerNormBackward0": Kind(1, 2, _NORM, _build_norms, _is_norm_in_place),
    "FusedRmsNormBackward0": Kind(1, -1, _NORM[:2], _build_norms, _is_norm_in_place),
    "ExpandBackward0": Kind(0, -1, (), _build_sums, _is_norm_in_place),
}
_SCALES = {
    0: Kind(0, -1, ("other",), _build_scales, _is_norm_in_place),
    1: Kind(1, -1, ("self",), _build_scales, _is_norm_in_place),
}
