"""Any other module with parameters of its own: task gradients by running it task by task.

Exact and slower. The module runs once in the forward. In the backward it runs again on the rows of
each task, and autograd gives that task's gradients. If it drew random numbers (dropout), running it
again would draw others: then the graph of the forward is kept instead, and differentiated once per
task with the other tasks' output gradients set to zero.
"""

# B rows, T tasks

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from gradvac.gradients._contributions import Formed
from gradvac.gradients._rows import Segments
from gradvac.gradients._site import Settlement, Site


def run_fallback(site: Site, *args: Any, **kwargs: Any) -> Any:
    """Run an attached module as a whole."""
    leaves, structure = pytree.tree_flatten((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    parameters = [p for p in site.module.parameters() if p.requires_grad]
    call = _Call(site, leaves, structure, len(tensors), parameters)
    outputs = _FallbackTasks.apply(call, *tensors, *parameters, *site.tokens)  # type: ignore[no-untyped-call]
    return call.rebuild(outputs)


class _Call:
    """One call of a module: how to run it again, on all rows or on some."""

    def __init__(
        self,
        site: Site,
        leaves: Sequence[Any],
        structure: Any,
        num_tensors: int,
        parameters: list[nn.Parameter],
    ) -> None:
        self.site, self.structure, self.parameters = site, structure, parameters
        # Tensors are replaced by None: autograd saves them, not we.
        self.constants = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.is_tensor = [isinstance(leaf, Tensor) for leaf in leaves]
        self.num_tensors = num_tensors
        # Recurrent modules keep the batch of their states in dimension 1.
        self.state_dim = 1 if isinstance(site.module, nn.RNNBase) else 0
        self.kept: tuple[list[Tensor], list[Tensor]] | None = None
        self.output_leaves: list[Any] = []
        self.output_structure: Any = None

    def run(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The module's tensor outputs for given tensor inputs."""
        given = iter(tensors)
        leaves = [
            next(given) if is_tensor else constant
            for is_tensor, constant in zip(self.is_tensor, self.constants, strict=True)
        ]
        args, kwargs = pytree.tree_unflatten(leaves, self.structure)
        with _untouched(self.site):
            output = self.site.original(*args, **kwargs)
        self.output_leaves, self.output_structure = pytree.tree_flatten(output)
        return [leaf for leaf in self.output_leaves if isinstance(leaf, Tensor)]

    def rebuild(self, outputs: tuple[Tensor, ...]) -> Any:
        """The module's output, with its tensors replaced by those in the graph."""
        given = iter(outputs)
        leaves = [next(given) if isinstance(x, Tensor) else x for x in self.output_leaves]
        self.output_leaves = []
        return pytree.tree_unflatten(leaves, self.output_structure)

    def batch_dim(self, position: int) -> int:
        return self.state_dim if position else 0


@contextmanager
def _untouched(site: Site) -> Iterator[None]:
    outer = site.ledger.inside_fallback
    site.ledger.inside_fallback = True
    try:
        yield
    finally:
        site.ledger.inside_fallback = outer


class _FallbackTasks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, *inputs: Tensor) -> tuple[Tensor, ...]:
        tensors = inputs[: call.num_tensors]
        ctx.call, ctx.rows = call, call.site.rows(tensors[0] if tensors else torch.zeros(1))
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        ctx.num_inputs = len(inputs)
        before = _random_state(inputs)
        with torch.enable_grad():
            fresh = _fresh(tensors)
            outputs = call.run(fresh)
        if any(not torch.equal(a, b) for a, b in zip(before, _random_state(inputs), strict=True)):
            call.kept = (fresh, outputs)
        results = tuple(output.detach() for output in outputs)
        ctx.mark_non_differentiable(*(r for r in results if not r.is_floating_point()))
        return results

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        call: _Call = ctx.call
        settlement = Settlement(call.site, ctx)
        tensors, segments = ctx.saved_tensors, settlement.segments
        if segments is None:
            gx, by_parameter = _all_rows(call, tensors, grads)
            return None, *gx, *by_parameter, *(None,) * len(call.site.tokens)
        separate = _by_slices if call.kept is None else _by_masks
        gx, gradients = separate(call, tensors, grads, segments)
        returned: list[Tensor | None] = []
        for parameter, rows in zip(call.parameters, gradients, strict=True):
            reached = any(row is not None for row in rows)
            filled = [torch.zeros_like(parameter) if row is None else row for row in rows]
            formed = Formed(torch.stack(filled)) if reached else None
            returned.append(settlement.settle(parameter, formed) if formed else None)
        return None, *gx, *returned, *(None,) * len(call.site.tokens)


Pieces = Sequence[Tensor | None]


def _fresh(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Leaves to differentiate by."""
    return [t.detach().requires_grad_(t.is_floating_point()) for t in tensors]


def _differentiate(
    call: _Call, inputs: Sequence[Tensor], outputs: Sequence[Tensor], grads: Pieces, retain: bool
) -> tuple[Pieces, Pieces]:
    pairs = [
        (o, g) for o, g in zip(outputs, grads, strict=True) if g is not None and o.requires_grad
    ]
    wanted = [t for t in inputs if t.requires_grad]
    found: Pieces = [None] * (len(wanted) + len(call.parameters))
    if pairs:
        found = torch.autograd.grad(
            [o for o, _ in pairs],
            [*wanted, *call.parameters],
            [g.to(o.dtype) for o, g in pairs],
            retain_graph=retain,
            allow_unused=True,
        )
    by_input = iter(found[: len(wanted)])
    return [next(by_input) if t.requires_grad else None for t in inputs], found[len(wanted) :]


def _all_rows(call: _Call, tensors: Sequence[Tensor], grads: Pieces) -> tuple[Pieces, Pieces]:
    if call.kept is not None:
        return _differentiate(call, *call.kept, grads, retain=True)
    with torch.enable_grad():
        inputs = _fresh(tensors)
        outputs = call.run(inputs)
    return _differentiate(call, inputs, outputs, grads, retain=False)


def _by_masks(
    call: _Call, tensors: Sequence[Tensor], grads: Pieces, segments: Segments
) -> tuple[Pieces, list[Pieces]]:
    assert call.kept is not None
    inputs, outputs = call.kept
    total: list[Tensor | None] = [None] * len(inputs)
    by_task: list[Pieces] = []
    for task in range(segments.num_tasks):
        masked = []
        for position, grad in enumerate(grads):
            if grad is not None:
                dim = call.batch_dim(position)
                mask = segments.spread((segments.tasks == task), grad.shape[dim])
                grad = grad * mask.view([-1 if d == dim else 1 for d in range(grad.dim())])
            masked.append(grad)
        gx, own = _differentiate(call, inputs, outputs, masked, retain=True)
        total = [
            a if b is None else (b if a is None else a + b) for a, b in zip(total, gx, strict=True)
        ]
        by_task.append(own)
    return total, [list(rows) for rows in zip(*by_task, strict=True)]


def _by_slices(
    call: _Call, tensors: Sequence[Tensor], grads: Pieces, segments: Segments
) -> tuple[Pieces, list[Pieces]]:
    num_rows = segments.num_rows
    for position, tensor in enumerate(tensors):
        dim = call.batch_dim(position)
        if tensor.dim() <= dim or tensor.shape[dim] != num_rows:
            call.site.unbatched.add(position)
    whole = call.site.unbatched
    total = [torch.zeros_like(t) if t.is_floating_point() else None for t in tensors]
    by_task: list[Pieces] = []
    for rows in segments.rows_by_task():
        if not len(rows):
            by_task.append([None] * len(call.parameters))
            continue
        with torch.enable_grad():
            inputs = _fresh(
                [
                    t if position in whole else t.index_select(call.batch_dim(position), rows)
                    for position, t in enumerate(tensors)
                ]
            )
            outputs = call.run(inputs)
        own_grads = [
            None if g is None else g.index_select(call.batch_dim(position), rows)
            for position, g in enumerate(grads)
        ]
        gx, own = _differentiate(call, inputs, outputs, own_grads, retain=False)
        for position, (sum_, part) in enumerate(zip(total, gx, strict=True)):
            if sum_ is None or part is None:
                continue
            if position in whole:
                sum_ += part
            else:
                sum_.index_copy_(call.batch_dim(position), rows, part)
        by_task.append(own)
    return total, [list(rows) for rows in zip(*by_task, strict=True)]


def _random_state(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Generator states of the devices involved; they move if random numbers are drawn."""
    states = [torch.get_rng_state()]
    if any(t.is_cuda for t in tensors):
        states.append(torch.cuda.get_rng_state())
    return states
