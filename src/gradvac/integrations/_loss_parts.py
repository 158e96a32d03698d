"""A loss taken apart: what each row of a model's outputs adds to it.

A trainer's own loss is one number for the whole batch. By the chain rule its gradient is a sum over
the rows of the outputs x it was computed from: sum_r <dloss/dx_r, dx_r>. So

    entry r  =  <dloss/dx_r, x_r>      with dloss/dx_r as a constant

has the gradient that the loss has through row r. Where a loss is a sum over entries of x (the
negative log-probabilities of SFT), entry r is also what row r adds to it.
"""

# R rows of outputs

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_RELATIVE = 1e-3  # half precision adds up to a loss no better


def reached(loss: Tensor, parts: Sequence[Tensor]) -> tuple[list[Tensor], Tensor | None]:
    """Which of some tensors a loss was computed from directly, and a leaf it reaches without them.

    Args:
        loss: The loss.
        parts: Tensors of its graph, where the search ends.
    """
    stops = {part.grad_fn: part for part in parts if part.grad_fn is not None}
    found, leaves = _search(loss, stops)
    outside = [leaf for leaf in leaves if not any(leaf is part for part in parts)]
    return [stops[node] for node in found], outside[-1] if outside else None


def check_logits(loss: Tensor, logits: Tensor) -> None:
    """Raise if a model's own loss, which comes from its logits, has a term that does not."""
    node: Any = logits.grad_fn
    stops = {node}
    while node is not None and node.name().startswith("ToCopy"):  # the loss may be from before
        node = node.next_functions[0][0]
        stops.add(node)
    found, leaves = _search(loss, stops)
    if found and leaves:
        raise ValueError(
            "row_losses: the model's own loss has a term that reaches a parameter of shape "
            f"{list(leaves[-1].shape)} without the logits, such as the balance of a router "
            "(output_router_logits): it would be left out. Switch it off, or give row_losses, one "
            "loss per row."
        )


def _search(loss: Tensor, stops: Container[Any]) -> tuple[list[Any], list[Tensor]]:
    """Which nodes a loss reaches first, and the leaves that it reaches without them."""
    found, leaves = list[Any](), list[Tensor]()
    seen, waiting = set[Any](), [loss.grad_fn]  # nodes are kept, as they are told apart by address
    while waiting:
        node: Any = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node in stops:
            found.append(node)
            continue
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            leaves.append(leaf)
        waiting += [child for child, _ in node.next_functions]
    return found, leaves


@dataclass(frozen=True, eq=False)
class LossParts:
    """The outputs that a loss was computed from."""

    loss: Tensor
    outputs: list[Tensor]  # tensors `[R, ...]` that it depends on, and on nothing else

    @classmethod
    def find(cls, loss: Tensor, outputs: object, num_rows: int) -> LossParts:
        """The parts of a trainer's loss.

        Args:
            loss: What `compute_loss` returned.
            outputs: What the model returned, in all calls of it.
            num_rows: R.

        Raises:
            ValueError: It does not come from rows of outputs, or not from them alone.
        """
        remedy = "give row_losses, one loss per row"
        rows = [x for x in _tensors(outputs) if x.dim() and len(x) == num_rows]
        found, leaf = reached(loss, rows)
        if leaf is not None and found:
            raise ValueError(
                f"compute_loss: its loss has a term that reaches a parameter of shape "
                f"{list(leaf.shape)} without the rows of the model's outputs, such as the balance "
                f"of a router: it would be left out. Switch it off, or {remedy}."
            )
        if not found:
            shapes = ", ".join(str(list(x.shape)) for x in _tensors(outputs)) or "none"
            raise ValueError(
                f"compute_loss: its loss is not computed from tensors with {num_rows} rows that "
                f"the model returned (those with a gradient have shapes {shapes}); switch packing "
                f"and fused losses off, or {remedy}."
            )
        for one in found:  # the same gradient would count twice
            others = [other for other in found if other is not one]
            if others and reached(one, others)[0]:
                raise ValueError(
                    "compute_loss: its loss is computed from an output of the model and from what "
                    f"that was computed from; {remedy}."
                )
        return cls(loss, found)

    def rows(self) -> Tensor:
        """Entry r has the gradient of the loss through row r of the outputs, `[R]`.

        Its value is what the row adds to the loss, or NaN where that is not known.
        """
        gradients = torch.autograd.grad(self.loss, self.outputs, retain_graph=True)
        entries = sum(
            (_exact(x) * _exact(g)).reshape(len(x), -1).sum(1)
            for x, g in zip(self.outputs, gradients, strict=True)
        )
        assert isinstance(entries, Tensor)
        unknown = self._gap(entries.detach()) > _RELATIVE
        return entries + torch.where(unknown, torch.nan, 0.0).to(entries.dtype)

    def _gap(self, entries: Tensor) -> Tensor:
        loss = self.loss.detach().to(entries.dtype)
        return (entries.sum() - loss).abs() / loss.abs().clamp_min(1e-6)

    @property
    def is_sum(self) -> bool:
        """Whether the values of `rows` add up to the loss; waits for the device."""
        return not bool(self.rows().detach().isnan().any())

    def check_separate(self, tasks: Tensor) -> None:
        """Raise if rows of one task change the gradients of another, which has none of its own.

        Args:
            tasks: The task of every row, `[R]`, on the host.
        """
        gradients = torch.autograd.grad(self.loss, self.outputs, create_graph=True)
        curved = [(x, g) for x, g in zip(self.outputs, gradients, strict=True) if g.requires_grad]
        for task in tasks.unique().tolist() if curved else ():
            is_own = (tasks == task).to(self.loss.device)
            own = [_exact(g)[is_own] for _, g in curved]
            probe = torch.stack([(g * torch.randn_like(g)).sum() for g in own]).sum()
            second = torch.autograd.grad(probe, self.outputs, retain_graph=True, allow_unused=True)
            if any(s is not None and bool(s[~is_own].any()) for s in second):
                raise ValueError(
                    "compute_loss: rows of different tasks influence each other in this loss (as "
                    "with negatives from the batch, or sorting), so that no task has a gradient "
                    "of its own; put one task into each batch, or give row_losses."
                )


def _exact(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _tensors(outputs: object) -> Iterator[Tensor]:
    """All tensors with a gradient in what a model returned."""
    if isinstance(outputs, Tensor):
        if outputs.requires_grad and outputs.is_floating_point():
            yield outputs
    elif isinstance(outputs, Mapping):
        for value in outputs.values():
            yield from _tensors(value)
    elif isinstance(outputs, list | tuple):
        for value in outputs:
            yield from _tensors(value)
