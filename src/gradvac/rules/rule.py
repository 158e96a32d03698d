"""What every rule is: a function from a Gram matrix to weights, with state kept by name."""

# K components, T tasks

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from gradvac import gram as geometry
from gradvac.utils.devices import index_on


@dataclass(frozen=True, eq=False)  # tensors have no single truth value: equal means identical
class Weighing:
    """A rule's answer for some components: the update is sum_i weights[k, i] g_i.

    Attributes:
        weights: `[K, T]`.
        target: `[K, T, T]`, NaN for rules without targets.
        active: bool `[K, T, T]`: the pair was below its target and was altered.
    """

    weights: Tensor
    target: Tensor
    active: Tensor


class Rule(ABC):
    """Decides how the task gradients of each component are combined.

    Your own rule implements `weigh_finite`; `answer` turns weights into its result. It may read
    `self.tasks` and `self.components` (names), `self.present` (positions of the tasks
    of this batch, in the order of the Gram rows; `self.index` as a tensor) and `self.losses`
    (theirs, `[T]`). Nothing in a rule may wait for the device.

    A step is `start_step`, then `weigh` for every component (one at a time or many at once, in any
    order: the result must be the same), then `commit`. A rule updates its state only in `commit`,
    and only where `self.finite` holds, so that a step which a `GradScaler` skips leaves no trace;
    it stores its state by name in `state_dict` and `load_state_dict`.

    Attributes:
        name: What configs and `Aligner(rule=...)` call it; others are called "module:Class" or
            "file.py:Class".
        does: What it does, to complete a sentence that begins with its name.
        task_options: Arguments that name tasks; in a config they may name resource levels too.
        parts_per_task: Into how many parts each task's rows are divided, dealt in turn: Gram
            matrices then have as many neighbouring rows for each present task, 0 for a part without
            rows. Weights remain those of tasks. Needs losses per row.

    Examples:
        >>> from gradvac import Rule, gram
        >>> class EqualNorms(Rule):
        ...     def weigh_finite(self, components, gram_matrices):
        ...         return self.answer(gram_matrices, gram.reciprocal(gram.norms(gram_matrices)))
    """

    name: ClassVar[str] = ""
    does: ClassVar[str] = ""
    task_options: ClassVar[tuple[str, ...]] = ()
    parts_per_task: int = 1

    tasks: tuple[str, ...] = ()
    components: tuple[str, ...] = ()

    def bind(self, tasks: Sequence[str], components: Sequence[str]) -> None:
        """Name the tasks and components; called once, by the `Aligner`."""
        if self.tasks:
            raise ValueError(
                f"rule: this {type(self).__name__} already serves another Aligner; "
                "give every Aligner a rule of its own."
            )
        self.tasks, self.components = tuple(tasks), tuple(components)

    def start_step(self, present: Sequence[int], losses: Tensor) -> None:
        """Open a step.

        Args:
            present: Positions in `tasks` of the tasks of this batch, in the order of the Gram rows.
            losses: Their detached losses, `[T]`, on the device of the gradients.
        """
        self.present, self.losses = tuple(present), losses
        self.index = index_on(self.present, losses.device)
        self.finite = torch.ones((), dtype=torch.bool, device=losses.device)

    def weigh(self, components: Sequence[int], gram: Tensor) -> Weighing:
        """Weights for the given components (positions), from their Gram matrices `[K, T, T]`."""
        gram = gram.to(geometry.working_dtype(gram.device))
        finite = geometry.is_finite(gram)  # [K]
        are_finite = finite.all()
        self.finite = self.finite & are_finite
        if len(self.present) == 1:
            return self.weigh_alone(components, gram)
        if gram.device.type == "cpu" and are_finite:  # elsewhere that would be waiting
            return self.weigh_finite(components, gram)
        clean = torch.where(finite[:, None, None], gram, 0.0)
        weighing = self.weigh_finite(components, clean)
        # Weights of 1 let non-finite values reach .grad, where a GradScaler looks for them.
        weights = torch.where(finite[:, None], weighing.weights, 1.0)
        return Weighing(weights, weighing.target, weighing.active & finite[:, None, None])

    def commit(self) -> None:  # noqa: B027 (most rules have no state)
        """Close the step: keep what it taught, unless a Gram matrix was not finite."""

    def state_dict(self) -> dict[str, Any]:
        """State with the names it belongs to."""
        return {"tasks": list(self.tasks), "components": list(self.components)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: B027
        """Restore what matches by name; the rest keeps its initial value."""

    @abstractmethod
    def weigh_finite(self, components: Sequence[int], gram: Tensor) -> Weighing:
        """Weights from finite Gram matrices of at least two tasks."""

    def weigh_alone(self, components: Sequence[int], gram: Tensor) -> Weighing:  # noqa: ARG002
        """Weights of a task that is the only one present: its gradient as it is."""
        return self.answer(gram)

    def take(self, values: Tensor, components: Sequence[int]) -> Tensor:
        """The rows of `values` `[K, ...]` for some components, without waiting for the device."""
        return values[index_on(components, values.device)]

    def answer(self, gram: Tensor, weights: Tensor | None = None) -> Weighing:
        """An answer without targets; weights of 1 unless given."""
        num = gram.shape[-1] // self.parts_per_task
        weights = gram.new_ones(len(gram), num) if weights is None else weights
        nothing = gram.new_full((len(gram), num, num), torch.nan)
        return Weighing(weights, nothing, torch.zeros_like(nothing, dtype=torch.bool))


def matching(names: Sequence[str], saved: Sequence[str]) -> tuple[Tensor, Tensor]:
    """Positions of the names both lists have: in `names`, and in `saved`."""
    where = {name: position for position, name in enumerate(saved)}
    here = [position for position, name in enumerate(names) if name in where]
    there = [where[names[position]] for position in here]
    return torch.tensor(here, dtype=torch.int64), torch.tensor(there, dtype=torch.int64)


def check_names(argument: str, names: Sequence[str], tasks: Sequence[str]) -> None:
    """Raise a ValueError that names the argument if a name is not a task."""
    unknown = [name for name in names if name not in tasks]
    if unknown:
        raise ValueError(f"{argument}: unknown task {unknown[0]!r}; the tasks are {list(tasks)}.")
