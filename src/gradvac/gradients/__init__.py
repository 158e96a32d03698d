"""Engines: how task gradients are obtained, and what they are turned into.

An engine sees autograd and one callable, `weigh(components, gram) -> weights`, never a rule.
`per_task` runs one backward per task and stores all task gradients; it works for every model and is
the reference. `one_backward` runs one backward for all tasks and holds task gradients only one
component at a time.

`_components.py` says which parameters belong together, `_rows.py` which rows belong to which task.
"""

from gradvac.gradients._attachment import refuse_unsupported
from gradvac.gradients._batch import Batch, TasksOfRows, read_losses
from gradvac.gradients._check import find_mismatches
from gradvac.gradients._components import Components, Granularity, split
from gradvac.gradients._kernels import gram
from gradvac.gradients._one_backward import OneBackward
from gradvac.gradients._per_task import PerTask, Weigh
from gradvac.gradients._rows import RowTasks, current_rows, rows

__all__ = [
    "Batch",
    "Components",
    "Granularity",
    "OneBackward",
    "PerTask",
    "RowTasks",
    "TasksOfRows",
    "Weigh",
    "current_rows",
    "find_mismatches",
    "gram",
    "read_losses",
    "refuse_unsupported",
    "rows",
    "split",
]
