"""Slots: sentences that are being translated, and all that is known of their beams.

Everything is allocated once and changed in place, and a step decides nothing on the host: so a step
can be recorded as a CUDA graph, and nobody waits for the device. When a beam continues another one,
no key or value moves: every beam remembers its *ancestry*, the beam that it was at each step.
"""

# R slots, K beams, V vocabulary, L steps, S source tokens

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gradvac.nmt.attention import Moment
from gradvac.nmt.batch import Side
from gradvac.nmt.model import Transformer

_CHUNK = 64  # entries of which only the largest is looked at first


class Hypothesis(NamedTuple):
    """A translation.

    Attributes:
        tokens: Without `</s>`.
        score: Log-probability, `</s>` included, divided by the length penalty.
    """

    tokens: tuple[int, ...]
    score: float


class Extent(NamedTuple):
    """How much of the slots is in use: the beginning of every dimension."""

    num_slots: int
    source: int
    target: int


class Search(NamedTuple):
    """How to search.

    Attributes:
        bos: Token a translation starts with.
        eos: Token it ends with.
        num_beams: K; 1 is greedy search.
        alpha: Exponent of the length penalty.
        forbidden: Tokens that are never said (padding, language tokens).
    """

    bos: int
    eos: int
    num_beams: int = 4
    alpha: float = 0.6
    forbidden: tuple[int, ...] = ()


def length_penalty(length: int | Tensor, alpha: float) -> float | Tensor:
    """((5 + length) / 6)^alpha (Wu et al., 2016): larger alpha favours longer translations."""
    return ((5.0 + length) / 6.0) ** alpha


class Slots:
    """Room for some sentences; at first all of it is free.

    Args:
        model: In eval mode.
        search: How to search.
        extent: What to allocate.
    """

    def __init__(self, model: Transformer, search: Search, extent: Extent) -> None:
        weight = model.embedding.weight
        self._model, self._search, device = model, search, weight.device
        num_slots, source, target = extent
        num_beams = search.num_beams
        self.extent = extent
        self.cache = model.make_cache(num_slots, num_beams, source=source, target=target)
        self._rows = torch.arange(num_slots, device=device)
        self._beams = torch.arange(num_beams, dtype=torch.int16, device=device)
        self._blocked = torch.tensor(search.forbidden, dtype=torch.int64, device=device)
        # What attention adds, 0 where a key is seen; every layer would make it of a mask of bools.
        self._seen, self._unseen = weight.new_zeros(()), weight.new_full((), -torch.inf)
        self._source = weight.new_full((num_slots, 1, 1, source), -torch.inf)
        self._read = torch.zeros(num_slots, target, num_beams, dtype=torch.int64, device=device)
        self._newest = self._read.new_full((num_slots, num_beams), search.bos)
        kind = torch.promote_types(weight.dtype, torch.float32)
        self._scores = torch.zeros(num_slots, num_beams, dtype=kind, device=device)
        lengths = torch.arange(target + 2, dtype=torch.float64)
        penalties = torch.as_tensor(length_penalty(lengths, search.alpha))
        self._penalties = penalties.to(device, kind)  # of a translation of so many tokens
        self._last_penalty = self._penalties.new_ones(num_slots)  # of one as long as can be
        # Numbers of the host would be copied to the device at every use.
        self._never = self._scores.new_full((), -torch.inf)
        self._eos, self._first = self._read.new_full((), search.eos), self._read.new_zeros(())
        # -1: that step has not been taken, and what lies there is not to be seen.
        self._ancestry = self._beams.new_full((num_slots, num_beams, target), -1)
        self._length = self._read.new_zeros(num_slots)  # steps taken
        self._limit = self._read.new_ones(num_slots)
        self._num_ended = self._read.new_zeros(num_slots)
        self._best = self._scores.new_full((num_slots,), -torch.inf)
        self._best_path = self._ancestry.new_zeros(num_slots, target)
        self._best_length = self._read.new_zeros(num_slots)
        self.done = torch.ones(num_slots, dtype=torch.bool, device=device)

    def _own(self) -> list[Tensor]:
        own = [self._source, self._read, self._newest, self._scores, self._ancestry, self._length]
        own += [self._limit, self._num_ended, self._best, self._best_path, self._best_length]
        own += [self._last_penalty]
        return [*own, self.done, *(part for layer in self.cache for part in layer.tensors())]

    def fill(self, places: Sequence[int], source: Side, limits: Sequence[int]) -> None:
        """Put new sentences into slots.

        Args:
            places: The slots.
            source: The sentences, padded, on the model's device.
            limits: Most tokens of their translations, `</s>` included.
        """
        device = self._rows.device
        chosen = torch.tensor(list(places), device=device)
        for layer, (keys, values) in zip(self.cache, self._model.read_source(source), strict=True):
            layer.source_keys[chosen, :, : source.longest] = keys
            layer.source_values[chosen, :, : source.longest] = values
        self._source[chosen] = -torch.inf
        real = source.mask
        shown = self._seen if real is None else torch.where(real, self._seen, self._unseen)
        self._source[chosen, :, :, : source.longest] = shown
        self._newest[chosen] = self._search.bos
        # All beams start alike, so only the first may be continued at first.
        self._scores[chosen] = torch.where(self._beams > 0, -torch.inf, 0.0).to(self._scores.dtype)
        self._ancestry[chosen] = -1
        self._limit[chosen] = torch.tensor(list(limits), device=device)
        self._last_penalty[chosen] = self._penalties[self._limit[chosen]]
        for counts in (self._length, self._num_ended, self._best_length):
            counts[chosen] = 0
        self._best[chosen] = -torch.inf
        self.done[chosen] = False

    def keep(self, places: Sequence[int]) -> None:
        """Move slots to the front, in that order; the others are free."""
        chosen = torch.tensor(list(places), device=self._rows.device)
        for own in self._own():
            own[: len(places)] = own[chosen]
        self.done[len(places) :] = True
        self._length[len(places) :] = 0

    def advance(self, extent: Extent) -> None:
        """Continue every beam of the first slots by one token.

        Args:
            extent: Slots, source tokens and steps in use; more steps than any slot has taken.
        """
        num, steps = extent.num_slots, extent.target
        rows, at, ancestry = self._rows[:num], self._length[:num], self._ancestry[:num, :, :steps]
        ancestry[rows, :, at] = self._beams
        self._read[rows, at] = self._newest[:num]
        readable = (ancestry[..., None] == self._beams).flatten(2)[:, None]
        readable = torch.where(readable, self._seen, self._unseen)
        now = Moment(rows, at, readable, self._source[:num, ..., : extent.source])
        places = steps * self._search.num_beams
        cache = [layer.part(num, extent.source, places) for layer in self.cache]
        logits = self._model.step(self._newest[:num], cache, now)
        scores, beam, token = self._candidates(logits.log_softmax(-1, dtype=self._scores.dtype))
        ends, is_open = token == self._eos, ~self.done[:num]
        self._end(scores, beam, ends & is_open[:, None], ancestry)
        scores = torch.where(ends, self._never, scores)
        if self._search.num_beams > 1:  # a single beam has a single candidate
            scores, order = scores.topk(self._search.num_beams)
            beam, token = beam.gather(1, order), token.gather(1, order)
            ancestry.copy_(ancestry.gather(1, beam[..., None].expand_as(ancestry)))
        self._scores[:num] = scores
        self._newest[:num] = token
        at += is_open
        self._finish(num)

    def _candidates(self, chances: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The best continuations of each slot: score, beam and token, `[R, 2 K]`.

        Each beam can end in one way only, so that twice as many hold enough that go on.
        """
        num, num_beams, vocabulary = chances.shape
        chances.index_fill_(-1, self._blocked, -torch.inf)
        wanted = 1 if num_beams == 1 else min(2 * num_beams, vocabulary)
        values, tokens = largest(chances, wanted)
        must_end = (self._limit[:num] <= self._length[:num] + 1)[:, None, None]
        end = chances[..., self._search.eos, None]
        if wanted > 1:
            end = torch.cat([end, self._never.expand(num, num_beams, wanted - 1)], -1)
        values = torch.where(must_end, end, values)
        tokens = torch.where(must_end, self._eos, tokens)
        totals = (self._scores[:num, :, None] + values).flatten(1)
        if totals.shape[1] == 1:
            return totals, self._first.expand(num, 1), tokens.flatten(1)
        scores, where = totals.topk(min(2 * num_beams, totals.shape[1]))
        return scores, where // wanted, tokens.flatten(1).gather(1, where)

    def _end(self, scores: Tensor, beam: Tensor, ends: Tensor, ancestry: Tensor) -> None:
        """Keep the best translation that ends now, if it is better than those before."""
        num, num_beams = len(scores), self._search.num_beams
        scores = scores[:, :num_beams]
        ends = ends[:, :num_beams] & (scores > self._never)
        self._num_ended[:num] += ends.sum(1)
        length = self._length[:num]
        penalty = self._penalties[length + 1][:, None]
        normal = torch.where(ends, scores, self._never) / penalty
        if num_beams == 1:
            best, path = normal[:, 0], ancestry[:, 0]
        else:
            best, rank = normal.max(1)
            path = ancestry[self._rows[:num], beam.gather(1, rank[:, None])[:, 0]]
        better = best > self._best[:num]
        kept = self._best_path[:num, : path.shape[1]]
        kept.copy_(torch.where(better[:, None], path, kept))
        self._best_length[:num] = torch.where(better, length, self._best_length[:num])
        self._best[:num] = torch.where(better, best, self._best[:num])

    def _finish(self, num: int) -> None:
        """A sentence is done when enough has ended, or when nothing open can become the best."""
        limit, best = self._limit[:num], self._best[:num]
        hope = self._scores[:num, 0] / self._last_penalty[:num]
        done = (self._num_ended[:num] >= self._search.num_beams) | (best >= hope)
        self.done[:num] |= done | (limit <= self._length[:num])

    def results(self, places: Sequence[int]) -> list[Hypothesis]:
        """Read what was found for sentences that are done, and free their slots."""
        chosen = torch.tensor(list(places), device=self._rows.device)
        path = self._best_path[chosen].long().clamp(min=0)[..., None]
        said = self._read[chosen].gather(2, path)[..., 0].tolist()
        lengths, scores = self._best_length[chosen].tolist(), self._best[chosen].tolist()
        self._length[chosen] = 0  # a free slot must fit into any extent
        # The first token read is <s>.
        return [
            Hypothesis(tuple(tokens[1 : length + 1]), score)
            for tokens, length, score in zip(said, lengths, scores, strict=True)
        ]


def largest(values: Tensor, num: int) -> tuple[Tensor, Tensor]:
    """The `num` largest of the last dimension, and where they are, like `topk`.

    Over a long dimension: the largest lie in the chunks with the largest maxima, so that all but a
    few entries are looked at once.
    """
    if num == 1:
        best = values.max(-1, keepdim=True)
        return best.values, best.indices
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
