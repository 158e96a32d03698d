"""What rules that stand around another one have in common."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from gradvac.rules._rule import Rule, Weighing


class Around(Rule):
    """A rule that changes what another one sees or says.

    Args:
        rule: The other rule, which keeps its state.
    """

    def __init__(self, rule: Rule) -> None:
        if not isinstance(rule, Rule):
            raise ValueError(f"rule: must be a Rule such as GradVac(), got {rule!r}.")
        self.rule = rule

    @property
    def vaccinated(self) -> Sequence[str] | None:
        """The tasks whose gradients the rule alters; None: all."""
        vaccinated: Sequence[str] | None = getattr(self.rule, "vaccinated", None)
        return vaccinated

    @property
    def innermost(self) -> Rule:
        """The rule that stands around no other."""
        return self.rule.innermost if isinstance(self.rule, Around) else self.rule

    def bind(self, tasks: Sequence[str], components: Sequence[str]) -> None:
        super().bind(tasks, components)
        self.rule.bind(self.tasks_within(), components)

    def tasks_within(self) -> Sequence[str]:
        """The tasks that the other rule knows."""
        return self.tasks

    def weigh_finite(self, components: Sequence[int], gram: Tensor) -> Weighing:
        return self.weigh(components, gram)

    def commit(self) -> None:
        self.rule.commit()

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"around": self.rule.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.rule.load_state_dict(state["around"])
