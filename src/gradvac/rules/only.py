"""A rule that acts in some components or steps only."""

# K components, T tasks

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor

from gradvac.rules.rule import Rule, Weighing
from gradvac.utils.hints import some


class Only(Rule):
    """Another rule in some components or steps only, and the plain sum elsewhere.

    The rule sees every component and step, so its targets are up to date when it starts to act, but
    its weights count only where it acts.

    Args:
        rule: The other rule, which keeps its state.
        components: Patterns of component names, such as "encoder*"; None: all.
        from_step: The first step at which it acts; this rule counts steps from 0.
        until_step: The first step at which it no longer acts; None: it acts to the end.

    Examples:
        >>> from gradvac import GradVac, Only
        >>> rule = Only(GradVac(), components=["encoder*"], until_step=1000)
    """

    def __init__(
        self,
        rule: Rule,
        components: Sequence[str] | None = None,
        from_step: int = 0,
        until_step: int | None = None,
    ) -> None:
        if not isinstance(rule, Rule):
            raise ValueError(f"rule: must be a Rule such as GradVac(), got {rule!r}.")
        if isinstance(components, str):
            raise ValueError(f"components: must be a list of patterns, got {components!r}.")
        if from_step < 0 or (until_step is not None and until_step <= from_step):
            raise ValueError(
                f"until_step: the rule would never act from step {from_step} until {until_step}; "
                "steps are counted from 0."
            )
        self.rule, self.from_step, self.until_step = rule, from_step, until_step
        self.parts_per_task = rule.parts_per_task
        self.patterns = None if components is None else tuple(components)

    @property
    def vaccinated(self) -> Sequence[str] | None:
        """The tasks whose gradients the rule alters; None: all."""
        vaccinated: Sequence[str] | None = getattr(self.rule, "vaccinated", None)
        return vaccinated

    def bind(self, tasks: Sequence[str], components: Sequence[str]) -> None:
        for pattern in self.patterns or ():
            if not any(fnmatchcase(name, pattern) for name in components):
                raise ValueError(
                    f"components: {pattern!r} is no component; they are {some(components)}."
                )
        super().bind(tasks, components)
        self.rule.bind(tasks, components)
        patterns = ("*",) if self.patterns is None else self.patterns
        self._wanted = torch.tensor(
            [any(fnmatchcase(name, pattern) for pattern in patterns) for name in components]
        )
        self._step = torch.zeros((), dtype=torch.int64)

    def start_step(self, present: Sequence[int], losses: Tensor) -> None:
        super().start_step(present, losses)
        self.rule.start_step(present, losses)
        self._step, self._wanted = self._step.to(losses.device), self._wanted.to(losses.device)

    def weigh(self, components: Sequence[int], gram: Tensor) -> Weighing:
        weighing = self.rule.weigh(components, gram)
        acts = self.take(self._wanted, components) & (self._step >= self.from_step)
        if self.until_step is not None:
            acts = acts & (self._step < self.until_step)
        weights = torch.where(acts[:, None], weighing.weights, 1.0)
        return Weighing(weights, weighing.target, weighing.active & acts[:, None, None])

    def weigh_finite(self, components: Sequence[int], gram: Tensor) -> Weighing:
        return self.weigh(components, gram)

    def commit(self) -> None:
        self.rule.commit()
        self._step.add_(self.rule.finite)

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"around": self.rule.state_dict(), "step": int(self._step)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.rule.load_state_dict(state["around"])
        self._step.fill_(state["step"])

    def __repr__(self) -> str:
        where = "all components" if self.patterns is None else ", ".join(self.patterns)
        until = "the end" if self.until_step is None else self.until_step
        return f"Only({self.rule}, {where}, steps {self.from_step} to {until})"
