"""Slots with one beam: the likeliest token goes on, and a translation ends once.

So there is no ancestry, and nothing to compare: a step is a third of the operations that beams
need beside the model.
"""

# R slots, V vocabulary, L steps

from __future__ import annotations

import torch
from torch import Tensor

from gradvac.lab.recipes.nmt.model import Transformer
from gradvac.lab.recipes.nmt.slots import Extent, Search, Slots


class Greedy(Slots):
    """Greedy search: a sentence is done when its translation ends."""

    def __init__(self, model: Transformer, search: Search, extent: Extent) -> None:
        super().__init__(model, search, extent)
        steps = self._source.new_full((extent.target, extent.target), -torch.inf)
        self._before = steps.triu(1)  # what is seen at every step: all up to it
        self._zero = self._scores.new_zeros(())

    def _begin(self, chosen: Tensor) -> None:
        self._scores[chosen] = 0.0

    def _readable(self, num: int, steps: int) -> Tensor:
        return self._before[:, :steps][self._length[:num]][:, None, None]

    def _choose(self, chances: Tensor) -> None:
        num = len(chances)
        chances.index_fill_(-1, self._blocked, -torch.inf)
        best, token = chances.max(-1)  # [R, 1]
        length, scores, done = self._length[:num], self._scores[:num], self.done[:num]
        must_end = (self._last[:num] <= length)[:, None]
        best = torch.where(must_end, chances[..., self._search.eos], best)
        newest = torch.where(must_end, self._eos, token, out=self._newest[:num])
        scores += torch.where(done[:, None], self._zero, best)
        length += ~done
        done |= newest[:, 0] == self._eos

    def _found(self, chosen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        length = self._length[chosen]
        return (
            self._read[chosen, :, 0],
            length - 1,
            self._scores[chosen, 0] / self._penalties[length],
        )
