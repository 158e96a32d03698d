"""What every rule is: a function from a Gram matrix to weights, with state kept by name."""

# K components, T tasks

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradvac import gram as geometry
from gradvac.indices import index_on


@dataclass(frozen=True)
class Weighing:
    """A rule's answer for some components: the update is sum_i weights[k, i] g_i."""

    weights: Tensor  # [K, T]
    target: Tensor  # [K, T, T], NaN for rules without targets
    active: Tensor  # [K, T, T] bool: the pair was below its target and was altered


class Rule(ABC):
    """Decides how the task gradients of each component are combined.

    A step is `begin`, then `weigh` for every component (one at a time or many at once, in any
    order: the result is the same), then `commit`. State moves only in `commit`, and only if every
    Gram matrix of the step was finite, so that a step which a `GradScaler` skips leaves no trace.
    Nothing here waits for the device.
    """

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

    def begin(self, present: Sequence[int], losses: Tensor) -> None:
        """Open a step.

        Args:
            present: Positions in `tasks` of the tasks of this batch, in the order of the Gram rows.
            losses: Their detached losses, `[T]`, on the device of the gradients.
        """
        self._present, self._losses = tuple(present), losses
        self._index = index_on(self._present, losses.device)
        self._finite = torch.ones((), dtype=torch.bool, device=losses.device)

    def weigh(self, components: Sequence[int], gram: Tensor) -> Weighing:
        """Weights for the given components (positions), from their Gram matrices `[K, T, T]`."""
        gram = gram.to(geometry.working_dtype(gram.device))
        finite = geometry.is_finite(gram)  # [K]
        self._finite = self._finite & finite.all()
        if len(self._present) == 1:
            return self._weigh_alone(gram)
        clean = torch.where(finite[:, None, None], gram, 0.0)
        weighing = self._weigh(components, clean)
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
    def _weigh(self, components: Sequence[int], gram: Tensor) -> Weighing:
        """Weights from finite Gram matrices of at least two tasks."""

    def _weigh_alone(self, gram: Tensor) -> Weighing:
        """Weights of a task that is the only one present: its plain gradient."""
        return self._plain(gram)

    def _plain(self, gram: Tensor, weights: Tensor | None = None) -> Weighing:
        """An answer without targets; weights of 1 unless given."""
        weights = gram.new_ones(gram.shape[:-1]) if weights is None else weights
        nothing = torch.full_like(gram, torch.nan)
        return Weighing(weights, nothing, torch.zeros_like(gram, dtype=torch.bool))


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
