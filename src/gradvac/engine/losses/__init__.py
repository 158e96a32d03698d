"""What the caller of `backward` gave: losses, and the tasks of rows.

_losses.py  losses of rows or tasks, checked and in one form
_rows.py    `gradvac.rows`, with which a forward names the tasks of packed rows
_plain.py   the plain gradient of losses, which task gradients must add up to
"""

from gradvac.engine.losses._losses import (
    Losses,
    TasksOfRows,
    positions,
    read_losses,
    read_own_losses,
)
from gradvac.engine.losses._plain import PlainGradient, Sums, is_due
from gradvac.engine.losses._rows import DeclaredRows, RowTasks, listen, rows

__all__ = [
    "DeclaredRows",
    "Losses",
    "PlainGradient",
    "RowTasks",
    "Sums",
    "TasksOfRows",
    "is_due",
    "listen",
    "positions",
    "read_losses",
    "read_own_losses",
    "rows",
]
