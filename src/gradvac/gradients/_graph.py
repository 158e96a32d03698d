"""Looking at autograd's graph."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor
from torch.autograd.graph import Node

__all__ = ["Node", "graph_leaves", "graph_nodes", "set_aside"]


def graph_nodes(roots: Iterable[Tensor]) -> Iterator[Node]:
    """The nodes below some tensors, each once, without the leaves."""
    return (node for node in _walk(roots) if node.next_functions)


def graph_leaves(roots: Iterable[Tensor]) -> list[Tensor]:
    """The leaves whose `.grad` a backward from some tensors adds to."""
    found = (getattr(node, "variable", None) for node in _walk(roots) if not node.next_functions)
    return [leaf for leaf in found if leaf is not None]


def _walk(roots: Iterable[Tensor]) -> Iterator[Node]:
    seen: set[Node] = set()
    stack = [root.grad_fn for root in roots]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        stack.extend(following for following, _ in node.next_functions)
        yield node


@contextmanager
def set_aside(leaves: Iterable[Tensor]) -> Iterator[None]:
    """Give the leaves an empty `.grad`, and afterwards theirs back."""
    kept = {leaf: leaf.grad for leaf in leaves}
    for leaf in kept:
        leaf.grad = None
    try:
        yield
    finally:
        for leaf, grad in kept.items():
            leaf.grad = grad
