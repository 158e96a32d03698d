"""The autograd graph that a forward left behind, read but never changed.

*Junctions* are the nodes where something made of parameters alone meets the rows of the batch.

    _graph.py      nodes, their structure, and how one of them is called
    _movers.py     operations that may move rows on the way to the junctions
    _junctions.py  the junctions of a graph
    _passes.py     a backward that stops at the junctions
    _refusals.py   graphs that hide parameters, or are not those of the model
"""

from gradvac.gradients.graph._graph import (
    ANCHOR,
    COMPILED,
    LEAF,
    RUN,
    TAPS,
    Graph,
    Signature,
    call_node,
    is_python_function,
    run_of,
    saved,
)
from gradvac.gradients.graph._junctions import Drawing, Junction, Way, draw, way_down
from gradvac.gradients.graph._movers import ANY, ENTRYWISE, VIEWS, moves_along
from gradvac.gradients.graph._passes import Arrive, Watcher, run_pass, show_gradients, without_hooks
from gradvac.gradients.graph._refusals import (
    Refused,
    refuse_changed,
    refuse_hidden,
    set_aside,
)

__all__ = [
    "ANCHOR",
    "ANY",
    "COMPILED",
    "ENTRYWISE",
    "LEAF",
    "RUN",
    "TAPS",
    "VIEWS",
    "Arrive",
    "Drawing",
    "Graph",
    "Junction",
    "Refused",
    "Signature",
    "Watcher",
    "Way",
    "call_node",
    "draw",
    "is_python_function",
    "moves_along",
    "refuse_changed",
    "refuse_hidden",
    "run_of",
    "run_pass",
    "saved",
    "set_aside",
    "show_gradients",
    "way_down",
    "without_hooks",
]
