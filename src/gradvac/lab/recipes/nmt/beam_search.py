"""Beam search with a KV cache: the best translation that can be found.

Sentences go forward together, one token a step, each in a slot of its own. A slot whose sentence is
done gets the next one; when none is left, the open ones move together. How many slots there are
follows from memory.

Slots are allocated once and changed in place, and a step decides nothing on the host: so a step can
be recorded as a CUDA graph, and nobody waits for the device. On a GPU the host checks only every
few steps who is done. What is chosen among the next tokens is up to `BeamSlots` and `GreedySlots`.
"""

# R slots, K beams, V vocabulary, L steps, S source tokens

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from gradvac.lab.recipes.nmt.batches import Ragged, Side, Tokens
from gradvac.lab.recipes.nmt.model import KVCache, StepContext, Transformer
from gradvac.lab.recipes.nmt.settings import DecodingConfig
from gradvac.lab.recipes.nmt.vocabulary import BOS, EOS
from gradvac.lab.training.environment import any_shape_attention
from gradvac.utils.cuda_graph import DEVICE_WORK, free_generator

_CPU_MEMORY = 1 << 28
_CPU_ROWS = 256  # beams of all slots: a processor gains nothing from more
_GPU_SHARE = 0.4  # of the free memory
_CHUNK = 64  # entries of which only the largest is looked at first


class Hypothesis(NamedTuple):
    """A translation.

    Attributes:
        tokens: Without `</s>`.
        score: Log-probability, `</s>` included, divided by the length penalty.
    """

    tokens: tuple[int, ...]
    score: float


def length_penalty(length: int | Tensor, alpha: float) -> float | Tensor:
    """((5 + length) / 6)^alpha (Wu et al., 2016): larger alpha favours longer translations."""
    return ((5.0 + length) / 6.0) ** alpha


class Extent(NamedTuple):
    """How much of the slots is in use: the beginning of every dimension."""

    num_slots: int
    source: int
    target: int


class BeamSearch:
    """Translates sentences of token numbers, as many at a time as memory holds.

    A sentence is done when as many translations as beams have ended, or when nothing that is still
    open can become better than the best that has.

    Args:
        model: In eval mode, on its device.
        settings: How to search.
        forbidden: Tokens that are never generated (padding, language tokens).
        check_every: Steps between two checks who is done; None: 1 on a CPU, 8 on a GPU.
    """

    def __init__(
        self,
        model: Transformer,
        settings: DecodingConfig,
        forbidden: Sequence[int] = (),
        *,
        check_every: int | None = None,
    ) -> None:
        self._model, self._forbidden, self.device = model, forbidden, model.embedding.weight.device
        self._settings, given = settings, settings.memory
        self._memory = _free_memory(self.device) if given is None else int(given * (1 << 30))
        self.check_every = check_every or (1 if self.device.type == "cpu" else 8)
        self._slots: Slots | None = None
        is_recorded = settings.cuda_graph and self.device.type == "cuda"
        self._graphs = _Graphs(self.device) if is_recorded else None

    @torch.inference_mode()
    def decode(self, sources: Ragged, limits: Sequence[int]) -> list[Hypothesis]:
        """Find the best translation of every sentence, in order.

        Args:
            sources: With everything the encoder reads.
            limits: Most tokens of each translation, `</s>` included; at the limit it must end.
        """
        sentences = np.split(sources.tokens, np.cumsum(sources.lengths)[:-1])
        results: dict[int, Hypothesis] = {}
        with torch.autocast(self.device.type, enabled=False), any_shape_attention(self.device):
            for group in self._groups(sources.lengths, limits):
                size, slots = self._make_slots(group, sources.lengths, limits)
                results |= _Group(self, slots, size, sentences, limits).translate(group)
        return [results[number] for number in range(len(sentences))]

    def _groups(self, lengths: Tokens, limits: Sequence[int]) -> Iterator[list[int]]:
        """Sentences longest first; if they do not all fit, then those of like length together."""
        order = sorted(range(len(limits)), key=lambda n: (-limits[n], -lengths[n]))
        while order:
            size = len(order)
            if self._max_slots(order, lengths, limits) < size:
                size = sum(2 * limits[n] > limits[order[0]] for n in order)
            yield order[:size]
            order = order[size:]

    def _max_slots(self, group: list[int], lengths: Tokens, limits: Sequence[int]) -> int:
        """How many sentences as long as the longest of a group fit into memory."""
        most = max(1, self._memory // self._bytes(*self._lengths(group, lengths, limits)))
        if self.device.type == "cpu":
            most = min(most, max(1, _CPU_ROWS // self._settings.beams))
        return int(most)

    def _bytes(self, source: int, target: int) -> int:
        """What a slot takes."""
        model, num_beams = self._model, self._settings.beams
        size, weight = model.size, model.embedding.weight
        places = source + num_beams * target
        cached = 2 * size.decoder_layers * size.width * places * weight.itemsize
        # Logits, their logarithms, and a copy of either while the largest are sought.
        return cached + num_beams * len(weight) * (weight.itemsize + 12)

    def _lengths(self, group: list[int], lengths: Tokens, limits: Sequence[int]) -> tuple[int, int]:
        longest = int(max(lengths[n] for n in group))
        # A sentence that is done goes on until the next check, and counts one step more.
        steps = max(limits[n] for n in group) + self.check_every + 1
        return _round_up(longest, 16), _round_up(steps, 32)

    def _make_slots(
        self, group: list[int], lengths: Tokens, limits: Sequence[int]
    ) -> tuple[int, Slots]:
        """Slots for a group, and how many of them to use.

        Those of the group before, with all that is recorded of them, if they are large enough; else
        new ones that would have done for both groups, if memory allows.
        """
        most = self._max_slots(group, lengths, limits)
        num_slots = self.padded(len(group)) if len(group) <= most else most
        needed = Extent(num_slots, *self._lengths(group, lengths, limits))
        present = Extent(0, 0, 0) if self._slots is None else self._slots.extent
        both = Extent(*map(max, needed, present))
        if both.num_slots * self._bytes(both.source, both.target) > self._memory:
            both = needed
        if self._slots is None or both != present:
            if self._graphs is not None:
                self._graphs.clear()
            self._slots = None  # before the next are allocated
            kind = GreedySlots if self._settings.beams == 1 else BeamSlots
            self._slots = kind(self._model, self._settings, self._forbidden, both)
        return num_slots, self._slots

    def padded(self, num: int) -> int:
        """Slots to step for so many open sentences: on a GPU few different numbers, for graphs."""
        if self.device.type == "cpu":
            return num
        return _round_up(num, max(1, (1 << (num - 1).bit_length()) // 16))

    def advance(self, slots: Slots, extent: Extent, num_steps: int) -> None:
        """Take some steps."""
        for _ in range(num_steps):
            if self._graphs is None:
                slots.advance(extent)
            else:
                self._graphs.advance(slots, extent)


class _Group:
    """Sentences on their way through the slots."""

    def __init__(
        self,
        search: BeamSearch,
        slots: Slots,
        size: int,
        sentences: list[Tokens],
        limits: Sequence[int],
    ) -> None:
        self._search, self._slots = search, slots
        self._sentences, self._limits = sentences, limits
        self._in_slots = self._free(size)
        self._results: dict[int, Hypothesis] = {}

    @staticmethod
    def _free(size: int) -> Tokens:
        """Of every slot its sentence (-1: none), limit, steps taken, source tokens: `[4, R]`."""
        return np.tile([[-1], [0], [0], [0]], size)

    def translate(self, group: list[int]) -> dict[int, Hypothesis]:
        """Translate the sentences of a group: number -> translation."""
        waiting = group[::-1]
        while len(self._results) < len(group):
            num_slots = self._in_slots.shape[1]
            num_open = int((self._in_slots[0] >= 0).sum())
            if waiting and num_slots - num_open >= max(1, num_slots // 8):
                self._fill(waiting)
            elif not waiting and self._search.padded(num_open) <= 3 * num_slots // 4:
                self._move_together()
            self._advance()
            self._collect()
        return self._results

    def _fill(self, waiting: list[int]) -> None:
        most = 4096 if self._search.device.type == "cpu" else 65_536  # tokens encoded at a time
        places = np.flatnonzero(self._in_slots[0] < 0)
        while len(places) and waiting:
            size = max(1, most // len(self._sentences[waiting[-1]]))
            size = min(size, len(places), len(waiting))
            numbers = [waiting.pop() for _ in range(size)]
            taken, places = places[:size], places[size:]
            ragged = Ragged.of([self._sentences[n] for n in numbers])
            side = Side.make(ragged, packed=False)
            limits = [self._limits[n] for n in numbers]
            self._slots.fill(taken.tolist(), side.to(self._search.device), limits)
            self._in_slots[:, taken] = np.array([numbers, limits, [0] * size, ragged.lengths])

    def _move_together(self) -> None:
        places = np.flatnonzero(self._in_slots[0] >= 0)
        self._slots.keep(places.tolist())
        free = self._free(self._search.padded(len(places)) - len(places))
        self._in_slots = np.concatenate([self._in_slots[:, places], free], axis=1)

    def _advance(self) -> None:
        """Some steps, as far as anyone needs."""
        _, limits, ages, lengths = self._in_slots[:, self._in_slots[0] >= 0]
        num_steps = min(self._search.check_every, int((limits - ages).max()))
        unit = 8 if self._search.device.type == "cpu" else 32
        # A slot that is done stays one step beyond its last.
        target = _round_up(int(ages.max()) + num_steps + 1, unit)
        source = _round_up(int(lengths.max()), 16)
        num_slots = self._in_slots.shape[1]
        extent = Extent(num_slots, source, min(target, self._slots.extent.target))
        self._search.advance(self._slots, extent, num_steps)
        self._in_slots[2] += num_steps

    def _collect(self) -> None:
        owners = self._in_slots[0]
        done = self._slots.done[: len(owners)].cpu().numpy()
        places = np.flatnonzero(done & (owners >= 0))
        if len(places):
            hypotheses = self._slots.results(places.tolist())
            self._results.update(zip(owners[places].tolist(), hypotheses, strict=True))
            owners[places] = -1


class Slots(ABC):
    """Sentences that are being translated, and all that is known of them; at first all are free."""

    def __init__(
        self,
        model: Transformer,
        settings: DecodingConfig,
        forbidden: Sequence[int],
        extent: Extent,
    ) -> None:
        weight = model.embedding.weight
        self._model, self._num_beams, device = model, settings.beams, weight.device
        num_slots, source, target = extent
        num_beams = settings.beams
        self.extent = extent
        self._cache = model.make_cache(num_slots, num_beams, source=source, target=target)
        self._cache_parts: dict[Extent, KVCache] = {}
        self._rows = torch.arange(num_slots, device=device)
        self._forbidden = torch.tensor(forbidden, dtype=torch.int64, device=device)
        # What attention adds, 0 where a key is seen; every layer would make it of a mask of bools.
        self._seen, self._unseen = weight.new_zeros(()), weight.new_full((), -torch.inf)
        self._source_mask = weight.new_full((num_slots, 1, 1, source), -torch.inf)
        self._tokens = torch.zeros(num_slots, target, num_beams, dtype=torch.int64, device=device)
        self._newest = self._tokens.new_full((num_slots, num_beams), BOS)
        kind = torch.promote_types(weight.dtype, torch.float32)
        self._scores = torch.zeros(num_slots, num_beams, dtype=kind, device=device)
        lengths = torch.arange(target + 2, dtype=torch.float64)
        penalties = torch.as_tensor(length_penalty(lengths, settings.length_penalty))
        self._penalties = penalties.to(device, kind)  # of a translation of so many tokens
        # Numbers of the host would be copied to the device at every use.
        self._eos = self._tokens.new_full((), EOS)
        self._length = self._tokens.new_zeros(num_slots)  # steps taken
        self._last = self._tokens.new_zeros(num_slots)  # the last step that may be taken
        self.done = torch.ones(num_slots, dtype=torch.bool, device=device)

    def _by_slot(self) -> list[Tensor]:
        """The tensors whose dimension 0 counts slots."""
        state = [self._source_mask, self._tokens, self._newest, self._scores, self._length]
        return [*state, self._last, self.done, *(part for layer in self._cache for part in layer)]

    def fill(self, places: Sequence[int], source: Side, limits: Sequence[int]) -> None:
        """Put new sentences into slots.

        Args:
            places: The slots.
            source: The sentences, padded, on the model's device.
            limits: Most tokens of their translations, `</s>` included.
        """
        device = self._rows.device
        chosen = torch.tensor(list(places), device=device)
        for layer, (keys, values) in zip(self._cache, self._model.read_source(source), strict=True):
            layer.source_keys[chosen, :, : source.longest] = keys
            layer.source_values[chosen, :, : source.longest] = values
        self._source_mask[chosen] = -torch.inf
        real = source.mask
        shown = self._seen if real is None else torch.where(real, self._seen, self._unseen)
        self._source_mask[chosen, :, :, : source.longest] = shown
        self._newest[chosen] = BOS
        self._last[chosen] = torch.tensor(list(limits), device=device) - 1
        self._length[chosen] = 0
        self.done[chosen] = False
        self._reset(chosen)

    @abstractmethod
    def _reset(self, chosen: Tensor) -> None:
        """Forget what was found in slots."""

    def keep(self, places: Sequence[int]) -> None:
        """Move slots to the front, in that order; the others are free."""
        chosen = torch.tensor(list(places), device=self._rows.device)
        for tensor in self._by_slot():
            tensor[: len(places)] = tensor[chosen]
        self.done[len(places) :] = True
        self._length[len(places) :] = 0

    def advance(self, extent: Extent) -> None:
        """Continue every beam of the first slots by one token.

        Args:
            extent: Slots, source tokens and steps in use; more steps than any slot has taken.
        """
        num, source, target = extent
        rows, steps = self._rows[:num], self._length[:num]
        self._tokens[rows, steps] = self._newest[:num]
        masks = (self._target_mask(num, target), self._source_mask[:num, ..., :source])
        context = StepContext(rows, steps, *masks)
        logits = self._model.step(self._newest[:num], self._cache_part(extent), context)
        self._choose(logits.log_softmax(-1, dtype=self._scores.dtype))

    def _cache_part(self, extent: Extent) -> KVCache:
        """What an extent has of the cache."""
        if extent not in self._cache_parts:
            num, source, places = *extent[:2], extent.target * self._num_beams
            self._cache_parts[extent] = [layer.part(num, source, places) for layer in self._cache]
        return self._cache_parts[extent]

    @abstractmethod
    def _target_mask(self, num: int, steps: int) -> Tensor:
        """What each beam of the first slots sees, `[R, 1, K, L * K]`; asked for first in a step."""

    @abstractmethod
    def _choose(self, log_probs: Tensor) -> None:
        """Choose among the next tokens, `[R, K, V]`."""

    def results(self, places: Sequence[int]) -> list[Hypothesis]:
        """Read what was found for sentences that are done, and free their slots.

        Raises:
            ValueError: The model's scores are not finite.
        """
        chosen = torch.tensor(list(places), device=self._rows.device)
        tokens, lengths, scores = (tensor.tolist() for tensor in self._found(chosen))
        if not all(map(math.isfinite, scores)):
            raise ValueError(
                "model: its scores are not finite, so that it cannot translate. Are its weights? "
                "If they are, bf16 may be too narrow for them: use train.precision=fp32."
            )
        self._length[chosen] = 0  # a free slot must fit into any extent
        # The first token read is <s>.
        return [
            Hypothesis(tuple(read[1 : length + 1]), score)
            for read, length, score in zip(tokens, lengths, scores, strict=True)
        ]

    @abstractmethod
    def _found(self, chosen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens read, `[R, L]`, how many were generated, and the score, of slots that are done."""


class GreedySlots(Slots):
    """Greedy search: the likeliest token goes on, and a sentence is done when its translation ends.

    There is no ancestry, and nothing to compare: a step is a third of the operations that beams
    need beside the model.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        steps = self._source_mask.new_full((self.extent.target, self.extent.target), -torch.inf)
        self._causal = steps.triu(1)  # what is seen at every step: all up to it
        self._zero = self._scores.new_zeros(())

    def _reset(self, chosen: Tensor) -> None:
        self._scores[chosen] = 0.0

    def _target_mask(self, num: int, steps: int) -> Tensor:
        return self._causal[:, :steps][self._length[:num]][:, None, None]

    def _choose(self, log_probs: Tensor) -> None:
        num = len(log_probs)
        log_probs.index_fill_(-1, self._forbidden, -torch.inf)
        best, token = log_probs.max(-1)  # [R, 1]
        length, scores, done = self._length[:num], self._scores[:num], self.done[:num]
        must_end = (self._last[:num] <= length)[:, None]
        best = torch.where(must_end, log_probs[..., EOS], best)
        newest = torch.where(must_end, self._eos, token, out=self._newest[:num])
        scores += torch.where(done[:, None], self._zero, best)
        length += ~done
        done |= newest[:, 0] == self._eos

    def _found(self, chosen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        length = self._length[chosen]
        scores = self._scores[chosen, 0] / self._penalties[length]
        return self._tokens[chosen, :, 0], length - 1, scores


class BeamSlots(Slots):
    """Beam search: the best continuations of all beams of a sentence go on.

    When a beam continues another one, no key or value moves: every beam remembers its *ancestry*,
    the beam that it was at each step.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        num_slots, _, target = self.extent
        self._beams = self._rows.new_tensor(range(self._num_beams), dtype=torch.int16)
        # -1: that step has not been taken, and what lies there is not to be seen.
        self._ancestry = self._beams.new_full((num_slots, self._num_beams, target), -1)
        self._in_use = self._ancestry  # of it, what a step sees
        self._last_penalty = self._penalties.new_ones(num_slots)  # of one as long as can be
        self._never = self._scores.new_full((), -torch.inf)
        self._num_ended = self._tokens.new_zeros(num_slots)
        self._best = self._scores.new_full((num_slots,), -torch.inf)
        self._best_path = self._ancestry.new_zeros(num_slots, target)
        self._best_length = self._tokens.new_zeros(num_slots)

    def _by_slot(self) -> list[Tensor]:
        best = [self._best, self._best_path, self._best_length]
        return [*super()._by_slot(), self._ancestry, self._last_penalty, self._num_ended, *best]

    def _reset(self, chosen: Tensor) -> None:
        # All beams start alike, so only the first may be continued at first.
        self._scores[chosen] = torch.where(self._beams > 0, -torch.inf, 0.0).to(self._scores.dtype)
        self._ancestry[chosen] = -1
        self._last_penalty[chosen] = self._penalties[self._last[chosen] + 1]
        for counts in (self._num_ended, self._best_length):
            counts[chosen] = 0
        self._best[chosen] = -torch.inf

    def _target_mask(self, num: int, steps: int) -> Tensor:
        self._in_use = ancestry = self._ancestry[:num, :, :steps]
        ancestry[self._rows[:num], :, self._length[:num]] = self._beams
        readable = (ancestry[..., None] == self._beams).flatten(2)[:, None]
        return torch.where(readable, self._seen, self._unseen)

    def _choose(self, log_probs: Tensor) -> None:
        num, num_beams, _ = log_probs.shape
        ancestry = self._in_use
        scores, beam, token = self._candidates(log_probs)
        ends, is_open = token == self._eos, ~self.done[:num]
        self._end(scores, beam, ends & is_open[:, None], ancestry)
        scores, order = torch.where(ends, self._never, scores).topk(num_beams)
        beam, token = beam.gather(1, order), token.gather(1, order)
        ancestry.copy_(ancestry.gather(1, beam[..., None].expand_as(ancestry)))
        self._scores[:num] = scores
        self._newest[:num] = token
        self._length[:num].add_(is_open)
        self._finish(num)

    def _candidates(self, log_probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The best continuations of each slot: score, beam and token, `[R, 2 K]`.

        Each beam can end in one way only, so that twice as many hold enough that go on.
        """
        num, num_beams, vocabulary = log_probs.shape
        log_probs.index_fill_(-1, self._forbidden, -torch.inf)
        wanted = min(2 * num_beams, vocabulary)
        values, tokens = largest(log_probs, wanted)
        must_end = (self._last[:num] <= self._length[:num])[:, None, None]
        end = log_probs[..., EOS, None]
        end = torch.cat([end, self._never.expand(num, num_beams, wanted - 1)], -1)
        values = torch.where(must_end, end, values)
        tokens = torch.where(must_end, self._eos, tokens)
        totals = (self._scores[:num, :, None] + values).flatten(1)
        scores, where = totals.topk(min(2 * num_beams, totals.shape[1]))
        return scores, where // wanted, tokens.flatten(1).gather(1, where)

    def _end(self, scores: Tensor, beam: Tensor, ends: Tensor, ancestry: Tensor) -> None:
        """Keep the best translation that ends now, if it is better than those before."""
        num, num_beams = len(scores), self._num_beams
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
        done = (self._num_ended[:num] >= self._num_beams) | (self._best[:num] >= hope)
        self.done[:num].logical_or_(done | (self._last[:num] < self._length[:num]))

    def _found(self, chosen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        path = self._best_path[chosen].long().clamp(min=0)[..., None]
        tokens = self._tokens[chosen].gather(2, path)[..., 0]
        return tokens, self._best_length[chosen], self._best[chosen]


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


class _Graphs:
    """Steps recorded as CUDA graphs, one for every extent."""

    def __init__(self, device: torch.device) -> None:
        self._graphs: dict[Extent, torch.cuda.CUDAGraph | None] = {}
        self._device, self._stream = device, torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._works = True

    def clear(self) -> None:
        """Forget everything recorded."""
        self._graphs.clear()
        self._pool = torch.cuda.graph_pool_handle()

    def advance(self, slots: Slots, extent: Extent) -> None:
        """Take a step; the second time an extent comes, record it, and from then on replay."""
        graph = None
        if extent in self._graphs and self._works:
            graph = self._graphs[extent] or self._record(slots, extent)
        self._graphs[extent] = graph
        if graph is None:
            slots.advance(extent)
        else:
            graph.replay()

    def _record(self, slots: Slots, extent: Extent) -> torch.cuda.CUDAGraph | None:
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        try:
            with DEVICE_WORK, torch.cuda.stream(self._stream):
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    slots.advance(extent)
                finally:
                    graph.capture_end()
        except RuntimeError as error:
            self._works = False
            free_generator(self._device)
            warnings.warn(
                f"translation runs without CUDA graphs, which is slower: {error}", stacklevel=2
            )
            return None
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        return graph


def _round_up(number: int, unit: int) -> int:
    """The next multiple of a unit."""
    return -(-number // unit) * unit


def _free_memory(device: torch.device) -> int:
    if device.type == "cpu":
        return _CPU_MEMORY
    free, _ = torch.cuda.mem_get_info(device)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(_GPU_SHARE * (free + unused))
