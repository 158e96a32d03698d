"""TorchJD's weightings in gradvac's engines (optional dependency `torchjd`)."""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gradvac.rules._rule import Rule, Weighing, matching

_MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))
_SAVED_TYPES = (Tensor, bool, int, float, str, type(None))


class TorchJD(Rule):
    """Run any Gramian weighting of TorchJD, such as `UPGradWeighting()`, per component.

    Every component gets a copy of its own, since some weightings keep state. Tensors and numbers
    among a weighting's attributes are saved with the rule's state; they are restored only if the
    list of tasks is the same, because TorchJD does not name its tasks.

    Args:
        weighting: A callable from a Gram matrix `[T, T]` to weights `[T]`.

    Example:
        >>> import torchjd.aggregation
        >>> from gradvac import TorchJD
        >>> rule = TorchJD(torchjd.aggregation.UPGradWeighting())
    """

    def __init__(self, weighting: Callable[[Tensor], Tensor]) -> None:
        if not callable(weighting) or hasattr(weighting, "gramian_weighting"):
            raise ValueError(
                "weighting: needs a Gramian weighting such as torchjd.aggregation."
                f"UPGradWeighting(), got {weighting!r}; an Aggregator has one as its "
                "`gramian_weighting`."
            )
        self.weighting = weighting

    def bind(self, tasks: Sequence[str], components: Sequence[str]) -> None:
        super().bind(tasks, components)
        self._weightings = [copy.deepcopy(self.weighting) for _ in components]

    def begin(self, present: Sequence[int], losses: Tensor) -> None:
        super().begin(present, losses)
        self._before = [copy.copy(_attributes(weighting)) for weighting in self._weightings]

    def _weigh(self, components: Sequence[int], gram: Tensor) -> Weighing:
        rows = [self._weightings[k](one) for k, one in zip(components, gram, strict=True)]
        return self._plain(gram, torch.stack(rows).to(gram))

    def commit(self) -> None:
        # These weightings run on the host anyway, so this is no further synchronisation.
        if not self._finite:
            for weighting, before in zip(self._weightings, self._before, strict=True):
                vars(weighting).update(before)

    def state_dict(self) -> dict[str, Any]:
        saved = [_attributes(weighting) for weighting in self._weightings]
        return super().state_dict() | {"weightings": copy.deepcopy(saved)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if list(state["tasks"]) != list(self.tasks):
            return
        for here, there in zip(*matching(self.components, state["components"]), strict=True):
            vars(self._weightings[here]).update(copy.deepcopy(state["weightings"][there]))

    def __repr__(self) -> str:
        return f"TorchJD({self.weighting!r})"


def _attributes(weighting: object) -> dict[str, Any]:
    """The attributes that are plain state: tensors, numbers and strings."""
    return {
        name: value
        for name, value in getattr(weighting, "__dict__", {}).items()
        if name not in _MODULE_ATTRIBUTES and isinstance(value, _SAVED_TYPES)
    }
