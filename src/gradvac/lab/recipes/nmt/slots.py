"""Slots: sentences that are being translated, and all that is known of them.

Everything is allocated once and changed in place, and a step decides nothing on the host: so a step
can be recorded as a CUDA graph, and nobody waits for the device. What is chosen among the next
tokens is said by `greedy.py` and `beams.py`.
"""

# R slots, K beams, V vocabulary, L steps, S source tokens

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gradvac.lab.recipes.nmt.attention import Moment
from gradvac.lab.recipes.nmt.batch import Side
from gradvac.lab.recipes.nmt.model import Cache, Transformer


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


class Slots(ABC):
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
        self._cache = model.make_cache(num_slots, num_beams, source=source, target=target)
        self._parts: dict[Extent, Cache] = {}
        self._rows = torch.arange(num_slots, device=device)
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
        # Numbers of the host would be copied to the device at every use.
        self._eos = self._read.new_full((), search.eos)
        self._length = self._read.new_zeros(num_slots)  # steps taken
        self._last = self._read.new_zeros(num_slots)  # the last step that may be taken
        self.done = torch.ones(num_slots, dtype=torch.bool, device=device)

    def _own(self) -> list[Tensor]:
        """What belongs to the slots, which dimension 0 counts."""
        tensors = [self._source, self._read, self._newest, self._scores, self._length, self._last]
        return [*tensors, self.done, *(part for layer in self._cache for part in layer.tensors())]

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
        self._source[chosen] = -torch.inf
        real = source.mask
        shown = self._seen if real is None else torch.where(real, self._seen, self._unseen)
        self._source[chosen, :, :, : source.longest] = shown
        self._newest[chosen] = self._search.bos
        self._last[chosen] = torch.tensor(list(limits), device=device) - 1
        self._length[chosen] = 0
        self.done[chosen] = False
        self._begin(chosen)

    @abstractmethod
    def _begin(self, chosen: Tensor) -> None:
        """Forget what was found in slots."""

    def keep(self, places: Sequence[int]) -> None:
        """Move slots to the front, in that order; the others are free."""
        chosen = torch.tensor(list(places), device=self._rows.device)
        for tensor in self._own():
            tensor[: len(places)] = tensor[chosen]
        self.done[len(places) :] = True
        self._length[len(places) :] = 0

    def advance(self, extent: Extent) -> None:
        """Continue every beam of the first slots by one token.

        Args:
            extent: Slots, source tokens and steps in use; more steps than any slot has taken.
        """
        num, steps = extent.num_slots, extent.target
        rows, at = self._rows[:num], self._length[:num]
        self._read[rows, at] = self._newest[:num]
        now = Moment(rows, at, self._readable(num, steps), self._source[:num, ..., : extent.source])
        logits = self._model.step(self._newest[:num], self._part(extent), now)
        self._choose(logits.log_softmax(-1, dtype=self._scores.dtype))

    def _part(self, extent: Extent) -> Cache:
        """What an extent has of the cache."""
        if extent not in self._parts:
            num, source, places = *extent[:2], extent.target * self._search.num_beams
            self._parts[extent] = [layer.part(num, source, places) for layer in self._cache]
        return self._parts[extent]

    @abstractmethod
    def _readable(self, num: int, steps: int) -> Tensor:
        """What each beam of the first slots sees, `[R, 1, K, L * K]`; asked for first in a step."""

    @abstractmethod
    def _choose(self, chances: Tensor) -> None:
        """Choose among the next tokens, whose log-probabilities are `[R, K, V]`."""

    def results(self, places: Sequence[int]) -> list[Hypothesis]:
        """Read what was found for sentences that are done, and free their slots.

        Raises:
            ValueError: The model says what is no number.
        """
        chosen = torch.tensor(list(places), device=self._rows.device)
        said, lengths, scores = (tensor.tolist() for tensor in self._found(chosen))
        if not all(map(math.isfinite, scores)):
            raise ValueError(
                "model: its scores are not finite, so that it cannot translate. Are its weights? "
                "If they are, bf16 may be too narrow for them: use train.precision=fp32."
            )
        self._length[chosen] = 0  # a free slot must fit into any extent
        # The first token read is <s>.
        return [
            Hypothesis(tuple(tokens[1 : length + 1]), score)
            for tokens, length, score in zip(said, lengths, scores, strict=True)
        ]

    @abstractmethod
    def _found(self, chosen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens read, `[R, L]`, how many were said, and the score, of slots that are done."""
