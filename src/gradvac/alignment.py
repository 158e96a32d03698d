"""What one aligned backward did, for people and records to look at."""

# K components, T tasks present

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from gradvac import gram as geometry
from gradvac.devices import index_on
from gradvac.hints import warn_caller


@dataclass(frozen=True, eq=False)  # tensors have no single truth value: equal means identical
class Alignment:
    """The geometry of one step. Tensors stay on the device, without synchronisation.

    Whatever follows from the Gram matrices is computed on first access, so a step that nobody
    looks at costs nothing extra.

    Attributes:
        tasks: The tasks present, in the aligner's order.
        components: Component names.
        weights: `[K, T]`; the update of component k is sum_i weights[k, i] g_i.
        target: `[K, T, T]`, the targets of this step; NaN for rules without targets.
        active: bool `[K, T, T]`: [k, i, j] if g_i was altered against g_j.
        gram: `[K, T, T]`, inner products of the unaltered task gradients.
        losses: `[T]`, what was differentiated: a task's entries, added up over rows and
            micro-batches and normalised as they were given; with several processes, their means.
        exact: False if products between gradients of different processes were left out of `gram`.
    """

    tasks: tuple[str, ...]
    components: tuple[str, ...]
    weights: Tensor
    target: Tensor
    active: Tensor
    gram: Tensor = field(repr=False)
    losses: Tensor = field(repr=False)
    exact: bool = True

    @cached_property
    def similarity(self) -> Tensor:
        """Cosines of the unaltered task gradients, `[K, T, T]`."""
        return geometry.cosine(self.gram)

    @cached_property
    def norms(self) -> Tensor:
        """Lengths of the unaltered task gradients, `[K, T]`."""
        return geometry.norms(self.gram)

    @cached_property
    def update_cosine(self) -> Tensor:
        """cos(update, plain sum), `[K]`: 1 where the rule changed no direction."""
        return geometry.update_cosine(self.gram, self.weights)

    @cached_property
    def update_ratio(self) -> Tensor:
        """||update|| / ||plain sum||, `[K]`: how much the rule lengthened the update."""
        return geometry.update_ratio(self.gram, self.weights)

    def __repr__(self) -> str:
        return (
            f"Alignment({len(self.tasks)} tasks, {len(self.components)} components, "
            f"device={self.gram.device}{'' if self.exact else ', approximate'})"
        )


@dataclass(frozen=True, eq=False)
class WeighedComponents:
    """What a rule decided about some components."""

    components: Sequence[int]
    gram: Tensor  # [k, T, T]
    weights: Tensor  # [k, T]
    target: Tensor  # [k, T, T]
    active: Tensor  # [k, T, T]


def assemble(
    weighed: Sequence[WeighedComponents],
    tasks: tuple[str, ...],
    components: tuple[str, ...],
    order: Sequence[int],
    losses: Tensor,
    *,
    exact: bool = True,
) -> Alignment:
    """What a rule decided in one step: components in model order, tasks (and losses) to `order`."""
    positions = [k for one in weighed for k in one.components]
    by_component = sorted(range(len(positions)), key=positions.__getitem__)

    def joined(name: str) -> Tensor:
        pieces = [getattr(one, name) for one in weighed]
        values: Tensor = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        values = _moved(values, 0, by_component)
        for dim in range(1, values.dim()):
            values = _moved(values, dim, order)
        return values

    return Alignment(
        tasks,
        components,
        weights=joined("weights"),
        target=joined("target"),
        active=joined("active"),
        gram=joined("gram"),
        losses=_moved(losses, 0, order),
        exact=exact,
    )


def _moved(values: Tensor, dim: int, order: Sequence[int]) -> Tensor:
    if list(order) == list(range(len(order))):
        return values
    return values.index_select(dim, index_on(order, values.device))


def warn_if_identical(alignment: Alignment) -> None:
    """Warn, on the first step, if the gradients seem to have been summed before they came."""
    used = alignment.norms.amax(-1) > 0
    similarity, norms = alignment.similarity[used], alignment.norms[used]
    alike = bool((similarity > 1 - 1e-9).all()) and bool(
        torch.isclose(norms, norms[:, :1], rtol=1e-6).all()
    )
    if alike and len(norms):
        warn_caller(
            "losses: all tasks have the same gradient. If every task was given the loss of the "
            "whole batch, its gradients were summed before they came here and cannot be "
            "separated; give each task the loss of its own rows."
        )
