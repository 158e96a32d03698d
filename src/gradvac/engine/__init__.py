"""Engines: how task gradients are obtained, and what they are turned into.

An engine sees autograd and one callable, `weigh(components, gram) -> weights`, never a rule.
`per_task` runs one backward per task and stores all task gradients; it works for every model and is
the reference. `one_backward` runs one backward for all tasks, on the graph that the forward left
behind, and frees task gradients as components are complete; small steps weigh all of them at once.
The files, about in the order in which a step needs them:

    models.py          what is asked of a model before its graphs are read
    losses.py          what `backward` was given, checked and in one form
    joint_gradient.py  the gradient that task gradients must add up to
    components.py      which parameters share one Gram matrix
    choice.py          which engine runs, and what is accumulated over micro-batches
    per_task.py        the reference: one backward per task, for every model
    one_backward.py    the fast one: executes a plan, one backward for all tasks
    executor.py        what C++ does of it where it is built (cpp/)

  which rows are whose:
    graph.py           the autograd graph: its nodes, and their structure
    planner.py         the plan of a graph: kept by structure, made by a probe, verified
    probe.py, plan.py  from a graph to evidence, and from that to a *plan*: which rows are whose
    familiar.py        plans without a probe, for graphs made of operations that were seen
    junctions.py       where parameters meet the rows of the batch
    layouts.py         where rows lie, followed from the losses down, operation by operation
    slices.py          where slices lie that are written in place
    declared_rows.py   `gradvac.rows`, with which a forward names the tasks of packed rows
    ownership.py       codes, by which the owners of entries are measured

  from output gradients to `.grad`:
    passes.py          backward passes to junctions or leaves
    builder.py         from the output gradient of a junction to contributions to its parameters
    plain_junctions.py  the same of linear layers, norms, scales and shifts, several at once
    fast_paths.py      other operations whose node need not be called: one function each
    pushes.py          through operations on parameters alone, T gradients at a time
    contributions.py   what a junction contributes to a parameter, still separable by task
    pairs_of_entries.py  Gram matrices of large tables, whose task gradients are not built
    budget.py          how much may wait to be built or weighed together
    task_gradients.py  contributions by parameter -> Gram matrices -> weights -> `.grad`
    metric.py          in which units Gram matrices see task gradients
    kernels/           products and sums of tensors, and *segments*, the entries of each task
    compiled.py        compiled regions, whose parameters are left outside
    distributed.py     the same between processes; collectives.py: every call between them
"""

from gradvac.engine.choice import ENGINES, LocalEngine
from gradvac.engine.compiled import compile_tapped
from gradvac.engine.components import Components, Granularity, split
from gradvac.engine.declared_rows import RowTasks, rows
from gradvac.engine.distributed import (
    Exchange,
    RankError,
    Ranks,
    digest,
    sharded_modules,
    unsharded_backward,
)
from gradvac.engine.graph import own_hooks
from gradvac.engine.kernels import gram
from gradvac.engine.losses import Losses, TasksOfRows, positions, read_local_losses, read_losses
from gradvac.engine.metric import AdamMetric, Metric
from gradvac.engine.passes import kept_gradients
from gradvac.engine.task_gradients import AccumulatedGradients, Weigh

__all__ = [
    "ENGINES",
    "AccumulatedGradients",
    "AdamMetric",
    "Components",
    "Exchange",
    "Granularity",
    "LocalEngine",
    "Losses",
    "Metric",
    "RankError",
    "Ranks",
    "RowTasks",
    "TasksOfRows",
    "Weigh",
    "compile_tapped",
    "digest",
    "gram",
    "kept_gradients",
    "own_hooks",
    "positions",
    "read_local_losses",
    "read_losses",
    "rows",
    "sharded_modules",
    "split",
    "unsharded_backward",
]
