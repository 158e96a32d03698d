"""Parameters that are exchanged at once, side by side."""

# S shards

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import nn

from gradvac.engine.processes._shards import Shards

_BUCKET_BYTES = 1 << 25  # of one task's gradients


class Part(NamedTuple):
    """One parameter in a bucket."""

    leaf: nn.Parameter  # of graphs
    kept: nn.Parameter  # what this process keeps of it
    component: int
    start: int  # of its columns
    end: int


@dataclass
class Bucket:
    """Some parameters that are exchanged in one dtype."""

    dtype: torch.dtype
    parts: list[Part] = field(default_factory=list)

    @property
    def width(self) -> int:
        """Their numbers in one shard."""
        return self.parts[-1].end if self.parts else 0

    def components_within(self, start: int, end: int) -> list[tuple[int, int, int]]:
        """The components within columns start..end: (number, first, end), counted from start."""
        found: list[tuple[int, int, int]] = []
        for part in self.parts:
            first, last = max(part.start, start) - start, min(part.end, end) - start
            if first < last:
                if found and found[-1][0] == part.component and found[-1][2] == first:
                    first = found.pop()[1]
                found.append((part.component, first, last))
        return found


def divide(components: Mapping[str, Collection[str]], shards: Shards) -> list[Bucket]:
    """The parameters in the order in which a backward completes them, by and large."""
    buckets: list[Bucket] = []
    open_ones: dict[torch.dtype, Bucket] = {}
    every = [(name, k) for k, names in enumerate(components.values()) for name in names]
    for name, component in reversed(every):
        dtype, leaf = shards.sent_dtype(name), shards.leaves[name]
        bucket = open_ones.get(dtype)
        if bucket is None or bucket.width * shards.num * dtype.itemsize >= _BUCKET_BYTES:
            bucket = open_ones[dtype] = Bucket(dtype)
            buckets.append(bucket)
        start, end = bucket.width, bucket.width + shards.width(leaf)
        bucket.parts.append(Part(leaf, shards.parameters[name], component, start, end))
    return buckets
