"""Rules: how the task gradients of a component are combined.

A rule is a function of the Gram matrix: it sees the inner products of the task gradients and the
losses, never a parameter. What it returns are weights, one per task and component; the update is
the weighted sum of the task gradients. Whatever alters gradients pairwise (GradVac, PCGrad), seeks
the shortest combination (MGDA) or balances norms (GradNorm) can be said that way, which is why one
engine serves all of them.

One method per file. `_pairwise.py` holds the sweep of Algorithm 1, `_rule.py` the contract.
"""

from gradvac.rules._gradnorm import GradNorm
from gradvac.rules._gradvac import GradVac
from gradvac.rules._mgda import MGDA
from gradvac.rules._pcgrad import PCGrad
from gradvac.rules._rule import Rule, Weighing
from gradvac.rules._sum import Sum
from gradvac.rules._targets import EmaTarget, FixedTarget
from gradvac.rules._torchjd import TorchJD

__all__ = [
    "MGDA",
    "EmaTarget",
    "FixedTarget",
    "GradNorm",
    "GradVac",
    "PCGrad",
    "Rule",
    "Sum",
    "TorchJD",
    "Weighing",
]
