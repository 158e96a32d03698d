"""Engines: how task gradients are obtained, and what they are turned into.

An engine sees autograd and one callable, `weigh(components, gram) -> weights`, never a rule.
`per_task` runs one backward per task and stores all task gradients; it works for every model and is
the reference. `one_backward` runs one backward for all tasks, on the graph that the forward left
behind, and holds task gradients only one component at a time.

Nine ideas, each a room whose own map names its files:

    kernels/    products and sums of tensors, and *segments*, the entries of each task
    graph/      the autograd graph, its *junctions*, where parameters meet rows, and passes to them
    losses/     what `backward` was given: losses, and the tasks of rows
    ownership/  whose the entries of an output gradient are, and a *plan*: what is known of that
    compiled/   compiled regions, whose parameters are left outside
    uses/       what a junction contributes to a parameter: fast paths, or the node itself
    fold/       *components*: from their uses to their Gram matrix, their weights and `.grad`
    engines/    from losses to updates: which engine runs, and how
    processes/  the same between processes; all collectives are in `processes/_distributed.py`

What a room imports of the others is in the `__all__` of their `__init__`. It may import from:

    kernels    none
    graph      none
    losses     kernels, graph
    ownership  kernels, graph, losses
    compiled   graph, ownership
    uses       kernels, graph, losses, ownership
    fold       kernels, uses
    engines    kernels, graph, losses, ownership, uses, fold
    processes  kernels, losses, fold, engines
"""

from gradvac.engine.choice import ENGINES, Engines
from gradvac.engine.compiled import compile_tapped
from gradvac.engine.components import Components, Granularity, split
from gradvac.engine.kernels import gram
from gradvac.engine.losses import Losses, TasksOfRows, positions, read_losses, read_own_losses
from gradvac.engine.metric import AdamMetric, Metric
from gradvac.engine.processes import Exchange, RankError, Ranks, digest, sharded_modules, whole
from gradvac.engine.row_tasks import RowTasks, rows
from gradvac.engine.task_gradients import Stored, Weigh

__all__ = [
    "ENGINES",
    "AdamMetric",
    "Components",
    "Engines",
    "Exchange",
    "Granularity",
    "Losses",
    "Metric",
    "RankError",
    "Ranks",
    "RowTasks",
    "Stored",
    "TasksOfRows",
    "Weigh",
    "compile_tapped",
    "digest",
    "gram",
    "positions",
    "read_losses",
    "read_own_losses",
    "rows",
    "sharded_modules",
    "split",
    "whole",
]
