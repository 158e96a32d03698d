"""The autograd graph that a forward left behind, read but never changed.

*Junctions* are the nodes where something made of parameters alone meets the rows of the batch.

    _graph.py      nodes, and their structure
    _nodes.py      one node: its settings, what it saved, and how it is called
    _junctions.py  the junctions of a graph
    _passes.py     a backward that stops at the junctions
    _refusals.py   graphs that hide parameters or rows, or are not those of the model
"""

from gradvac.engine.graph._graph import ANCHOR, COMPILED, LEAF, RUN, TAPS, Graph, Signature
from gradvac.engine.graph._junctions import Drawing, Junction, Way, draw, way_down
from gradvac.engine.graph._nodes import (
    call_node,
    indexed_dims,
    is_python_function,
    is_selective,
    release,
    saved,
)
from gradvac.engine.graph._passes import (
    Arrive,
    Watcher,
    has_changing_hook,
    run_pass,
    set_aside,
    show_gradients,
    without_hooks,
)
from gradvac.engine.graph._refusals import (
    Refused,
    refuse_changed,
    refuse_hidden,
    refuse_unreadable,
)

__all__ = [
    "ANCHOR",
    "COMPILED",
    "LEAF",
    "RUN",
    "TAPS",
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
    "has_changing_hook",
    "indexed_dims",
    "is_python_function",
    "is_selective",
    "refuse_changed",
    "refuse_hidden",
    "refuse_unreadable",
    "release",
    "run_pass",
    "saved",
    "set_aside",
    "show_gradients",
    "way_down",
    "without_hooks",
]
