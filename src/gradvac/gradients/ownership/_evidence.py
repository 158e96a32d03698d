"""What the passes of one look show: where rows lie, and where they may move."""

# B rows

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from gradvac.gradients.graph import ANY, COMPILED, VIEWS, Drawing, Graph, Refused, run_of
from gradvac.gradients.kernels import Marks, negligible, repeatable, tolerance
from gradvac.gradients.ownership._codes import fit, row_codes
from gradvac.gradients.ownership._layouts import Layout, layouts


class Evidence:
    """Marks of passes with codes, by place (junction, output), and above movers and views.

    Args:
        graph: The graph.
        drawing: Its junctions, and what may move rows.
        num_rows: B; None if losses are not those of rows.

    Attributes:
        plain: Marks of the plain pass.
        same: Of a pass with one code for all.
        by_row: Of a pass with a code per row.
        lowest: The narrowest dtype on the way.
        rounding: What rounding was seen to do.
        kept_inside: Compiled regions that leave rows alone, and where these lie in their outputs.
    """

    def __init__(self, graph: Graph, drawing: Drawing, num_rows: int | None) -> None:
        self._graph, self._drawing, self._num_rows = graph, drawing, num_rows
        self._places = {junction.position: (n, 0) for n, junction in enumerate(drawing.junctions)}
        self.plain: Mapping[Any, Marks] = {}
        self.same: Mapping[Any, Marks] = {}
        self.by_row: Mapping[Any, Marks] = {}
        self.codes = row_codes(num_rows or 1)
        self.lowest = graph.lowest()
        self._tolerance, self.rounding = tolerance(self.lowest), 0.0
        self.kept_inside: dict[int, dict[int, Layout]] = {}
        self._layouts: dict[Any, tuple[Layout | None, int]] = {}

    @property
    def tolerance(self) -> float:
        """How much of a mark may stay unexplained."""
        return self._tolerance + 4 * self.rounding

    def forget(self) -> None:
        """Let go of the marks, which take memory."""
        self.plain = self.same = self.by_row = {}

    def inner(self) -> set[int]:
        """Positions whose output gradients are marked besides those of junctions."""
        every = self._drawing.movers.items()
        movers = {mover for mover, dims in every if dims is not ANY or self._run(mover)}
        return movers.union(self._drawing.sized).difference(self._places)

    def _run(self, position: int) -> Any:
        """The run of a compiled region whose operations are known."""
        node = self._graph.nodes[position]
        return run_of(node) if self._graph.names[position] == COMPILED else None

    def seen_outputs(self, position: int) -> range:
        """Of a mover or a view: those whose gradients are marked."""
        return range(self._graph.num_outputs(position) if self._run(position) else 1)

    def key(self, position: int, output: int = 0) -> Any:
        """Where the marks of a mover or a view are."""
        if position in self._places:
            return self._places[position][0], output
        return ("above", position, output) if output else ("above", position)

    def is_awake(self, key: Any) -> bool:
        """Whether a gradient other than zero came."""
        return key in self.plain and bool(self.plain[key].entries.any())

    def is_explained(self, unexplained: float, rounding: float, marks: Tensor) -> bool:
        """Whether codes explain marks.

        Raises:
            Refused: What one code for all rows does is no rounding.
        """
        if rounding <= repeatable(self.lowest):
            self.rounding = max(self.rounding, rounding)
        elif rounding * float(marks.abs().max()) > negligible(self.lowest) * self._largest():
            raise Refused(
                "engine: the backward of this model is not linear in the losses, or not the same "
                "when it runs again (a hook that clips or normalises gradients, or draws random "
                'numbers), so that tasks cannot be told apart. Use engine="per_task".'
            )
        return unexplained <= self._tolerance + 4 * rounding

    def _largest(self) -> float:
        return max(float(marks.entries.abs().max()) for marks in self.plain.values())

    def layout(self, key: Any, shape: Sequence[int]) -> tuple[Layout | None, int]:
        """Where rows lie, if they lie along a dimension, and how many have a gradient."""
        if key not in self._layouts:
            self._layouts[key] = self._find_layout(key, shape)
        return self._layouts[key]

    def _find_layout(self, key: Any, shape: Sequence[int]) -> tuple[Layout | None, int]:
        fitted: tuple[Layout | None, int] = (None, 0)
        if self._num_rows is None:
            return fitted
        given = (self.plain[key], self.same[key], self.by_row[key])
        for layout in layouts(shape, self._num_rows):
            result = fit(*given, shape, layout, self.codes)
            if self.is_explained(result.unexplained, result.rounding, given[0].entries):
                if fitted[0] is not None:  # zeros leave it open, and may be gone in the next batch
                    return None, 0
                fitted = layout, result.num_rows_seen
                if result.rounding > repeatable(self.lowest):  # what cancels out tells nothing
                    fitted = layout, 0
                if not fitted[1]:
                    break
        return fitted

    def above(self, position: int) -> Layout | None:
        """Where rows lie in the output of a mover or a view."""
        key = self.key(position)
        seen = key in self.plain and key in self.by_row
        return self.layout(key, self._graph.shape(position))[0] if seen else None

    def below(self, position: int, above: Layout) -> Layout | None:
        """Where they lie in its input: in that of a view, as far apart in memory as above."""
        if self._graph.names[position] not in VIEWS:
            return above
        assert self._num_rows is not None
        inside = self._graph.inner_shapes(position)[0]
        stride = above.stride(self._graph.shape(position), self._num_rows)
        every = layouts(inside, self._num_rows)
        return next(
            (layout for layout in every if layout.stride(inside, self._num_rows) == stride), None
        )

    def moving(self) -> list[bool]:
        """For every node, whether its gradient comes through what may move rows."""
        moving = [False] * len(self._graph.nodes)
        views = {p for p in self._drawing.sized if self._graph.names[p] in VIEWS}
        may_move = views.union(self._drawing.movers)
        for position in range(len(moving) - 1, -1, -1):
            if moving[position] or (position in may_move and not self._keeps_rows(position)):
                for child, _ in self._graph.children(position):
                    if child >= 0:
                        moving[child] = True
        return moving

    def _keeps_rows(self, position: int) -> bool:
        """Whether rows lie along a dimension that a node leaves alone."""
        if (run := self._run(position)) is not None:
            return self._keeps_rows_inside(run, position)
        dims, shape = self._drawing.movers.get(position, ()), self._graph.shape(position)
        above = None if dims is ANY else self.above(position)
        if above is None or above.dim in {d % len(shape) for d in dims if d < len(shape)}:
            return False
        return self.below(position, above) is not None

    def _keeps_rows_inside(self, run: Any, position: int) -> bool:
        """Whether a compiled region leaves rows alone, from what its operations are."""
        outputs = [(n, self.key(position, n)) for n in self.seen_outputs(position)]
        shape, above = self._graph.shape, dict[int, Layout]()
        for output, key in outputs:
            if key in self.plain and key in self.by_row:
                layout, _ = self.layout(key, shape(position, output))
                if layout is None or not self.is_awake(key):
                    return False
                above[output] = layout
        if above and run.keeps_rows(above, self._num_rows):
            self.kept_inside[position] = above
        return position in self.kept_inside
