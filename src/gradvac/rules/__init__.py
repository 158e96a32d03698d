"""Rules: how the task gradients of a component are combined.

A rule is a function of the Gram matrix: it sees the inner products of the task gradients and the
losses, never a parameter. What it returns are weights, one per task and component; the update is
the weighted sum of the task gradients. Whatever alters gradients pairwise (GradVac, PCGrad), seeks
the shortest combination (MGDA) or balances norms (GradNorm) can be said that way, which is why one
engine serves all of them.

    _rule.py           what every rule is: Rule, Weighing
    _options.py        what a rule says of itself: arguments, their types and descriptions
    _gradvac.py        GradVac, Algorithm 1 of the paper
    _pcgrad.py         PCGrad: the same with target 0
    _pairwise.py       the sweep over pairs that both are made of
    _sweep_kernel.py   the sweep as one Triton kernel
    _targets.py        EmaTarget, FixedTarget: what the similarity of a pair is held to
    _order.py          the random order in which a task visits the others
    _mgda.py           MGDA: the shortest combination
    _gradnorm.py       GradNorm: one learned weight per task
    _sum.py            Sum: joint training
    _controls.py       Control: GradVac without what is said to make it work
    _frozen.py         Frozen: constant weights by component, such as another rule's means
    _torchjd.py        TorchJD: any Gramian weighting of that library
    _around.py         what rules that stand around another one have in common
    _only.py           Only: another rule in some components or steps
    _halves.py         Halves: another rule on similarities without the noise of the batch

A new rule is a file of its own and a line in `RULES` below. Its class says what configs call it,
what it does and which of its arguments name tasks; the section [align], `Aligner(rule="...")`, the
table in the guide and the sentence in the report follow.
"""

from typing import Any

from gradvac.hints import nearest
from gradvac.rules._controls import Control
from gradvac.rules._frozen import Frozen
from gradvac.rules._gradnorm import GradNorm
from gradvac.rules._gradvac import GradVac
from gradvac.rules._halves import Halves, halves_of
from gradvac.rules._mgda import MGDA
from gradvac.rules._only import Only
from gradvac.rules._options import REQUIRED, Option, options_of
from gradvac.rules._pcgrad import PCGrad
from gradvac.rules._rule import Rule, Weighing
from gradvac.rules._sum import Sum
from gradvac.rules._targets import EmaTarget, FixedTarget
from gradvac.rules._torchjd import TorchJD

RULES: dict[str, type[Rule]] = {
    rule.name: rule for rule in (GradVac, PCGrad, MGDA, GradNorm, Sum, TorchJD, Control, Frozen)
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
        name: One of `RULES`, in capitals or not.
        **options: Its arguments.

    Raises:
        ValueError: There is no such rule, or it has no such argument.
    """
    rule = RULES.get(str(name).lower())
    if rule is None:
        raise ValueError(f"rule: there is no {name!r}; {nearest(str(name).lower(), RULES)}")
    its_options = options_of(rule)
    for option in options:
        if option not in its_options:
            has = f"{rule.__name__} has no such option"
            raise ValueError(f"{option}: {has}; {nearest(option, its_options)}")
    missing = [name for name, one in its_options.items() if one.default is REQUIRED]
    for option in missing:
        if options.get(option) is None:
            raise ValueError(f"{option}: {rule.__name__} needs one: {its_options[option].about}")
    return rule(**options)


__all__ = [
    "MGDA",
    "RULES",
    "Control",
    "EmaTarget",
    "FixedTarget",
    "Frozen",
    "GradNorm",
    "GradVac",
    "Halves",
    "Only",
    "Option",
    "PCGrad",
    "Rule",
    "Sum",
    "TorchJD",
    "Weighing",
    "halves_of",
    "options_of",
    "rule_named",
]
