"""Parameters that are exchanged at once, side by side."""

# S shards

from collections.abc import Collection, Iterator, Mapping

import torch
from torch import nn

from gradvac.gradients.processes._shards import Shards

_BUCKET_BYTES = 1 << 25  # of one task's gradients


class Bucket:
    """Some parameters of one dtype, with the component of each.

    Attributes:
        dtype: In which they are exchanged.
        parameters: The parameters.
        width: Their numbers in one shard.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.parameters: list[nn.Parameter] = []
        self._components: list[int] = []
        self._ends: list[int] = []
        self.width = 0

    def add(self, parameter: nn.Parameter, component: int, width: int) -> None:
        """Append a parameter."""
        self.width += width
        self.parameters.append(parameter)
        self._components.append(component)
        self._ends.append(self.width)

    def places(self) -> Iterator[tuple[nn.Parameter, int, int]]:
        """Every parameter and its columns: first, end."""
        start = 0
        for parameter, end in zip(self.parameters, self._ends, strict=True):
            yield parameter, start, end
            start = end

    def components_of(self, parameters: Collection[nn.Parameter]) -> set[int]:
        """The components of those of them that are here."""
        pairs = zip(self.parameters, self._components, strict=True)
        return {component for parameter, component in pairs if parameter in parameters}

    def parts(self, start: int, end: int) -> list[tuple[int, int, int]]:
        """The components within columns start..end: (number, first, end), counted from start."""
        parts: list[tuple[int, int, int]] = []
        first = 0
        for component, last in zip(self._components, self._ends, strict=True):
            here, there = max(first, start) - start, min(last, end) - start
            if here < there:
                if parts and parts[-1][0] == component and parts[-1][2] == here:
                    here = parts.pop()[1]
                parts.append((component, here, there))
            first = last
        return parts


def divide(component_of: Mapping[nn.Parameter, int], shards: Shards) -> list[Bucket]:
    """The parameters in the order in which a backward completes them, by and large."""
    names = {leaf: name for name, leaf in shards.leaves.items()}
    buckets: list[Bucket] = []
    open_ones: dict[torch.dtype, Bucket] = {}
    for parameter, component in reversed(list(component_of.items())):
        dtype = shards.sent_dtype(names[parameter])
        bucket = open_ones.get(dtype)
        if bucket is None or bucket.width * shards.num * dtype.itemsize >= _BUCKET_BYTES:
            bucket = open_ones[dtype] = Bucket(dtype)
            buckets.append(bucket)
        bucket.add(parameter, component, shards.width(parameter))
    return buckets
