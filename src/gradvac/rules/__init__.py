"""Rules: how the task gradients of a component are combined.

A rule is a function of the Gram matrix: it sees the inner products of the task gradients and the
losses, never a parameter. What it returns are weights, one per task and component; the update is
the weighted sum of the task gradients. Whatever alters gradients pairwise (GradVac, PCGrad), seeks
the shortest combination (MGDA) or balances norms (GradNorm) can be said that way, which is why one
engine serves all of them.

One method per file; `rule.py` says what every rule is, `pairwise.py` what GradVac and PCGrad share,
`sweep_kernel.py` is that as one Triton kernel, `only.py` limits another rule to some components
or steps.

A new rule of the package is a file, a line in `RULES`, and in `gradvac/lab/training/align.py` a
config class that is also a base of `AlignConfig`. A rule of your own needs none of it: configs and
`Aligner(rule=...)` take "module:Class" and "file.py:Class"; see `studies/` for some.
"""

import inspect
from typing import Any

from gradvac.rules.gradnorm import GradNorm
from gradvac.rules.gradvac import GradVac
from gradvac.rules.mgda import MGDA
from gradvac.rules.only import Only
from gradvac.rules.pairwise import EmaTarget, FixedTarget
from gradvac.rules.pcgrad import PCGrad
from gradvac.rules.rule import Rule, Weighing
from gradvac.rules.sum import Sum
from gradvac.rules.torchjd import TorchJD
from gradvac.utils.hints import nearest
from gradvac.utils.plugins import plugin_class

RULES: dict[str, type[Rule]] = {
    rule.name: rule for rule in (GradVac, PCGrad, MGDA, GradNorm, Sum, TorchJD)
}


def as_rule(rule: Rule | str | None) -> Rule:
    """The rule an `Aligner` was given: itself, its name, or none for `GradVac()`."""
    if isinstance(rule, str):
        return rule_named(rule)
    if isinstance(rule, type) and issubclass(rule, Rule):
        raise ValueError(f"rule: is a class; give an instance, {rule.__name__}().")
    if not isinstance(rule, Rule | None):
        raise ValueError(f"rule: must be a Rule or the name of one, got {rule!r}.")
    return GradVac() if rule is None else rule


def rule_named(name: str, **options: Any) -> Rule:
    """Make a rule by the name that configs use: `rule_named("gradvac", beta=0.1)`.

    Args:
        name: One of `RULES`, in capitals or not; or a rule of your own, as "module:Class" or
            "file.py:Class".
        **options: Its arguments.

    Raises:
        ValueError: There is no such rule, or it has no such argument.
    """
    rule = rule_class(name)
    parameters = inspect.signature(rule).parameters
    for option in options:
        if option not in parameters:
            has = f"{rule.__name__} has no such option"
            raise ValueError(f"{option}: {has}; {nearest(option, parameters)}")
    for option, parameter in parameters.items():
        if parameter.default is parameter.empty and options.get(option) is None:
            raise ValueError(f"{option}: {rule.__name__} needs one; see its documentation.")
    return rule(**options)


def rule_class(name: str) -> type[Rule]:
    """The class of a rule by its name, as in `rule_named`.

    Raises:
        ValueError: There is none.
    """
    if ":" in str(name):
        return plugin_class(name, Rule, "rule")  # type: ignore[type-abstract]
    if (rule := RULES.get(str(name).lower())) is None:
        raise ValueError(f"rule: there is no {name!r}; {nearest(str(name).lower(), RULES)}")
    return rule


__all__ = [
    "MGDA",
    "RULES",
    "EmaTarget",
    "FixedTarget",
    "GradNorm",
    "GradVac",
    "Only",
    "PCGrad",
    "Rule",
    "Sum",
    "TorchJD",
    "Weighing",
    "rule_named",
]
