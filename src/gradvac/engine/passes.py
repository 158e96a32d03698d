"""Backward passes over a graph: to the junctions without parameter gradients, or to the leaves."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import lru_cache, partial
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from gradvac.engine.graph import (
    ANCHOR,
    RUN,
    Graph,
    NotSeparable,
    is_python_function,
    without_memory,
)
from gradvac.engine.junctions import Junction, Partition
from gradvac.utils.hints import some

Arrive = Callable[[int, Sequence[Tensor | None]], None]
"""(number of the junction, its output gradients) -> nothing."""


def run_pass(
    graph: Graph,
    partition: Partition,
    starts: Sequence[Tensor],
    arrive: Arrive,
    *,
    captured: Collection[int] = (),
    caught: Collection[int] = (),
    others: Sequence[tuple[int, Arrive]] = (),
    after_run: Collection[int] = (),
    retain: bool = False,
) -> list[Tensor | None]:
    """Differentiate down to the junctions and show each its output gradients.

    Returns the gradients of the leaves that are not the model's: a junction on the way to one is
    shown what it gets only if the pass goes on to the leaf.

    Args:
        graph: The graph.
        partition: Its junctions.
        starts: Gradients at the roots.
        arrive: Called for every junction, as soon as its output gradients are complete.
        captured: Junctions that are shown the gradient of their first output once the pass is over:
            of graphs without hooks, which would come later.
        caught: Junctions that are shown theirs by somebody else.
        others: Further nodes (positions) to be shown their output gradients.
        after_run: Junctions that are shown theirs once they have run, beside what they returned.
        retain: Keep the graph.
    """
    handles, ends = [], []
    inputs: list[Any] = []  # tensors and edges
    below: list[tuple[Any, int]] = []  # edges that let the junctions above them run
    try:
        for number, junction in enumerate(partition.junctions):
            if number in caught:
                if junction.ends:  # or it would not be reached
                    inputs.append(GradientEdge(graph.nodes[junction.position], 0))
                continue
            node = graph.nodes[junction.position]
            if number in captured:
                ends.append((number, len(inputs), 1))
                inputs.append(GradientEdge(node, 0))
            elif junction.ends and graph.has_hooks:  # before one writes over it, after its own
                child, output = graph.children(junction.position)[junction.edges[0]]
                below.append((graph.nodes[child], output))
                handles.append(node.register_prehook(partial(arrive, number)))
            elif junction.ends:
                outputs = graph.num_outputs(junction.position)
                if partition.has_taps:  # before all layers are done, whose scales are ends
                    handles.append(_EndHook(node, outputs, partial(arrive, number)))
                else:
                    ends.append((number, len(inputs), outputs))
                inputs += [GradientEdge(node, output) for output in range(outputs)]
            elif graph.is_tap(junction.position):
                handles.append(
                    node.register_prehook(_tap_hook(graph, junction, partial(arrive, number)))
                )
            elif number in after_run:
                after = partial(_arrive_after, graph, junction.position, partial(arrive, number))
                handles.append(node.register_hook(after))
            else:
                handles.append(node.register_prehook(partial(arrive, number)))
        for position, show in others:
            handles.append(graph.nodes[position].register_prehook(partial(show, position)))
        for position in partition.writers:
            handles.append(graph.nodes[position].register_prehook(copies))
        leaves = partition.leaves_outside(graph)
        # Their edges: torch would not take a leaf that was frozen after the forward.
        edges = [GradientEdge(graph.nodes[position], 0) for position in partition.outside]
        last: list[Any] = [ANCHOR] if partition.has_taps else []
        last += [GradientEdge(*edge) for edge in dict.fromkeys(below)]
        shown = [node.variable for node, _ in below if hasattr(node, "variable")]
        with without_hooks([*leaves, *shown]):
            gradients = torch.autograd.grad(
                graph.roots,
                [*inputs, *edges, *last],
                starts,
                retain_graph=True if retain else None,
                allow_unused=True,
            )
            with torch.no_grad():  # as in the hooks of a running backward
                for number, first, outputs in ends:
                    arrive(number, gradients[first : first + outputs])
    finally:
        for handle in handles:
            handle.remove()
    return list(gradients[len(inputs) : len(inputs) + len(leaves)])


def copies(gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """For a function that may write over its output gradient, which others still hold."""
    return tuple(None if gradient is None else gradient.clone() for gradient in gradients)


def arrive_at_tap(
    graph: Graph,
    position: int,
    arrive: Callable[[Sequence[Tensor | None]], None],
    gradients: Sequence[Tensor | None],
) -> None:
    """Show a junction the gradient of its output; the graph has its operand meanwhile."""
    output, graph.operands[position] = gradients
    arrive((output,))
    del graph.operands[position]


def stands_for_model_alone(graph: Graph, junction: Junction) -> bool:
    """Whether a tap has nothing to compute itself: no leaf that is not the model's is behind it."""
    num_needed = sum(child >= 0 for child, _ in graph.children(junction.position))
    return num_needed - 1 == len(junction.edges)  # but for the anchor


def _tap_hook(
    graph: Graph, junction: Junction, arrive: Callable[[Sequence[Tensor | None]], None]
) -> Callable[[Sequence[Tensor | None]], tuple[None, None] | None]:
    """Shows a tap what it gets, and keeps it from computing anything itself."""
    is_done = stands_for_model_alone(graph, junction)

    def hook(gradients: Sequence[Tensor | None]) -> tuple[None, None] | None:
        arrive_at_tap(graph, junction.position, arrive, gradients)
        return (None, None) if is_done else None

    return hook


class _EndHook:
    """Shows a junction at which a pass ends the gradients of its outputs.

    As a hook of the outputs, which is all that runs at the end of a pass. If the node were to run,
    so might others below it, which let go of what they saved and are still to be called.

    Args:
        node: The junction. A parameter that a region of ours was given lets go of its gradient,
            which nobody else can see.
        outputs: How many it has.
        arrive: Is called with their gradients.
    """

    def __init__(
        self, node: Any, outputs: int, arrive: Callable[[Sequence[Tensor | None]], None]
    ) -> None:
        self._gradients: list[Tensor | None] = []
        self._outputs, self._arrive, self._lets_go = outputs, arrive, RUN in node.metadata
        self._hooks: dict[int, Any] = {0: self._see}
        for like in _numbered(outputs, get_ident()):
            like._backward_hooks = self._hooks
            node._register_hook_dict(like)

    def _see(self, gradient: Tensor | None) -> Tensor | None:
        self._gradients.append(gradient)
        if len(self._gradients) == self._outputs:
            gradients, self._gradients = self._gradients, []
            self._arrive(gradients)
        if gradient is None or not self._lets_go:
            return None
        return without_memory(gradient.shape, gradient.dtype, gradient.device)

    def remove(self) -> None:
        """No longer."""
        self._hooks.clear()


@lru_cache(maxsize=64)
def _numbered(outputs: int, _thread: int) -> tuple[Tensor, ...]:
    """Tensors each of which has the number of an output of its node; all that a hook takes over.

    Every thread has its own: another's hooks must not come in between.
    """
    with torch.enable_grad():
        return torch.empty(outputs, 0, requires_grad=True).unbind()


def _arrive_after(
    graph: Graph,
    position: int,
    arrive: Callable[[Sequence[Tensor | None]], None],
    returned: Sequence[Tensor | None],
    gradients: Sequence[Tensor | None],
) -> None:
    """Show a junction what it got, and the graph what it returned."""
    graph.returned[position] = returned
    arrive(gradients)
    del graph.returned[position]


def has_changing_hook(graph: Graph, position: int) -> bool:
    """Whether a hook of an output of a node changes its gradient.

    A graph does not show its hooks, but they act on the way from an output to itself. What they are
    shown there and back is a single large number in every entry, so that nothing is computed.
    """
    described = graph.described(position)
    for number, output in enumerate(described):
        edge = GradientEdge(graph.nodes[position], number)
        for value in (1e4, -1e4):  # and `retain_grad` adds up nothing
            given = torch.full((), value, dtype=output.dtype, device=output.device)
            given = given.expand(tuple(output.shape))
            (returned,) = torch.autograd.grad((edge,), (edge,), (given,), retain_graph=True)
            if returned is not given and not torch.equal(returned, given):
                return True
    return False


def autocast_off(device: torch.device) -> AbstractContextManager[object]:
    """A backward computes in the precision that its forward computed in."""
    stack = ExitStack()
    for kind in {"cpu", device.type}:
        if torch.is_autocast_enabled(kind):
            stack.enter_context(torch.autocast(kind, enabled=False))
    return stack


@contextmanager
def _emptied(hooks: Sequence[dict[Any, Any] | None]) -> Iterator[None]:
    kept = [(one, dict(one)) for one in hooks if one]
    for one, _ in kept:
        one.clear()
    try:
        yield
    finally:
        for one, items in kept:
            one.update(items)


def without_hooks(leaves: Iterable[Tensor]) -> AbstractContextManager[None]:
    """Tensor hooks are for final gradients: let passes over parts of them go unseen."""
    return _emptied([leaf._backward_hooks for leaf in leaves])


@contextmanager
def set_aside(leaves: Collection[Tensor]) -> Iterator[None]:
    """Put `.grad`, and the hooks that wait for it, back as they were."""
    kept = [leaf.grad for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    try:
        with _emptied([leaf._post_accumulate_grad_hooks for leaf in leaves]):
            yield
    finally:
        for leaf, gradient in zip(leaves, kept, strict=True):
            leaf.grad = gradient


@contextmanager
def kept_gradients(roots: Sequence[Tensor], parameters: Iterable[Tensor]) -> Iterator[None]:
    """Put `.grad` of all leaves back, and let no hook of theirs see what is written to it.

    Args:
        roots: The losses.
        parameters: Others, which a graph may hide.
    """
    leaves = list(dict.fromkeys([*Graph(roots).leaves(), *parameters]))
    with set_aside(leaves), without_hooks(leaves):
        yield


def show_gradients(
    graph: Graph,
    starts: Sequence[Tensor],
    leaves: Sequence[Tensor],
    show: Callable[[Any, Tensor], None],
    *,
    retain: bool = False,
) -> None:
    """An ordinary backward that shows the gradients of leaves as they come, and keeps none."""

    def shown(leaf: Tensor) -> Callable[[Tensor | None], Tensor | None]:
        def hook(gradient: Tensor | None) -> Tensor | None:
            if gradient is None:  # a compiled region that uses its value alone
                return None
            if gradient.is_sparse:
                show(leaf, gradient.to_dense())
                return gradient
            show(leaf, gradient)
            zero = torch.zeros((), dtype=gradient.dtype, device=gradient.device)
            return zero.expand(gradient.shape)  # nobody else needs it

        return hook

    kept = [leaf._backward_hooks for leaf in leaves]
    try:
        for leaf in leaves:
            leaf._backward_hooks = None  # tensors that were swapped ignore their old ones
            leaf.register_hook(shown(leaf))
        if graph.is_reentrant:  # such a graph refuses to be given inputs
            torch.autograd.backward(graph.roots, starts, retain_graph=retain)
        else:
            torch.autograd.grad(graph.roots, leaves, starts, retain_graph=retain, allow_unused=True)
    finally:
        for leaf, hooks in zip(leaves, kept, strict=True):
            leaf._backward_hooks = hooks


class ReachedNodes:
    """Sees which nodes a gradient other than zero comes through."""

    def __init__(self) -> None:
        self._any: dict[int, Tensor] = {}

    def see(self, position: int, gradients: Sequence[Tensor | None]) -> None:
        """Take note of a node's output gradients."""
        for gradient in gradients:
            if gradient is not None and gradient.numel():
                earlier = self._any.get(position)
                is_reached = gradient.any()
                self._any[position] = is_reached if earlier is None else earlier | is_reached

    def unreached(self) -> frozenset[int]:
        """The nodes whose gradients were all zero; waits for the device."""
        if not self._any:
            return frozenset()
        device = next(iter(self._any.values())).device
        reached = torch.stack([flag.to(device) for flag in self._any.values()]).tolist()
        return frozenset(
            p for p, is_reached in zip(self._any, reached, strict=True) if not is_reached
        )


@contextmanager
def check_hidden_backwards(names: Mapping[nn.Parameter, str], graph: Graph) -> Iterator[None]:
    """Raise if passes write gradients of parameters on their way; `.grad` stays as it was.

    A function of a graph may run a backward of its own, into `.grad`: reversible layers, tiled
    layers and some activation checkpoints do. It takes part in every pass over the graph, and what
    it writes is not among the gradients that the pass returns.
    """
    if not any(map(is_python_function, graph.nodes)):
        yield
        return
    with set_aside(names):
        yield
        hidden = [name for parameter, name in names.items() if parameter.grad is not None]
    if hidden:
        raise NotSeparable(
            f"engine: a function runs a backward of its own, which hides {some(hidden)} from this "
            'one. Use engine="per_task".'
        )
