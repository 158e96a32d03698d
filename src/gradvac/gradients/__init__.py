"""Engines: how task gradients are obtained, and what they are turned into.

An engine sees autograd and one callable, `weigh(components, gram) -> weights`, never a rule.
`per_task` runs one backward per task and stores all task gradients; it works for every model and is
the reference. `one_backward` runs one backward for all tasks and holds task gradients only one
component at a time.

    _batch.py           losses and tasks as the caller gave them, checked
    _components.py      which parameters share a Gram matrix
    _rows.py            `gradvac.rows`: which rows belong to which task
    _per_task.py        the reference engine
    _one_backward.py    the fast engine
    _attachment.py      how it hears of a model's layers
    _site.py            one layer, and what it saw in the forward pass
    _tokens.py          what a forward pass hands to the backward pass
    _layers.py          task gradients of the layers it knows
    _fallback.py        layers that run task by task
    _adapters.py        layers of other libraries
    _contributions.py   what one use of a parameter adds to its task gradients
    _ledger.py          components as they complete
    _graph.py           questions to the autograd graph
    _check.py           comparison with plain autograd on the first batch
    _kernels.py         Gram matrix, combination and grouped products
    _triton.py          the same on CUDA
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
