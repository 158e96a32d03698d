"""Engines: from losses to updates.

_choice.py        which of the engines runs
_per_task.py      the reference: one backward per task, for every model
_one_backward.py  the fast one: one backward for all tasks, over the graph as it is
_step.py          the passes of one_backward over the graph of one step
"""

from gradvac.engine.engines._choice import ENGINES, Engines

__all__ = ["ENGINES", "Engines"]
