"""Compiled regions, whose parameters are left outside: `torch.compile(model, backend="gradvac")`.

_tapping.py  the backend
_split.py    a graph in two halves: what is made of parameters alone, and the rest
_taps.py     nodes that stand for the parameters of a region
_regions.py  whether rows stay where they are inside of one
"""

from gradvac.engine.compiled._tapping import compile_tapped

__all__ = ["compile_tapped"]
