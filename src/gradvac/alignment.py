"""What one aligned backward did, for people and records to look at."""

# K components, T tasks present

import html
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from gradvac import gram as geometry
from gradvac.utils.devices import index_on
from gradvac.utils.hints import warn_caller

_MOST_NAMED = 5  # pairs in a summary


class TaskPair(NamedTuple):
    """Two tasks: their mean cosine over components, and the share of components in conflict."""

    task: str
    other: str
    similarity: float
    conflict: float


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

    def pairs(self) -> list[TaskPair]:
        """All pairs, the strongest conflict first; waits for the device."""
        known = self.known_similarity.cpu()
        mean = known.nanmean(0)
        below = (known < 0).sum(0) / (~known.isnan()).sum(0)
        found = [
            TaskPair(task, other, float(mean[i, j]), float(below[i, j]))
            for j, other in enumerate(self.tasks)
            for i, task in enumerate(self.tasks[:j])
            if not mean[i, j].isnan()
        ]
        return sorted(found, key=lambda pair: pair.similarity)

    @property
    def known_similarity(self) -> Tensor:
        """`similarity`, with NaN where a task has no gradient in a component, `[K, T, T]`."""
        return geometry.known_cosine(self.gram)

    def summary(self) -> str:
        """What this step did, in a few lines; waits for the device."""
        pairs = self.pairs()
        lines = [
            f"{len(self.tasks)} tasks ({', '.join(self.tasks)}), {len(self.components)} components"
        ]
        if pairs:
            mean = sum(pair.similarity for pair in pairs) / len(pairs)
            conflict = sum(pair.conflict for pair in pairs) / len(pairs)
            lines.append(
                f"average cosine of two tasks {mean:.2f}; in conflict (below 0) in {conflict:.0%} "
                "of components"
            )
            lines.append("pairs, the strongest conflict first:")
            lines += [
                f"  {one.task} and {one.other}: {one.similarity:.2f}, in conflict in "
                f"{one.conflict:.0%} of components"
                for one in pairs[:_MOST_NAMED]
            ]
            left = len(pairs) - _MOST_NAMED
            lines += [f"  ... and {left} more (pairs())"] if left > 0 else []
        cosine, ratio = float(self.update_cosine.mean()), float(self.update_ratio.mean())
        lines.append(
            f"update: cosine {cosine:.3f} with the plain sum, {ratio:.2f} times its length"
        )
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        mean = self.known_similarity.cpu().nanmean(0)
        return matrix_html(mean.tolist(), self.tasks, self.summary().splitlines()[0])

    def __repr__(self) -> str:
        return (
            f"Alignment({len(self.tasks)} tasks, {len(self.components)} components, "
            f"device={self.gram.device}{'' if self.exact else ', approximate'})"
        )


def matrix_html(values: Sequence[Sequence[float]], tasks: Sequence[str], caption: str) -> str:
    """Mean cosines of pairs as a small table, for notebooks: blue agrees, orange is in conflict."""
    known = [abs(v) for i, row in enumerate(values) for j, v in enumerate(row) if i != j and v == v]
    limit = max([0.1, *known])

    def cell(value: float, on_diagonal: bool) -> str:
        if on_diagonal or value != value:
            return "<td></td>"
        colour, strength = ("33,102,172" if value > 0 else "179,88,6"), abs(value) / limit
        style = f"background:rgba({colour},{0.6 * strength:.2f})"
        return f'<td style="{style}">{value:.2f}</td>'

    names = [html.escape(task) for task in tasks]
    rows = [
        f"<tr><th>{name}</th>{''.join(cell(v, i == j) for j, v in enumerate(row))}</tr>"
        for i, (name, row) in enumerate(zip(names, values, strict=True))
    ]
    head = f"<tr><th></th>{''.join(f'<th>{name}</th>' for name in names)}</tr>"
    return f"<table><caption>{html.escape(caption)}</caption>{head}{''.join(rows)}</table>"


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
    by_component = _to_move(sorted(range(len(positions)), key=positions.__getitem__))
    by_task = _to_move(order)

    def joined(name: str) -> Tensor:
        pieces = [getattr(one, name) for one in weighed]
        values: Tensor = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        values = _moved(values, 0, by_component)
        for dim in range(1, values.dim()):
            values = _moved(values, dim, by_task)
        return values

    return Alignment(
        tasks,
        components,
        weights=joined("weights"),
        target=joined("target"),
        active=joined("active"),
        gram=joined("gram"),
        losses=_moved(losses, 0, by_task),
        exact=exact,
    )


def _to_move(order: Sequence[int]) -> Sequence[int] | None:
    """None where everything is in its place."""
    return None if list(order) == list(range(len(order))) else order


def _moved(values: Tensor, dim: int, order: Sequence[int] | None) -> Tensor:
    if order is None:
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
