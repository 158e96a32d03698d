"""A plan: what is known of graphs with one signature."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

import torch
from torch import nn

from gradvac.gradients._junctions import Drawing
from gradvac.gradients._ownership import Layout


class Refused(ValueError):  # noqa: N818
    """one_backward cannot separate these losses; nothing was changed."""


class How(Enum):
    """How the owner of an entry is known, where it is not a `Layout`."""

    DECLARED = "declared by gradvac.rows"
    REACHED = "reached by one loss alone"
    MEASURED = "measured every step"


Known = Layout | How


class Route(NamedTuple):
    """The way from an input of a junction to its parameter.

    Casts and a transposition may lie between; `parameter` is None for any other way.
    """

    edge: int
    child: tuple[int, int]
    parameter: nn.Parameter | None
    transposed: bool


@dataclass
class Plan:
    """What is known of graphs with one signature."""

    drawing: Drawing
    known: dict[tuple[int, int], Known] = field(default_factory=dict)  # junction, output -> how
    expanded: set[tuple[int, int]] = field(default_factory=set)  # seen with several entries a row
    uses: Mapping[nn.Parameter, int] = field(default_factory=dict)
    unfinished: str | None = None  # why the next batch must be looked at too
    asleep: frozenset[int] = frozenset()  # positions that no gradient has come through so far
    moved: set[int] = field(default_factory=set)
    measured: bool = False
    proven: bool = False  # a step with it went well
    lowest: torch.dtype = torch.float32
    tolerance: float = 0.0  # how much of what is measured may stay unexplained
    names: Mapping[nn.Parameter, str] = field(default_factory=dict)
    routes: list[list[Route]] = field(default_factory=list)  # from every junction
    components: list[set[int]] | None = None  # that every junction contributes to

    def describe(self) -> str:
        """How rows lie, in words."""
        count = Counter(
            str(how) if isinstance(how, Layout) else how.value for how in self.known.values()
        )
        return "; ".join(
            f"{what} ({number} of {len(self.known)} places)" for what, number in count.most_common()
        )
