"""Uses: what a junction contributes to the task gradients of a parameter.

A new fast path is one function in `_fast_paths.py`, and a line in its table.

    _forming.py     from a junction's output gradient to the uses of its parameters
    _fast_paths.py  the operations for which that needs no call of the node
    _uses.py        what one use of a parameter contributes
    _waiting.py     uses that are formed together with others of their kind
"""

from gradvac.engine.uses._forming import Deliver, Former
from gradvac.engine.uses._uses import Formed, Lookup, Table, Use
from gradvac.engine.uses._waiting import Beside

__all__ = ["Beside", "Deliver", "Formed", "Former", "Lookup", "Table", "Use"]
