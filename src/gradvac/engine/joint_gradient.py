"""The joint gradient of all losses, which task gradients must add up to.

It is taken before anything else runs: separating tasks takes several runs of a graph, or several
calls of a node, and a function whose backward changes what it saved, or counts its calls, is right
only the first time.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from gradvac.engine.graph import Graph
from gradvac.engine.kernels import negligible, repeatable, sketch, tolerance
from gradvac.engine.passes import set_aside, show_gradients


def is_due(step: int) -> bool:
    """Whether a step verifies: 1, 2, 10, 100, 1,000, and every thousand from there on."""
    return step in (1, 2, 10, 100) or step % 1000 == 0


class GradientSketches:
    """Sketches of sums of gradients, by leaf, and of their absolute values."""

    def __init__(self) -> None:
        self.sketches: dict[Tensor, Tensor] = {}
        self.sizes: dict[Tensor, Tensor] = {}

    @torch.no_grad()
    def add(self, leaf: Tensor, gradient: Tensor) -> None:
        """Add a gradient."""
        sketches = sketch(gradient.to_dense())
        size = sketches.abs()
        if leaf in self.sketches:
            sketches, size = sketches + self.sketches[leaf], size + self.sizes[leaf]
        self.sketches[leaf], self.sizes[leaf] = sketches, size


class JointGradient:
    """The gradient of all losses together, by leaf, from the first run of their graph."""

    def __init__(self, graph: Graph, starts: Sequence[Tensor], leaves: Sequence[Tensor]) -> None:
        self._leaves = [leaf for leaf in leaves if leaf.requires_grad]  # some may be frozen
        self._lowest = graph.lowest()
        device = graph.roots[0].device
        self._devices = [device] if device.type == "cuda" else []
        self._random = torch.get_rng_state(), *map(torch.cuda.get_rng_state, self._devices)
        self._starts = starts
        self._first = self.run(graph)

    def run(self, graph: Graph, factor: float = 1.0, *, retain: bool = True) -> GradientSketches:
        """One run of the graph, with the random numbers of the first.

        A run with the factor -1 takes back what `retain_grad` of activations added up in another.
        """
        sums, starts = GradientSketches(), [factor * start for start in self._starts]
        with torch.random.fork_rng(self._devices), set_aside(self._leaves):
            torch.set_rng_state(self._random[0])
            for device, state in zip(self._devices, self._random[1:], strict=True):
                torch.cuda.set_rng_state(state, device)
            show_gradients(graph, starts, self._leaves, sums.add, retain=retain)
        return sums

    def differing(self, sums: GradientSketches, *, is_strict: bool = False) -> list[Tensor]:
        """The leaves whose gradients do not add up to this one.

        Strictly: beyond what rounding usually does, instead of what it can do at most.
        """
        most = tolerance(self._lowest) if is_strict else repeatable(self._lowest)
        first, added = self._first, sums
        largest = max((float(size.max()) for size in first.sizes.values() if len(size)), default=0)
        least = negligible(self._lowest) * largest
        differing = []
        for leaf in dict.fromkeys([*first.sketches, *added.sketches]):
            if not leaf.requires_grad:
                continue
            nothing = leaf.new_zeros(1)
            ours, theirs = (one.sketches.get(leaf, nothing) for one in (first, added))
            rest = (ours - theirs).abs()
            size = sum(one.sizes.get(leaf, nothing).sum() for one in (first, added))
            if rest.numel() and rest.max() > least and rest.sum() > most * size:
                differing.append(leaf)
        return differing

    def is_same_again(self, graph: Graph) -> bool:
        """Whether the graph can run more than once: hooks may be anything but forgetful."""
        again = [self.run(graph), self.run(graph)]
        for _ in again:
            self.run(graph, -1.0)
        return not any(self.differing(sums, is_strict=True) for sums in again)
