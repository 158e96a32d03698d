"""Gradients by task, to look at: what the aligner's engines find, without a rule and an update."""

# T tasks, K components

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from gradvac.engine import (
    ENGINES,
    Components,
    Granularity,
    LocalEngine,
    TasksOfRows,
    kept_gradients,
    read_losses,
    split,
)
from gradvac.engine.models import allow_second_passes, unwrap
from gradvac.gram import working_dtype
from gradvac.tasks import read_names
from gradvac.utils.devices import index_on


class GradientsByTask:
    """Task gradients of a model, or their Gram matrices alone; `.grad` is left as it is.

    For influence, data selection and logging: one backward for all tasks where rows are apart
    (a task may be a single row), with the engines of `Aligner`. Keep the object for further
    batches: what it found out about the model's graph need not be found again. The graph of the
    losses is used up, as by `backward`. In a job of several processes, each sees its own rows.

    Args:
        model: The model; its trainable parameters are differentiated.
        tasks: Task names; results have one row for each, zero where a batch has none of its rows.
        granularity: Which parameters share a Gram matrix, as in `Aligner`.
        engine: As in `Aligner`.

    Attributes:
        components: Component name -> parameter names, in the order of Gram matrices.

    Examples:
        >>> import torch
        >>> from gradvac import GradientsByTask
        >>> model = torch.nn.Linear(3, 1)
        >>> by_task = GradientsByTask(model, tasks=["fr", "hi"])
        >>> losses = model(torch.randn(4, 3)).squeeze(1).square()
        >>> gradients = by_task(losses, ["fr", "fr", "hi", "hi"])
        >>> gradients["weight"].shape
        torch.Size([2, 1, 3])
        >>> losses = model(torch.randn(4, 3)).squeeze(1).square()
        >>> by_task.gram(losses, ["fr", "fr", "hi", "hi"]).shape  # never holds all gradients
        torch.Size([1, 2, 2])
    """

    def __init__(
        self,
        model: nn.Module,
        tasks: Sequence[str],
        granularity: Granularity = "all_layer",
        engine: str = "auto",
    ) -> None:
        if engine not in ENGINES:
            raise ValueError(f"engine: must be one of {ENGINES}, got {engine!r}.")
        self.tasks = read_names(tasks)
        model, _ = unwrap(model, None)
        self.components: Components = split(model, granularity)
        self._names = {p: name for name, p in model.named_parameters()}
        self._engine = LocalEngine(engine, model, self.components, self.tasks)
        allow_second_passes()

    @property
    def engine(self) -> str:
        """The engine that ran last, or will run first: "one_backward" or "per_task"."""
        return self._engine.ran.name

    def __call__(
        self, losses: Tensor | Mapping[str, Tensor], tasks_of_rows: TasksOfRows | None = None
    ) -> dict[str, Tensor]:
        """Task gradients of every parameter that the losses reach, `[T, *shape]`, by its name.

        Args:
            losses: As in `Aligner.backward`: one entry per row, or a mapping task -> loss.
            tasks_of_rows: The task of every entry, by name or position.
        """
        found: dict[str, Tensor] = {}

        def receive(parameter: nn.Parameter, by_task: Mapping[int, Tensor]) -> None:
            name = self._names[parameter]
            if name not in found:
                found[name] = parameter.new_zeros(len(self.tasks), *parameter.shape)
            for task, gradient in by_task.items():
                found[name][task] = gradient

        given = read_losses(losses, tasks_of_rows, self.tasks)
        with kept_gradients(given.roots, self._names):
            self._engine.task_gradients(given, receive)
        return {name: found[name] for name in self._names.values() if name in found}

    def gram(
        self, losses: Tensor | Mapping[str, Tensor], tasks_of_rows: TasksOfRows | None = None
    ) -> Tensor:
        """Inner products of task gradients, `[K, T, T]`, one component in memory at a time.

        Squared norms are on the diagonal; `gradvac.gram` has cosines and norms of them.

        Args:
            losses: As above.
            tasks_of_rows: As above.
        """
        given = read_losses(losses, tasks_of_rows, self.tasks)
        shape = (len(self.components), len(self.tasks), len(self.tasks))
        grams = torch.zeros(shape, dtype=working_dtype(given.device), device=given.device)
        where = index_on(given.present, given.device)

        def look(components: Sequence[int], gram: Tensor) -> Tensor:
            at = index_on(components, given.device)
            grams[at[:, None, None], where[:, None], where] = gram.to(grams)
            return torch.zeros_like(gram[..., 0])

        with kept_gradients(given.roots, self._names):
            self._engine.step(given, given.present, lambda: look)
        return grams
