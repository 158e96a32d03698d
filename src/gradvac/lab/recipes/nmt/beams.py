"""Slots with several beams: the best continuations of all beams of a sentence go on.

When a beam continues another one, no key or value moves: every beam remembers its *ancestry*, the
beam that it was at each step.
"""

# R slots, K beams, V vocabulary, L steps

from __future__ import annotations

import torch
from torch import Tensor

from gradvac.lab.recipes.nmt.model import Transformer
from gradvac.lab.recipes.nmt.slots import Extent, Search, Slots

_CHUNK = 64  # entries of which only the largest is looked at first


class Beams(Slots):
    """Beam search.

    A sentence is done when as many translations as beams have ended, or when nothing that is still
    open can become better than the best that has.
    """

    def __init__(self, model: Transformer, search: Search, extent: Extent) -> None:
        super().__init__(model, search, extent)
        num_slots, _, target = extent
        self._beams = self._rows.new_tensor(range(search.num_beams), dtype=torch.int16)
        # -1: that step has not been taken, and what lies there is not to be seen.
        self._ancestry = self._beams.new_full((num_slots, search.num_beams, target), -1)
        self._in_use = self._ancestry  # of it, what a step sees
        self._last_penalty = self._penalties.new_ones(num_slots)  # of one as long as can be
        self._never = self._scores.new_full((), -torch.inf)
        self._num_ended = self._read.new_zeros(num_slots)
        self._best = self._scores.new_full((num_slots,), -torch.inf)
        self._best_path = self._ancestry.new_zeros(num_slots, target)
        self._best_length = self._read.new_zeros(num_slots)

    def _own(self) -> list[Tensor]:
        own = [self._ancestry, self._last_penalty, self._num_ended, self._best, self._best_path]
        return [*super()._own(), *own, self._best_length]

    def _begin(self, chosen: Tensor) -> None:
        # All beams start alike, so only the first may be continued at first.
        self._scores[chosen] = torch.where(self._beams > 0, -torch.inf, 0.0).to(self._scores.dtype)
        self._ancestry[chosen] = -1
        self._last_penalty[chosen] = self._penalties[self._last[chosen] + 1]
        for counts in (self._num_ended, self._best_length):
            counts[chosen] = 0
        self._best[chosen] = -torch.inf

    def _readable(self, num: int, steps: int) -> Tensor:
        self._in_use = ancestry = self._ancestry[:num, :, :steps]
        ancestry[self._rows[:num], :, self._length[:num]] = self._beams
        readable = (ancestry[..., None] == self._beams).flatten(2)[:, None]
        return torch.where(readable, self._seen, self._unseen)

    def _choose(self, chances: Tensor) -> None:
        num, num_beams, _ = chances.shape
        ancestry = self._in_use
        scores, beam, token = self._candidates(chances)
        ends, is_open = token == self._eos, ~self.done[:num]
        self._end(scores, beam, ends & is_open[:, None], ancestry)
        scores, order = torch.where(ends, self._never, scores).topk(num_beams)
        beam, token = beam.gather(1, order), token.gather(1, order)
        ancestry.copy_(ancestry.gather(1, beam[..., None].expand_as(ancestry)))
        self._scores[:num] = scores
        self._newest[:num] = token
        self._length[:num].add_(is_open)
        self._finish(num)

    def _candidates(self, chances: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The best continuations of each slot: score, beam and token, `[R, 2 K]`.

        Each beam can end in one way only, so that twice as many hold enough that go on.
        """
        num, num_beams, vocabulary = chances.shape
        chances.index_fill_(-1, self._blocked, -torch.inf)
        wanted = min(2 * num_beams, vocabulary)
        values, tokens = largest(chances, wanted)
        must_end = (self._last[:num] <= self._length[:num])[:, None, None]
        end = chances[..., self._search.eos, None]
        end = torch.cat([end, self._never.expand(num, num_beams, wanted - 1)], -1)
        values = torch.where(must_end, end, values)
        tokens = torch.where(must_end, self._eos, tokens)
        totals = (self._scores[:num, :, None] + values).flatten(1)
        scores, where = totals.topk(min(2 * num_beams, totals.shape[1]))
        return scores, where // wanted, tokens.flatten(1).gather(1, where)

    def _end(self, scores: Tensor, beam: Tensor, ends: Tensor, ancestry: Tensor) -> None:
        """Keep the best translation that ends now, if it is better than those before."""
        num, num_beams = len(scores), self._search.num_beams
        scores = scores[:, :num_beams]
        ends = ends[:, :num_beams] & (scores > self._never)
        self._num_ended[:num].add_(ends.sum(1))
        length = self._length[:num]
        penalty = self._penalties[length + 1][:, None]
        normal = torch.where(ends, scores, self._never) / penalty
        best, rank = normal.max(1)
        path = ancestry[self._rows[:num], beam.gather(1, rank[:, None])[:, 0]]
        better = best > self._best[:num]
        for kept, new in ((self._best_length[:num], length), (self._best[:num], best)):
            torch.where(better, new, kept, out=kept)
        kept = self._best_path[:num, : path.shape[1]]
        torch.where(better[:, None], path, kept, out=kept)

    def _finish(self, num: int) -> None:
        """A sentence is done when enough has ended, or when nothing open can become the best."""
        hope = self._scores[:num, 0] / self._last_penalty[:num]
        done = (self._num_ended[:num] >= self._search.num_beams) | (self._best[:num] >= hope)
        self.done[:num].logical_or_(done | (self._last[:num] < self._length[:num]))

    def _found(self, chosen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        path = self._best_path[chosen].long().clamp(min=0)[..., None]
        said = self._read[chosen].gather(2, path)[..., 0]
        return said, self._best_length[chosen], self._best[chosen]


def largest(values: Tensor, num: int) -> tuple[Tensor, Tensor]:
    """The `num` largest of the last dimension, and where they are, like `topk`.

    Over a long dimension: the largest lie in the chunks with the largest maxima, so that all but a
    few entries are looked at once.
    """
    length = values.shape[-1]
    num_chunks = length // _CHUNK
    if num_chunks < 4 * num:
        top = values.topk(num)
        return top.values, top.indices
    cut = num_chunks * _CHUNK
    chunks = values[..., :cut].unflatten(-1, (num_chunks, _CHUNK))
    which = chunks.amax(-1).topk(num).indices
    picked = which[..., None].expand(*which.shape, _CHUNK)
    inside = torch.cat([chunks.gather(-2, picked).flatten(-2), values[..., cut:]], -1)
    places = torch.cat(
        [
            (picked * _CHUNK + torch.arange(_CHUNK, device=values.device)).flatten(-2),
            torch.arange(cut, length, device=values.device).expand(*which.shape[:-1], -1),
        ],
        -1,
    )
    top = inside.topk(num)
    return top.values, places.gather(-1, top.indices)
