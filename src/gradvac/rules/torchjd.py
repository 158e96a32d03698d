"""TorchJD's weightings in gradvac's engines (optional dependency `torchjd`)."""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gradvac.rules.rule import Rule, Weighing, matching
from gradvac.utils.devices import index_on
from gradvac.utils.hints import install_line, nearest

_MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))
_SAVED_TYPES = (Tensor, bool, int, float, str, torch.dtype, type(None))
# TorchJD's classes that need the gradients themselves. Weightings of matrices without state (mean,
# sum, constant, random) look at the number of tasks alone.
_NOT_GRAMIAN = (frozenset({"Aggregator"}), frozenset({"_MatrixWeighting", "Stateful"}))


class TorchJD(Rule):
    """Runs any Gramian weighting of TorchJD, such as `UPGradWeighting()`, per component.

    Every component gets a copy of its own, since some weightings keep state. A weighting's buffers
    and plain attributes are saved with the rule's state; they are restored only if the tasks are
    the same, because TorchJD does not name its tasks.

    Args:
        weighting: A callable from a Gram matrix `[T, T]` to weights `[T]`; or the name of one in
            `torchjd.aggregation`, such as "UPGrad" for `UPGradWeighting`.
        options: Arguments of a weighting that is given by name.

    Examples:
        >>> from gradvac import TorchJD
        >>> rule = TorchJD("UPGrad")
    """

    name = "torchjd"
    does = "asks a weighting of TorchJD"

    def __init__(
        self,
        weighting: Callable[[Tensor], Tensor] | str,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        if isinstance(weighting, str):
            weighting = _named(weighting, options or {})
        elif options:
            raise ValueError(
                f"options: {dict(options)} would be ignored; give them to {weighting!r} itself."
            )
        kinds = {kind.__name__ for kind in type(weighting).__mro__}
        is_other = isinstance(weighting, type) or any(names <= kinds for names in _NOT_GRAMIAN)
        if not callable(weighting) or is_other:
            raise ValueError(
                "weighting: needs a Gramian weighting such as torchjd.aggregation."
                f"UPGradWeighting(), got {weighting!r}; most of TorchJD's aggregators have one as "
                "their `gramian_weighting`."
            )
        self.weighting = weighting

    def bind(self, tasks: Sequence[str], components: Sequence[str]) -> None:
        super().bind(tasks, components)
        self._weightings = [copy.deepcopy(self.weighting) for _ in components]

    def start_step(self, present: Sequence[int], losses: Tensor) -> None:
        super().start_step(present, losses)
        self._before = [_read_state(weighting) for weighting in self._weightings]

    def weigh_finite(self, components: Sequence[int], gram: Tensor) -> Weighing:
        # Rows come in another order every step, but a weighting with state knows rows alone.
        by_name = sorted(range(len(self.present)), key=lambda i: self.tasks[self.present[i]])
        index = index_on(by_name, gram.device)
        sorted_gram = gram[:, index][:, :, index]
        rows = [self._weightings[k](one) for k, one in zip(components, sorted_gram, strict=True)]
        weights = torch.empty_like(gram[..., 0])
        weights[:, index] = torch.stack(rows).to(gram)
        return self.answer(gram, weights)

    def commit(self) -> None:
        # These weightings run on the host anyway, so this is no further synchronisation.
        if not self.finite:
            for weighting, before in zip(self._weightings, self._before, strict=True):
                _write_state(weighting, before)

    def state_dict(self) -> dict[str, Any]:
        saved = [_read_state(weighting) for weighting in self._weightings]
        return super().state_dict() | {"weightings": saved}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if sorted(state["tasks"]) != sorted(self.tasks):
            return
        for here, there in zip(*matching(self.components, state["components"]), strict=True):
            _write_state(self._weightings[here], copy.deepcopy(state["weightings"][there]))

    def __repr__(self) -> str:
        return f"TorchJD({self.weighting!r})"


def _named(name: str, options: Mapping[str, Any]) -> Callable[[Tensor], Tensor]:
    """A weighting of TorchJD by its name, with or without its ending."""
    try:
        import torchjd.aggregation as torchjd
    except ImportError as error:
        raise ValueError(
            f"weighting: {name!r} needs TorchJD ({error}); {install_line('torchjd')}."
        ) from None
    ending = "Weighting"
    class_names = [one for one in torchjd.__all__ if one.endswith(ending) and one != ending]
    by_name = {one.removesuffix(ending).lower(): one for one in class_names}
    key = name.removesuffix(ending).lower()
    if key not in by_name:
        names = sorted(one.removesuffix(ending) for one in class_names)
        raise ValueError(f"weighting: TorchJD has no {name!r}; {nearest(name, names)}")
    try:
        weighting: Callable[[Tensor], Tensor] = getattr(torchjd, by_name[key])(**options)
    except (TypeError, ValueError, ImportError) as error:
        raise ValueError(f"weighting: {by_name[key]} could not be made: {error}") from error
    return weighting


def _parts(weighting: object) -> dict[str, Any]:
    """A weighting and those it wraps, by name."""
    return dict(weighting.named_modules()) if isinstance(weighting, nn.Module) else {"": weighting}


def _read_state(weighting: object) -> dict[str, dict[str, Any]]:
    """Copies of what is plain state: buffers, tensors, numbers, strings and tuples of them."""
    state = {}
    for part, owner in _parts(weighting).items():
        attributes = getattr(owner, "__dict__", {})
        state[part] = {
            name: copy.deepcopy(value)
            for name, value in (attributes | attributes.get("_buffers", {})).items()
            if name not in _MODULE_ATTRIBUTES and _is_plain(value)
        }
    return state


def _write_state(weighting: object, state: Mapping[str, Mapping[str, Any]]) -> None:
    for part, owner in _parts(weighting).items():
        for name, value in state.get(part, {}).items():
            setattr(owner, name, value)


def _is_plain(value: object) -> bool:
    if isinstance(value, tuple):
        return all(_is_plain(one) for one in value)
    return isinstance(value, _SAVED_TYPES)
