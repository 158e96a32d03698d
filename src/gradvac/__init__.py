"""gradvac: one model, many tasks, and a say in how their gradients are combined.

Replace `losses.sum().backward()` by `aligner.backward(losses, tasks)`. The aligner obtains each
task's gradient (an *engine*), compares them component by component (a *Gram matrix*), asks a *rule*
for weights, and adds the weighted sum to `.grad`. Everything else of a training loop stays.

The rule that gave the library its name is Gradient Vaccine (Wang et al., ICLR 2021); PCGrad, MGDA,
GradNorm and plain joint training are beside it. See `Aligner` for an example.
"""

from gradvac.aligner import Aligner
from gradvac.alignment import Alignment
from gradvac.gradients import rows
from gradvac.rules import (
    MGDA,
    EmaTarget,
    FixedTarget,
    GradNorm,
    GradVac,
    PCGrad,
    Sum,
    TorchJD,
)

__all__ = [
    "MGDA",
    "Aligner",
    "Alignment",
    "EmaTarget",
    "FixedTarget",
    "GradNorm",
    "GradVac",
    "PCGrad",
    "Sum",
    "TorchJD",
    "rows",
]
