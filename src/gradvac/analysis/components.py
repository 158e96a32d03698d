"""Where a component is in the model, read off its name."""

import re
from collections.abc import Sequence

from gradvac.sides import side_of

_SMALL = re.compile(
    r"(?:^|[._])(?:(?:layer|rms|batch|group)?_?norms?\d*|bn\d*|ln(?:_?\d+|_\w+)?|bias)(?:[._]|$)",
    re.IGNORECASE,
)
_LAYER = re.compile(r"(?:^|[._])(?:layer|block|stage)?(\d+)(?=[._]|$)")


def layer_of(component: str) -> int | None:
    """The number of the layer, the outermost one named; None for embeddings and the like."""
    number = _LAYER.search(component)
    return None if number is None else int(number[1])


def weighty(components: Sequence[str], side: str | None = None) -> list[bool]:
    """Which components count in the mean of a side (None: of the model).

    Components that are only normalisations or biases do not, if there is anything else: they hold
    few numbers, behave differently, and would count as much as a whole layer.
    """
    inside = [side is None or side_of(name) == side for name in components]
    large = [
        is_inside and not _SMALL.search(n) for is_inside, n in zip(inside, components, strict=True)
    ]
    return large if any(large) else inside
