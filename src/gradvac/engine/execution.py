"""Execution of a plan where most of it is plain, and little enough to be held at once.

Most junctions of most models are linear layers, normalisations or scales: rows lie along the first
dimension, and their parameters have no other use. They are found once per plan. In a step that is
small enough, what their nodes saved is read before the pass, their output gradients are kept until
it is over, and those of one shape are built together. All others go through `GradientBuilder`,
which is also the reference.
"""

# N entries, T tasks, n junctions that are alike, O outputs, I inputs, D width

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from gradvac.engine.graph import LEAF, Graph
from gradvac.engine.junctions import Junction
from gradvac.engine.kernels import Segments, grouped_outer, norm_sums

# Of the operands of a junction that is built together with others, and of all of them. Without a
# GPU only calls are saved, which copies soon outweigh.
_JOINED_BYTES = ((1 << 17, 1 << 22), (1 << 29, 1 << 29))

Blocks = tuple[Tensor, Tensor | None]
"""Task gradients of weights `[n, T, ...]`, and of shifts `[n, T, D]` where there are any."""


@dataclass(eq=False)
class PlainJunction:
    """A junction whose parameters have no other use.

    Attributes:
        number: Of the junction.
        position: Of its node.
        weight: Its largest parameter.
        shift: What is added to its output.
        width: Of its output.
        is_transposed: The weight's transpose was used.
        saved: Names of what its node saved.
        build: Task gradients of some junctions that are alike.
        like: Junctions that are alike are built together.
    """

    number: int
    position: int
    weight: nn.Parameter
    shift: nn.Parameter | None
    width: int
    is_transposed: bool
    saved: tuple[str, ...]
    build: "Callable[[Sequence[Arrived], Segments], Blocks]"
    like: Hashable


class Arrived(NamedTuple):
    """What a junction needs to be built."""

    junction: PlainJunction
    saved: tuple[Tensor, ...]
    gradient: Tensor


class PlainJunctions:
    """The plain junctions of a plan.

    Args:
        graph: A graph of its structure.
        junctions: Of the plan.
        components: That every junction contributes to.
        has_rows_first: Whether rows lie along the first dimension of a junction's output.

    Attributes:
        every: The plain ones.
        others: The components of every junction that are complete earlier.
    """

    def __init__(
        self,
        graph: Graph,
        junctions: Sequence[Junction],
        components: Sequence[Sequence[int]],
        has_rows_first: Callable[[int], bool],
    ) -> None:
        num_uses = Counter(p for junction in junctions for p in junction.parameters)
        self.every: list[PlainJunction] = []
        for number, junction in enumerate(junctions):
            is_alone = all(num_uses[parameter] == 1 for parameter in junction.parameters)
            is_plain = has_rows_first(number) and not graph.is_complex(junction.position)
            plain = _plain(graph, number, junction) if is_alone and is_plain else None
            self.every += [] if plain is None else [plain]
        late = {component for plain in self.every for component in components[plain.number]}
        self.others = [[k for k in of_one if k not in late] for of_one in components]
        kept = {
            parameter
            for junction, of_one in zip(junctions, components, strict=True)
            for parameter in junction.parameters
            if not junction.ends and late.intersection(of_one)
        }
        self._num_bytes = sum(parameter.nbytes for parameter in kept)

    def held(
        self, graph: Graph, num_tasks: int, most: tuple[int, int, int]
    ) -> "dict[int, tuple[PlainJunction, tuple[Tensor, ...]]]":
        """Those that can be held until the pass is over, by number, and what their nodes saved.

        None of them if that is too much.

        Args:
            graph: Of this step.
            num_tasks: T.
            most: Bytes of what may be held, of task gradients, and of those of one matrix.
        """
        most_held, most_built, most_of_one = most
        if num_tasks * self._num_bytes >= most_built:
            return {}
        held, num_bytes = {}, 0
        for junction in self.every:
            saved = read_saved(graph, junction)
            if saved is not None and num_tasks * junction.weight.nbytes <= most_of_one:
                held[junction.number] = (junction, saved)
                x = saved[0]
                num_bytes += x.nbytes + x.nbytes // max(1, x.shape[-1]) * junction.width
        return held if num_bytes <= most_held // 2 else {}  # others may wait too


# kind -> (edges of weight and shift, what is saved by the node)
_KINDS: dict[str, tuple[tuple[int, int], tuple[str, ...]]] = {
    "AddmmBackward0": ((2, 0), ("mat1",)),
    "MmBackward0": ((1, -1), ("self",)),
    "NativeLayerNormBackward0": ((1, 2), ("input", "result1", "result2")),
    "FusedRmsNormBackward0": ((1, -1), ("input", "result1")),
}


def _plain(graph: Graph, number: int, junction: Junction) -> PlainJunction | None:
    """A junction as a plain one; None if it is not."""
    position, name = junction.position, graph.names[junction.position]
    (weight_edge, shift_edge), saved = _KINDS.get(name, ((junction.edges[0], -1), ()))
    if name == "MulBackward0":
        saved = ("other" if weight_edge == 0 else "self",)
    paths = dict(zip(junction.edges, junction.paths, strict=True))
    are_leaves = all(graph.names[p] == LEAF for p, _, _ in junction.paths)
    others = {*paths} - {weight_edge, shift_edge}
    if not saved or not are_leaves or others or weight_edge not in paths:
        return None
    leaf, _, is_transposed = paths[weight_edge]
    weight, width = graph.nodes[leaf].variable, graph.shape(position)[-1]
    shift = graph.nodes[paths[shift_edge][0]].variable if shift_edge in paths else None
    if shift is weight or (shift is not None and shift.shape != (width,)):
        return None
    if name in ("AddmmBackward0", "MmBackward0"):
        build = _build_products
    elif weight.shape != (width,) or width == 1:  # which may be broadcast in another batch
        return None
    else:
        build = _build_scales if name == "MulBackward0" else _build_norms
    like = (name, is_transposed, weight.shape, shift is None)
    return PlainJunction(number, position, weight, shift, width, is_transposed, saved, build, like)


def read_saved(graph: Graph, junction: PlainJunction) -> tuple[Tensor, ...] | None:
    """What the node of a plain junction saved; None where it must be read during the pass."""
    node = graph.nodes[junction.position]
    if junction.saved == ("mat1",) and not node._saved_alpha == node._saved_beta == 1:
        return None
    values = []
    for name in junction.saved:
        if getattr(node, f"_raw_saved_{name}").unpack_hook is not None:  # a checkpoint, the host
            return None
        values.append(getattr(node, f"_saved_{name}"))
    return tuple(values)


def build_together(
    every: Sequence[Arrived], segments: Segments
) -> list[tuple[list[nn.Parameter], Tensor]]:
    """Task gradients of the parameters of plain junctions: `[n, T, P]` of some that are alike."""
    alike: dict[Hashable, list[Arrived]] = defaultdict(list)
    for one in every:
        first, gradient = one.saved[0], one.gradient
        alike[one.junction.like, gradient.shape, first.shape, gradient.dtype, first.dtype].append(
            one
        )
    blocks: list[tuple[list[nn.Parameter], Tensor]] = []
    for group in alike.values():
        most_of_one, most = _JOINED_BYTES[group[0].gradient.is_cuda]
        held = group[0].gradient.nbytes + group[0].saved[0].nbytes
        at_once = most // max(1, held) if held <= most_of_one else 1
        for start in range(0, len(group), at_once):
            part = group[start : start + at_once]
            weights, shifts = part[0].junction.build(part, segments)
            blocks.append(([one.junction.weight for one in part], weights))
            if shifts is not None:
                blocks.append(
                    ([s for one in part if (s := one.junction.shift) is not None], shifts)
                )
    return blocks


def _build_products(every: Sequence[Arrived], segments: Segments) -> Blocks:
    first, num = every[0], len(every)
    gradient, x = _joined([one.gradient for one in every]), _joined([one.saved[0] for one in every])
    left, right = (gradient, x) if first.junction.is_transposed else (x, gradient)
    weights = grouped_outer(left, right, segments.repeated(num))
    return weights.reshape(num, segments.num_tasks, -1), _shifts(every, gradient, segments)


def _build_norms(every: Sequence[Arrived], segments: Segments) -> Blocks:
    num, width = len(every), every[0].gradient.shape[-1]
    gradient = _joined([one.gradient for one in every]).reshape(-1, width)
    x, *statistics = (_joined([one.saved[n] for one in every]) for n in range(len(every[0].saved)))
    *mean, scale = (statistic.reshape(-1, 1) for statistic in statistics)
    given = (gradient, x.reshape(-1, width), mean[0] if mean else None, scale)
    scales, shifts = norm_sums(*given, segments, num)
    if shifts is None:
        shifts = _shifts(every, gradient, segments)
    return scales, None if every[0].junction.shift is None else shifts


def _build_scales(every: Sequence[Arrived], segments: Segments) -> Blocks:
    if every[0].saved[0].shape == every[0].gradient.shape:
        operands = (
            _joined([one.gradient for one in every]),
            _joined([one.saved[0] for one in every]),
        )
        values = operands[0] * operands[1]
    else:  # broadcast
        values = _joined([one.gradient * one.saved[0] for one in every])
    return segments.sum(values.reshape(len(every), -1, values.shape[-1])), None


def _shifts(every: Sequence[Arrived], gradient: Tensor, segments: Segments) -> Tensor | None:
    if every[0].junction.shift is None:
        return None
    return segments.sum(gradient.reshape(len(every), -1, gradient.shape[-1]))


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
