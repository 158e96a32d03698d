"""Any other module with parameters of its own: task gradients by running it task by task.

Exact and slower. The module runs once in the forward. In the backward it runs again on the rows of
each task, and autograd gives that task's gradients. Where that would not be the same computation,
one graph of all rows is differentiated once per task instead, with the other tasks' output
gradients set to zero:

- the module drew random numbers (dropout) or wrote to its buffers: the forward's graph is kept;
- it cannot be told which of its inputs have the batch as dimension 0 (a mask `[S, S]` in a batch of
  S rows), or a gradient counts over the batch: the module runs again once, on all rows.
"""

# B rows, T tasks

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree

from gradvac.gradients._contributions import Formed
from gradvac.gradients._rows import Segments
from gradvac.gradients._site import Settlement, Site

Pieces = Sequence[Tensor | None]
Graph = tuple[list[Tensor], list[Any]]  # leaves, and the outputs computed from them


def run_fallback(site: Site, *args: Any, **kwargs: Any) -> Any:
    """Run an attached module as a whole."""
    leaves, structure = pytree.tree_flatten((args, kwargs), is_leaf=_is_packed)
    opaque = _find_opaque(leaves)
    if opaque is None:
        call = _Call(site, leaves, structure)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        try:
            results = _FallbackTasks.apply(call, *tensors, *call.parameters, *site.tokens)
        except RuntimeError as error:
            if "in-place operation" not in str(error):
                raise
            return _refuse(site, "writes to its input; let it write to a copy", args, kwargs)
        opaque = _find_opaque(call.output_leaves)
        if opaque is None:
            return call.rebuild(results)
    reason = (
        f"takes or returns a {opaque}, whose tensors have no row for every row of the batch; use "
        "tensors (also in tuples, lists and dicts)"
    )
    return _refuse(site, reason, args, kwargs)


def _refuse(site: Site, reason: str, args: Any, kwargs: Any) -> Any:
    """Run the module as it is: only a backward by task is refused."""
    kind = type(site.module).__name__
    site.forward.refuse(f'engine: {site.name} ({kind}) {reason}, or use engine="per_task".')
    return site.original(*args, **kwargs)


class _Call:
    """One call of a module: how to run it again, on all rows or on some."""

    def __init__(self, site: Site, leaves: Sequence[Any], structure: Any) -> None:
        self.site, self._structure = site, structure
        self.parameters = [p for p in site.module.parameters() if p.requires_grad]
        # Tensors are replaced by None: autograd saves them, not we.
        self._constants = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._is_tensor = [isinstance(leaf, Tensor) for leaf in leaves]
        self.num_tensors = sum(self._is_tensor)
        self._needs_gradient = [leaf.requires_grad for leaf in leaves if isinstance(leaf, Tensor)]
        # Recurrent modules keep the batch of their states in dimension 1.
        self.is_recurrent = isinstance(site.module, nn.RNNBase)
        # Positions that lack a batch get it here too, if the module is a table of them.
        self._expand = site.broadcast() if isinstance(site.module, nn.Embedding) else None
        self._expanded = False
        self.kept: Graph | None = None
        self.output_leaves: list[Any] = []
        self._output_structure: Any = None

    def run(self, tensors: Sequence[Tensor], *, whole: bool = True) -> Graph:
        """Leaves to differentiate by, and what the module returns for them, flattened."""
        pairs = zip(tensors, self._needs_gradient, strict=True)
        fresh = [tensor.detach().requires_grad_(needs) for tensor, needs in pairs]
        given = iter(fresh)
        leaves = [
            next(given) if is_tensor else constant
            for is_tensor, constant in zip(self._is_tensor, self._constants, strict=True)
        ]
        args, kwargs = pytree.tree_unflatten(leaves, self._structure)
        # A checkpoint around the module must not take what this graph saves for its own.
        own_saving = torch.autograd.graph.saved_tensors_hooks(_as_it_is, _as_it_is)
        with torch.enable_grad(), self.site.untouched(), own_saving:
            output = self.site.original(*args, **kwargs)
            if whole and self._expand is not None and isinstance(output, Tensor):
                plain, output = output, self._expand(output, output.dim())
                self._expanded = output is not plain
        found, self._output_structure = pytree.tree_flatten(output)
        return fresh, found

    def rebuild(self, outputs: tuple[Tensor, ...]) -> Any:
        """The module's output, with its tensors replaced by those in the graph."""
        given = iter(outputs)
        leaves = [next(given) if isinstance(x, Tensor) else x for x in self.output_leaves]
        self.output_leaves = []  # they hold the graph of the forward
        return pytree.tree_unflatten(leaves, self._output_structure)

    def batch_dim(self, position: int) -> int:
        return 1 if self.is_recurrent and position else 0

    def sliced_inputs(self, tensors: Sequence[Tensor], length: int) -> list[bool] | None:
        """Which inputs have the batch, to be cut by task; None where that cannot be told."""
        parts = self.site.module.modules()
        counts = any(getattr(part, "scale_grad_by_freq", False) for part in parts)
        if not tensors or counts or self._expanded:
            return None
        if self.is_recurrent:
            return [True] * len(tensors)
        found = []
        for position, tensor in enumerate(tensors):
            size = tensor.shape[0] if tensor.dim() else 1
            surely = tensor.shape == tensors[0].shape or length not in tensors[0].shape[1:]
            is_integer = not _is_differentiable(tensor) and tensor.dtype != torch.bool
            if size == length and surely:
                found.append(True)
            elif position and (size == 1 or (size % length and not is_integer)):
                found.append(False)  # a mask or bias that is the same for all rows
            else:
                return None
        return found

    def differentiate(self, graph: Graph, grads: Pieces) -> tuple[list[Tensor | None], Pieces]:
        """Gradients of the inputs and of the parameters."""
        inputs, leaves = graph
        outputs = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        pairs = [
            (o, g) for o, g in zip(outputs, grads, strict=True) if g is not None and o.requires_grad
        ]
        wanted = [t for t in inputs if t.requires_grad]
        if not pairs:
            return [None] * len(inputs), [None] * len(self.parameters)
        try:
            with self.site.untouched():  # a checkpoint inside the module runs its parts again
                found = torch.autograd.grad(
                    [o for o, _ in pairs],
                    [*wanted, *self.parameters],
                    [g.to(o.dtype) for o, g in pairs],
                    retain_graph=True,  # a weight computed before the forward is in every slice
                    allow_unused=True,
                )
        except RuntimeError as error:
            if "use_reentrant" not in str(error):
                raise
            raise ValueError(
                f"engine: {self.site.name} runs task by task, which its reentrant checkpoints do "
                "not allow; use torch.utils.checkpoint.checkpoint(..., use_reentrant=False)."
            ) from error
        by_input = iter(found[: len(wanted)])
        return [next(by_input) if t.requires_grad else None for t in inputs], found[len(wanted) :]


class _FallbackTasks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, *inputs: Tensor) -> tuple[Tensor, ...]:
        tensors = inputs[: call.num_tensors]
        before = _state(call.site.module, inputs)
        graph = call.run(tensors)
        after = _state(call.site.module, inputs)
        if any(not torch.equal(a, b) for a, b in zip(before, after, strict=True)):
            call.kept = graph
        ctx.call, call.output_leaves = call, graph[1]
        outputs = [leaf for leaf in graph[1] if isinstance(leaf, Tensor)]
        batched = (o for o in outputs if o.dim() and _is_differentiable(o))
        ctx.rows = call.site.rows(next(batched, torch.zeros(1)))
        ctx.num_tokens = len(inputs) - call.num_tensors - len(call.parameters)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        results = tuple(output.detach() for output in outputs)
        ctx.mark_non_differentiable(*(r for r in results if not _is_differentiable(r)))
        return results

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        call: _Call = ctx.call
        settlement = Settlement(call.site, ctx)
        tensors, segments = ctx.saved_tensors, settlement.segments
        no_tokens = (None,) * ctx.num_tokens
        if segments is None:
            graph = call.kept or call.run(tensors)
            gx, by_parameter = call.differentiate(graph, grads)
            return None, *gx, *by_parameter, *no_tokens
        for position, grad in enumerate(grads):
            if grad is not None:  # every output must have the batch
                dim = call.batch_dim(position)
                length = grad.shape[dim] if grad.dim() > dim else 1
                call.site.ledger.segments(ctx.rows[0], length, call.site.name)
        sliced = None if call.kept else call.sliced_inputs(tensors, ctx.rows[1])
        if sliced is None:
            graph = call.kept or call.run(tensors)
            gx, gradients = _by_masks(call, graph, grads, segments)
        else:
            gx, gradients = _by_slices(call, tensors, grads, segments, sliced)
        returned = [
            _settle(settlement, parameter, [own[place] for own in gradients])
            for place, parameter in enumerate(call.parameters)
        ]
        return None, *gx, *returned, *no_tokens


def _settle(settlement: Settlement, parameter: nn.Parameter, gradients: Pieces) -> Tensor | None:
    if all(gradient is None for gradient in gradients):
        return None
    filled = [
        torch.zeros_like(parameter) if g is None else g.to_dense() if g.is_sparse else g
        for g in gradients
    ]
    return settlement.settle(parameter, Formed(torch.stack(filled)))


def _by_masks(
    call: _Call, graph: Graph, grads: Pieces, segments: Segments
) -> tuple[list[Tensor | None], list[Pieces]]:
    total: list[Tensor | None] = [None] * call.num_tensors
    by_task: list[Pieces] = []
    for task in range(segments.num_tasks):
        masked = list(grads)
        for position, grad in enumerate(grads):
            if grad is not None:
                dim = call.batch_dim(position)
                mask = segments.spread(segments.tasks, grad.shape[dim]) == task
                masked[position] = grad * mask.view(-1, *(1,) * (grad.dim() - dim - 1))
        gx, own = call.differentiate(graph, masked)
        total = [
            a if b is None else (b if a is None else a + b) for a, b in zip(total, gx, strict=True)
        ]
        by_task.append(own)
    return total, by_task


def _by_slices(
    call: _Call,
    tensors: Sequence[Tensor],
    grads: Pieces,
    segments: Segments,
    sliced: Sequence[bool],
) -> tuple[list[Tensor | None], list[Pieces]]:
    total = [torch.zeros_like(t) if t.requires_grad else None for t in tensors]
    by_task: list[Pieces] = []
    for task, count in enumerate(segments.counts(segments.num_rows)):
        if not count:
            by_task.append([None] * len(call.parameters))
            continue

        def entries(tensor: Tensor, position: int, task: int = task) -> tuple[int, Tensor]:
            dim = call.batch_dim(position)
            return dim, segments.entries_by_task(tensor.shape[dim])[task]

        own_tensors = [
            t.index_select(*entries(t, position)) if cut else t
            for position, (t, cut) in enumerate(zip(tensors, sliced, strict=True))
        ]
        own_grads = [
            None if g is None else g.index_select(*entries(g, position))
            for position, g in enumerate(grads)
        ]
        gx, own = call.differentiate(call.run(own_tensors, whole=False), own_grads)
        for position, (sum_, part, cut) in enumerate(zip(total, gx, sliced, strict=True)):
            if sum_ is not None and part is not None and cut:
                sum_.index_copy_(*entries(sum_, position), part)
            elif sum_ is not None and part is not None:
                sum_ += part
        by_task.append(own)
    return total, by_task


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def _is_differentiable(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _is_packed(leaf: object) -> bool:
    return isinstance(leaf, PackedSequence)


def _find_opaque(leaves: Sequence[object]) -> str | None:
    """The type of an object that is no tensor but has some, of rows or with a graph unknown."""
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            continue
        parts = leaf if isinstance(leaf, tuple | list) else getattr(leaf, "__dict__", {}).values()
        hides = any(isinstance(part, Tensor) and part.requires_grad for part in parts)
        if hides or _is_packed(leaf):
            return type(leaf).__name__
    return None


def _state(module: nn.Module, tensors: Sequence[Tensor]) -> list[Tensor]:
    """What moves if random numbers are drawn, or inputs, parameters or buffers written."""
    written = [t._version for t in (*tensors, *module.parameters(), *module.buffers())]
    states = [torch.tensor(written), torch.get_rng_state()]
    if any(t.is_cuda for t in tensors):
        states.append(torch.cuda.get_rng_state())
    return states
