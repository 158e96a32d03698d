"""Engines: how task gradients are obtained, and what they are turned into.

An engine sees autograd and one callable, `weigh(components, gram) -> weights`, never a rule.
`per_task` runs one backward per task and stores all task gradients; it works for every model and is
the reference. `one_backward` runs one backward for all tasks, on the graph that the forward left
behind, and holds task gradients only one component at a time.

Eleven ideas, and where they are:

*Losses* of rows or tasks, and *components*, which share one Gram matrix

    _losses.py        what the caller of `backward` gave, checked and in one form
    _rows.py          `gradvac.rows`, with which a forward names the tasks of packed rows
    _components.py    which parameters share one Gram matrix

*Engines*

    _choice.py        which of the engines runs
    _per_task.py      the reference engine
    _one_backward.py  the fast engine, from losses to updates

The *graph* and its *junctions*, where parameters meet the rows of the batch

    _graph.py         the autograd graph, read but never changed
    _junctions.py     the junctions of a graph
    _movers.py        operations that may move rows on the way to them
    _passes.py        a backward that stops at the junctions
    _hidden.py        parameters that a graph hides, in a backward within the backward
    _plain.py         the plain gradient, which task gradients must add up to

*Owners* of the entries of a gradient, and a *plan*: what is known of them

    _ownership.py     codes that show whose the entries of a gradient are
    _look.py          one look at a graph: passes with codes, and the plan they lead to
    _evidence.py      what the passes of a look show
    _plan.py          what is known of graphs of one structure, and for which sizes it holds
    _planning.py      plans by structure of graph, verified now and then

*Uses*: what a junction contributes to a parameter, by *segments*, the entries of each task

    _step.py          the passes of one step over its graph
    _forming.py       from a junction's output gradient to its parameters' task gradients
    _fast_paths.py    the operations for which that needs no call of the node
    _segments.py      entries by task: bring together, sum, mask
    _uses.py          what one use of a parameter contributes
    _waiting.py       uses that are formed together with others of their kind

*Compiled regions*, whose parameters are left outside

    _tapping.py       `torch.compile(model, backend="gradvac")`
    _split.py         a graph in two halves: what is made of parameters alone, and the rest
    _taps.py          nodes that stand for the parameters of a region
    _regions.py       whether rows stay where they are inside of one

The *fold*: from the uses of a component to its Gram matrix, its weights and `.grad`

    _buffers.py       collects the uses of one parameter
    _collector.py     collects uses, and folds components as they complete
    _metric.py        what Gram matrices see of task gradients
    _kernels.py       Gram matrices, combinations and grouped products
    _triton_stacks.py Gram matrices and combinations on CUDA
    _triton_sums.py   sums by task on CUDA
    _stored.py        task gradients that are stored, and folded at the end
    _update.py        the waist to the rules, and the way into `.grad`

The same between processes

    _exchange.py      task gradients of several processes, put together exactly
    _shards.py        what every process has of the parameters
    _buckets.py       parameters that are exchanged at once
    _agreement.py     what the processes tell each other before
    _distributed.py   all collectives between them
"""

from gradvac.gradients._agreement import digest
from gradvac.gradients._choice import ENGINES, Engine, Engines
from gradvac.gradients._components import Components, Granularity, split
from gradvac.gradients._distributed import RankError, Ranks
from gradvac.gradients._exchange import Exchange
from gradvac.gradients._kernels import gram
from gradvac.gradients._losses import (
    Losses,
    TasksOfRows,
    positions,
    read_losses,
    read_own_losses,
)
from gradvac.gradients._metric import AdamMetric, Metric
from gradvac.gradients._one_backward import OneBackward
from gradvac.gradients._per_task import PerTask
from gradvac.gradients._rows import RowTasks, rows
from gradvac.gradients._shards import sharded_modules, whole
from gradvac.gradients._stored import Stored
from gradvac.gradients._tapping import compile_tapped
from gradvac.gradients._update import Weigh

__all__ = [
    "ENGINES",
    "AdamMetric",
    "Components",
    "Engine",
    "Engines",
    "Exchange",
    "Granularity",
    "Losses",
    "Metric",
    "OneBackward",
    "PerTask",
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
