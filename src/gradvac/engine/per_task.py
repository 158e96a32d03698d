"""The per_task engine: one backward per task, task gradients stored as [T, P].

Slow and general: it works for every model, and every faster path is compared with it.
"""

# T tasks

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gradvac.engine.graph import LEAF, Graph, check_parameters, is_python_function, is_selective
from gradvac.engine.joint_gradient import GradientSketches, JointGradient, is_due
from gradvac.engine.losses import Losses
from gradvac.engine.passes import (
    check_hidden_backwards,
    set_aside,
    show_gradients,
    without_hooks,
)
from gradvac.utils.hints import some

Receive = Callable[[nn.Parameter, Mapping[int, Tensor]], None]
"""Takes a parameter and its gradients by task, `task -> gradient`."""
Expect = Callable[[Iterable[nn.Parameter]], None]
"""Takes the parameters whose gradients may come, before any of them does."""


class PerTask:
    """One backward per task.

    Args:
        model: The model.
        is_shared: Other processes train this model too, which a backward through `.grad` would
            call upon at every task.
        check: Verify on the first batches and now and then that the graph can run several times,
            not only where there is a new kind of node in it.
    """

    name = "per_task"

    def __init__(self, model: nn.Module, *, is_shared: bool = False, check: bool = True) -> None:
        self._model, self._is_shared = model, is_shared
        self._parameters = {p: name for name, p in model.named_parameters() if p.requires_grad}
        self._check, self._steps = check, 0
        self._seen: set[str] = set()  # kinds of nodes

    def task_gradients(self, losses: Losses, receive: Receive) -> dict[Tensor, Tensor]:
        """Show `receive` every parameter's gradient of a task, as soon as the task is done.

        Returns:
            The joint gradients of leaves that are not the model's.
        """
        outside: dict[Tensor, Tensor] = {}
        for leaf, task, gradient in self._differentiate(losses):
            if leaf in self._parameters:
                receive(leaf, {task: gradient})
            else:
                outside[leaf] = outside[leaf] + gradient if leaf in outside else gradient
        return outside

    def stream(self, losses: Losses, receive: Receive, expect: Expect) -> dict[Tensor, Tensor]:
        """The same, each parameter with all its tasks; `expect` is called before they come."""
        gradients: dict[nn.Parameter, dict[int, Tensor]] = {}

        def collect(parameter: nn.Parameter, by_task: Mapping[int, Tensor]) -> None:
            gradients.setdefault(parameter, {}).update(by_task)

        outside = self.task_gradients(losses, collect)
        expect(gradients)
        for parameter, by_task in gradients.items():
            receive(parameter, by_task)
        return outside

    def stream_one_task(
        self, losses: Losses, receive: Receive, expect: Expect
    ) -> dict[Tensor, Tensor]:
        """An ordinary backward, whose gradients are those of the only task: any model."""
        graph, outside = self._read(losses)
        reached = set(graph.leaves())
        parameters = [p for p in self._parameters if p in reached and p.requires_grad]
        expect(parameters)
        joint: dict[Tensor, Tensor] = {}

        def show(leaf: Any, gradient: Tensor) -> None:
            if leaf in self._parameters:
                receive(leaf, {losses.present[0]: gradient})
            else:
                joint[leaf] = gradient

        with check_hidden_backwards(self._parameters, graph):
            show_gradients(graph, losses.starts(), [*parameters, *outside], show)
        return joint

    def _read(self, losses: Losses) -> tuple[Graph, list[Tensor]]:
        """The graph of some losses, and the leaves of it that are not the model's, nor frozen."""
        graph = Graph(losses.roots)
        check_parameters(self._model, self._parameters, graph)
        if graph.is_reentrant and self._is_shared:
            raise ValueError(
                "losses: their graph has reentrant checkpoints, which several processes cannot "
                "separate by task; use torch.utils.checkpoint with use_reentrant=False."
            )
        outside = [leaf for leaf in graph.leaves() if leaf not in self._parameters]
        return graph, [leaf for leaf in outside if leaf.requires_grad]

    def _differentiate(self, losses: Losses) -> Iterator[tuple[Any, int, Tensor]]:
        graph, outside = self._read(losses)
        if len(losses.present) > 1:
            graph.check_compiled()
        retain = _retain_graph(losses, graph)
        every = [p for p in self._parameters if p.requires_grad] + outside  # some may be frozen
        joint, sums, is_ours = losses.joint, GradientSketches(), False
        if any(retain) and joint is None and self._is_to_verify(graph):
            if any(map(is_selective, graph.nodes)):
                raise ValueError(
                    "losses: a selective activation checkpoint (context_fn=...) lets a backward "
                    "run only once; checkpoint without it, or give every task the loss of a "
                    "forward of its own, as a mapping task -> loss."
                )
            joint, is_ours = JointGradient(graph, losses.starts(), every), True
        for position, task in enumerate(losses.present):
            gradients = _gradients(
                graph, losses, position, every, retain=retain[position] or joint is not None
            )
            for leaf, gradient in gradients:
                if joint is not None:
                    sums.add(leaf, gradient)
                yield leaf, task, gradient.to_dense() if gradient.is_sparse else gradient
        if joint is not None:
            wrong = joint.differing(sums, is_strict=True)
            # It need not be linear (hooks that clip), as long as it is the same when it runs again.
            if wrong and not joint.is_same_again(graph):
                raise ValueError(self._runs_once(graph, wrong))
            joint.run(graph, -1.0 if is_ours else 0.0, retain=False)  # lets go of the graph

    def _is_to_verify(self, graph: Graph) -> bool:
        """On the first batches, now and then, and where there is a new kind of node."""
        self._steps += 1
        kinds = set(graph.names) - self._seen
        self._seen |= kinds
        return bool(kinds) or (self._check and is_due(self._steps))

    def _runs_once(self, graph: Graph, wrong: Sequence[Any]) -> str:
        names = [self._parameters[leaf] for leaf in wrong if leaf in self._parameters]
        pairs = zip(graph.nodes, graph.names, strict=True)
        functions = sorted({name for node, name in pairs if is_python_function(node)})
        return (
            "losses: their backward is not the same when it runs again, and separating tasks takes "
            f"several runs, so that the gradients of {some(names)} would be wrong. A hook or an "
            "autograd.Function changes what it saved, or keeps count of its calls (functions here: "
            f"{some(functions)}); let its backward leave that alone, or give every task the loss "
            "of a forward of its own, as a mapping task -> loss."
        )


def _gradients(
    graph: Graph, losses: Losses, position: int, leaves: Sequence[Tensor], *, retain: bool
) -> list[tuple[Tensor, Tensor]]:
    """Leaves and their gradients of one task, with what functions wrote into `.grad` meanwhile."""
    one = torch.zeros(len(losses.present))
    one[position] = 1.0
    roots, starts = losses.roots, losses.starts(one)
    if losses.index is None:
        roots, starts = roots[position : position + 1], starts[position : position + 1]
    returned: Sequence[Tensor | None] = [None] * len(leaves)
    with without_hooks(leaves), set_aside(leaves):
        if graph.is_reentrant:  # such a graph refuses to be given inputs
            torch.autograd.backward(roots, starts, retain_graph=retain)
        else:
            returned = torch.autograd.grad(
                roots, leaves, starts, retain_graph=retain, allow_unused=True
            )
        written = [leaf.grad for leaf in leaves]
    found = []
    for leaf, *parts in zip(leaves, returned, written, strict=True):
        given = [part for part in parts if part is not None]
        if given:
            found.append((leaf, given[0] if len(given) == 1 else given[0] + given[1]))
    return found


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
