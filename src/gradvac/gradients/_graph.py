"""Looking at autograd's graph."""

from collections.abc import Iterable, Iterator

from torch import Tensor
from torch.autograd.graph import Node

__all__ = ["Node", "graph_nodes"]


def graph_nodes(roots: Iterable[Tensor]) -> Iterator[Node]:
    """The nodes below some tensors, each once, without the leaves."""
    seen: set[Node] = set()
    stack = [root.grad_fn for root in roots]
    while stack:
        node = stack.pop()
        if node is None or node in seen or not node.next_functions:
            continue
        seen.add(node)
        stack.extend(following for following, _ in node.next_functions)
        yield node
