"""The per_task engine: one backward per task, task gradients stored as [T, P].

Slow and general: it works for every model, and every faster path is compared with it.
"""

# K components, T tasks, P parameters of a component

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from gradvac.gradients._components import Components, refuse_changed
from gradvac.gradients._graph import LEAF, Graph
from gradvac.gradients._hidden import may_hide, refuse_hidden, set_aside
from gradvac.gradients._kernels import combine, gram
from gradvac.gradients._losses import Losses
from gradvac.gradients._metric import Metric
from gradvac.gradients._passes import without_hooks
from gradvac.gradients._update import Weigh, add_to_grad


class PerTask:
    """One backward per task.

    Args:
        model: The model.
        components: Its components.
        storage_dtype: Of the stored task gradients; None: that of each parameter.
        offload: Store task gradients in host memory; each component visits the device twice.
        is_shared: Other processes train this model too, which a backward through `.grad` would
            call upon at every task.
        metric: What Gram matrices see of task gradients; None: they see them as they are.
    """

    name = "per_task"

    def __init__(
        self,
        model: nn.Module,
        components: Components,
        *,
        storage_dtype: torch.dtype | None = None,
        offload: bool = False,
        is_shared: bool = False,
        metric: Metric | None = None,
    ) -> None:
        parameters = dict(model.named_parameters())
        self._members = [[parameters[p] for p in names] for names in components.values()]
        self._model, self._metric = model, metric
        self._parameters = {parameters[name]: name for m in components.values() for name in m}
        self._storage_dtype, self._offload, self._is_shared = storage_dtype, offload, is_shared
        self._rows: dict[int, dict[Tensor, Tensor]] = {}  # task -> parameter -> gradient
        self._outside: dict[Tensor, Tensor] = {}  # plain gradients of leaves that are not ours

    def backward(self, losses: Losses, weigh: Weigh, *, present: Sequence[int]) -> None:
        """Differentiate, weigh every component, and add the update to `.grad`.

        Args:
            losses: Of this micro-batch.
            weigh: From Gram matrices to weights.
            present: The tasks of this step: those of `losses` and of what was accumulated before.
        """
        self.accumulate(losses)
        rows, outside = self._rows, self._outside
        self.discard()
        self._fold([rows.get(task, {}) for task in present], weigh)
        add_to_grad(list(outside), list(outside.values()))

    def accumulate(self, losses: Losses) -> None:
        """Add the task gradients of a micro-batch to the stored ones; `.grad` is left alone."""
        for leaf, task, gradient in self._differentiate(losses):
            self._keep(leaf, task, gradient)

    def take_over(self, stored: Iterable[tuple[Tensor, int, Tensor]]) -> None:
        """Go on with what another engine has accumulated: (leaf, task, gradient)."""
        for leaf, task, gradient in stored:
            self._keep(leaf, task, gradient)

    def task_gradients(
        self,
        losses: Losses,
        deliver: Callable[[nn.Parameter, Tensor], None],
        expect: Callable[[Iterable[nn.Parameter]], None] | None = None,
    ) -> dict[Tensor, Tensor]:
        """Show every parameter's task gradients, in the order of `losses.present`.

        Args:
            losses: Of this micro-batch.
            deliver: Takes them at the end.
            expect: Is told which parameters may come; then those of a single task are delivered as
                the backward completes them.

        Returns:
            The plain gradients of leaves that are not the model's.
        """
        if expect is not None and len(losses.present) == 1:
            return self._deliver_one_task(losses, deliver, expect)
        self.discard()
        self.accumulate(losses)
        rows = [self._rows.get(task, {}) for task in losses.present]
        outside = self._outside
        self.discard()
        if expect is not None:
            expect({p for p in self._parameters if any(p in row for row in rows)})
        for parameter in self._parameters:
            stacked = _stack(rows, parameter)
            if len(stacked):
                deliver(parameter, stacked.view(-1, *parameter.shape))
        return outside

    def _deliver_one_task(
        self,
        losses: Losses,
        deliver: Callable[[nn.Parameter, Tensor], None],
        expect: Callable[[Iterable[nn.Parameter]], None],
    ) -> dict[Tensor, Tensor]:
        """A plain backward, whose gradients are those of the task: any model, compiled or not."""
        graph = Graph(losses.roots())
        leaves = graph.leaves()
        reached = set(leaves)
        parameters = [parameter for parameter in self._parameters if parameter in reached]
        outside = [leaf for leaf in leaves if leaf not in self._parameters]
        refuse_changed(self._model, self._parameters, graph)
        self._refuse_reentrant(graph)
        expect(parameters)

        def show(leaf: nn.Parameter) -> Callable[[Tensor], Tensor]:
            def hook(gradient: Tensor) -> Tensor:
                dense = gradient.to_dense() if gradient.is_sparse else gradient
                deliver(leaf, dense.unsqueeze(0))
                return gradient.new_zeros(()).expand(gradient.shape)  # nobody else needs it

            return hook

        with refuse_hidden(self._parameters, graph), without_hooks(leaves):
            handles = [leaf.register_hook(show(leaf)) for leaf in parameters]
            try:
                gradients = torch.autograd.grad(
                    losses.roots(), leaves, losses.starts(), allow_unused=True
                )
            finally:
                for handle in handles:
                    handle.remove()
        gradient_of = dict(zip(leaves, gradients, strict=True))
        return {leaf: g for leaf in outside if (g := gradient_of[leaf]) is not None}

    def discard(self) -> None:
        """Forget what was accumulated."""
        self._rows, self._outside = {}, {}

    def _differentiate(self, losses: Losses) -> Iterator[tuple[Tensor, int, Tensor]]:
        graph = Graph(losses.roots())
        outside = [leaf for leaf in graph.leaves() if leaf not in self._parameters]
        refuse_changed(self._model, self._parameters, graph)
        if len(losses.present) > 1:
            graph.refuse_compiled_too_early()
        self._refuse_reentrant(graph)
        retain = _retain_graph(losses, graph)
        leaves = [p for p in self._parameters if p.requires_grad]  # some may be frozen by now
        gradients_of = _with_hidden_gradients if may_hide(graph) else _plain_gradients
        gradients_of = _through_grad if graph.is_reentrant else gradients_of
        with without_hooks([*leaves, *outside]):
            for position, task in enumerate(losses.present):
                one = torch.zeros(len(losses.present))
                one[position] = 1.0
                roots, starts = losses.roots(), losses.starts(one)
                if losses.index is None:
                    roots, starts = roots[position : position + 1], starts[position : position + 1]
                every = [*leaves, *outside]
                gradients = gradients_of(roots, starts, every, retain[position])
                for leaf, gradient in zip(every, gradients, strict=True):
                    if gradient is not None:
                        yield leaf, task, gradient

    def _refuse_reentrant(self, graph: Graph) -> None:
        if graph.is_reentrant and self._is_shared:
            raise ValueError(
                "losses: their graph has reentrant checkpoints, which several processes cannot "
                "separate by task; use torch.utils.checkpoint with use_reentrant=False."
            )

    def _keep(self, leaf: Tensor, task: int, gradient: Tensor) -> None:
        gradient = gradient.to_dense() if gradient.is_sparse else gradient
        store = self._rows.setdefault(task, {})
        if leaf not in self._parameters:
            store = self._outside
        else:
            device = torch.device("cpu") if self._offload else gradient.device
            gradient = gradient.to(device, self._storage_dtype or gradient.dtype)
        store[leaf] = store[leaf] + gradient if leaf in store else gradient

    def _fold(self, rows: Sequence[dict[Tensor, Tensor]], weigh: Weigh) -> None:
        grams = []
        for members in self._members:
            stacks = ((parameter, _stack(rows, parameter)) for parameter in members)
            blocks = [gram(self._measured(p, stacked)) for p, stacked in stacks if len(stacked)]
            empty = members[0].new_zeros(len(rows), len(rows), dtype=torch.float64)
            grams.append(torch.stack(blocks).sum(0) if blocks else empty)
        weights = weigh(range(len(grams)), torch.stack(grams))
        for component_weights, members in zip(weights, self._members, strict=True):
            for parameter in members:
                stacked = _stack(rows, parameter)
                for row in rows:
                    row.pop(parameter, None)  # freed as the update takes its place
                if len(stacked):  # unused by every task: .grad stays as it is
                    add_to_grad([parameter], [combine(component_weights, stacked)])

    def _measured(self, parameter: nn.Parameter, stacked: Tensor) -> Tensor:
        return stacked if self._metric is None else self._metric(parameter, stacked)


def _plain_gradients(
    roots: Sequence[Tensor], starts: Sequence[Tensor], leaves: Sequence[Tensor], retain: bool
) -> Sequence[Tensor | None]:
    return torch.autograd.grad(roots, leaves, starts, retain_graph=retain, allow_unused=True)


def _with_hidden_gradients(
    roots: Sequence[Tensor], starts: Sequence[Tensor], leaves: Sequence[Tensor], retain: bool
) -> Sequence[Tensor | None]:
    """Gradients, and what functions of the graph wrote into `.grad` meanwhile."""
    with set_aside(leaves):
        gradients = _plain_gradients(roots, starts, leaves, retain)
        written = [leaf.grad for leaf in leaves]
    return [
        one + other if one is not None and other is not None else one if other is None else other
        for one, other in zip(gradients, written, strict=True)
    ]


def _through_grad(
    roots: Sequence[Tensor], starts: Sequence[Tensor], leaves: Sequence[Tensor], retain: bool
) -> Sequence[Tensor | None]:
    """Gradients by way of `.grad`, for graphs that refuse to be given inputs."""
    with set_aside(leaves):
        torch.autograd.backward(roots, starts, retain_graph=retain)
        return [leaf.grad for leaf in leaves]


def _stack(rows: Sequence[Mapping[Tensor, Tensor]], parameter: nn.Parameter) -> Tensor:
    """Task gradients of a parameter on its device, `[T, P]`; empty if no task reached it."""
    gradients = [row.get(parameter) for row in rows]
    first = next((gradient for gradient in gradients if gradient is not None), None)
    if first is None:
        return parameter.new_empty(0, parameter.numel())
    stacked = first.new_zeros(len(rows), parameter.numel(), device=parameter.device)
    for row, gradient in zip(stacked, gradients, strict=True):
        if gradient is not None:
            row.copy_(gradient.reshape(-1), non_blocking=True)
    return stacked


def _retain_graph(losses: Losses, graph: Graph) -> list[bool]:
    """Whether the graph is still needed after each task's backward.

    Rows of one batch share their graph. Losses from separate forward passes do not, and each graph
    is freed as soon as its task is done.
    """
    num_tasks = len(losses.present)
    if losses.index is not None:
        return [position < num_tasks - 1 for position in range(num_tasks)]
    later = [0] * num_tasks  # tasks whose graph shares a node with this one's
    inner = zip(graph.names, graph.reached_by(), strict=True)
    for reached in {mask for name, mask in inner if name != LEAF}:
        tasks = [task for task in range(num_tasks) if reached >> task & 1]
        for task in tasks:
            later[task] = max(later[task], tasks[-1])
    return [last > task for task, last in enumerate(later)]
