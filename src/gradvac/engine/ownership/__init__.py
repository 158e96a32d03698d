"""Whose the entries of an output gradient are: declared or measured, never assumed.

_layouts.py    along which dimension of a tensor rows lie
_following.py  where rows lie, followed from the losses down; operations that may move them
_codes.py      codes, which show whose the entries of a gradient are
_look.py       one look at a graph: its passes, and the plan they lead to
_evidence.py   what the passes of a look show
_plan.py       what is known of graphs of one structure, and for which sizes it holds
_planning.py   plans by structure of graph, verified now and then
"""

from gradvac.engine.ownership._codes import TaskCodes, task_codes, unexplained
from gradvac.engine.ownership._following import follow
from gradvac.engine.ownership._layouts import Layout
from gradvac.engine.ownership._plan import How, Plan
from gradvac.engine.ownership._planning import Planner

__all__ = [
    "How",
    "Layout",
    "Plan",
    "Planner",
    "TaskCodes",
    "follow",
    "task_codes",
    "unexplained",
]
