"""How far a loaded state matches the aligner that loads it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gradvac.hints import some


@dataclass(frozen=True)
class Restored:
    """What `Aligner.load_state_dict` could not match: names on one side only."""

    new_tasks: tuple[str, ...]
    dropped_tasks: tuple[str, ...]
    new_components: tuple[str, ...]
    dropped_components: tuple[str, ...]

    @property
    def complete(self) -> bool:
        """Whether everything matched."""
        return not any(
            (self.new_tasks, self.dropped_tasks, self.new_components, self.dropped_components)
        )

    def __str__(self) -> str:
        said = {
            "tasks that start afresh": self.new_tasks,
            "saved tasks not used": self.dropped_tasks,
            "components that start afresh": self.new_components,
            "saved components not used": self.dropped_components,
        }
        lists = [f"{what}: {', '.join(names)}" for what, names in said.items() if names]
        return "; ".join(lists) or "everything matched"


def differences(
    here: Sequence[str], there: Sequence[str]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names that only the first has, and names that only the second has."""
    new = tuple(name for name in here if name not in there)
    return new, tuple(name for name in there if name not in here)


def require_state(state: Mapping[str, Any], *, rule: str, components: Sequence[str]) -> None:
    """Refuse what is not the state of an aligner with this rule and some of these components.

    Raises:
        ValueError: Says what it is instead.
    """
    if not isinstance(state, Mapping):
        raise ValueError(f"state: must be what state_dict() gave, got {state!r}.")
    saved = state.get("rule")
    if saved is None or not {"tasks", "components"} <= state.keys():
        raise ValueError(f"state: is not the state of an Aligner; it has {some(list(state))}.")
    if saved != rule:
        raise ValueError(f"state: was saved by rule {saved}, but this aligner has {rule}.")
    if not set(state["components"]) & set(components):
        raise ValueError(
            f"state: was saved with other components ({some(state['components'])}; here "
            f"{some(components)}); use the granularity it was saved with."
        )
