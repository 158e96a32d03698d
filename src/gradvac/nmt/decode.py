"""Beam search: the best translation the model can be found to say.

All sentences of a batch go forward together, one token a step, with cached keys and values.
Sentences that are done leave the batch. One beam is greedy search.
"""

# B sentences still searched, K beams, V vocabulary, L tokens of the longest translation

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradvac.nmt.batch import Side
from gradvac.nmt.model import Transformer


@dataclass(frozen=True)
class Hypothesis:
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


@torch.no_grad()
def search(
    model: Transformer,
    source: Side,
    *,
    bos: int,
    eos: int,
    limits: Sequence[int],
    num_beams: int = 4,
    alpha: float = 0.6,
    forbidden: Sequence[int] = (),
) -> list[Hypothesis]:
    """Translate a batch.

    A sentence is done when as many translations as beams have ended, or when nothing that is still
    open can become better than the best that has.

    Args:
        model: In eval mode.
        source: Padded sources on the model's device.
        bos: Token a translation starts with.
        eos: Token it ends with.
        limits: Most tokens of each translation, `</s>` included; at the limit it must end.
        num_beams: K.
        alpha: Exponent of the length penalty, at least 0.
        forbidden: Tokens that are never said (padding, language tokens).

    Returns:
        The best translation of every sentence, in order.
    """
    if num_beams < 1:
        raise ValueError(f"num_beams: must be at least 1, got {num_beams}.")
    if alpha < 0:
        raise ValueError(f"alpha: must not be negative, got {alpha}.")
    beams = _Beams(source, num_beams, alpha, bos, eos, limits)
    cache = model.begin(source, num_beams)
    blocked = torch.tensor(list(forbidden), dtype=torch.int64, device=source.tokens.device)
    while len(beams):
        logits = model.step(beams.newest, cache)
        chances = logits.log_softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
        cache.select(*beams.advance(chances.index_fill(-1, blocked, -torch.inf)))
    return beams.results()


_PER_SENTENCE = (
    "newest", "_scores", "_history", "_num_ended", "_best", "_said", "_limits", "_numbers",
)  # fmt: skip


class _Beams:
    """Open translations, and the best ended one of every sentence."""

    def __init__(
        self, source: Side, num_beams: int, alpha: float, bos: int, eos: int, limits: Sequence[int]
    ) -> None:
        device, size = source.tokens.device, source.num_sentences
        self._alpha, self._eos, self._length = alpha, eos, 0
        self._limits = torch.tensor(list(limits), device=device)
        self._numbers = torch.arange(size, device=device)  # of the open sentences in the batch
        self.newest = torch.full((size, num_beams), bos, device=device)  # [B, K]
        # All beams start alike, so only the first may be continued at first.
        self._scores = torch.full((size, num_beams), -torch.inf, device=device)
        self._scores[:, 0] = 0.0
        self._history = self.newest.new_empty(size, num_beams, 0)
        self._num_ended = torch.zeros(size, dtype=torch.int64, device=device)
        self._best = torch.full((size,), -torch.inf, device=device)
        self._results: list[Hypothesis | None] = [None] * size
        self._said = self.newest.new_full((size, int(self._limits.max())), eos)  # [B, L]

    def __len__(self) -> int:
        return len(self._numbers)

    def results(self) -> list[Hypothesis]:
        """Return the best translations once nothing is open."""
        return [found for found in self._results if found is not None]

    def advance(self, chances: Tensor) -> tuple[Tensor | None, Tensor]:
        """Continue every beam by one token.

        Args:
            chances: Log-probabilities of the next token, `[B, K, V]`.

        Returns:
            Sentences that stay open (None: all), and the row each of their beams continues.
        """
        num_beams, vocabulary = chances.shape[1:]
        self._length += 1
        at_limit = self._limits <= self._length
        if bool(at_limit.any()):
            others = torch.arange(vocabulary, device=chances.device) != self._eos
            chances = chances.masked_fill(at_limit[:, None, None] & others, -torch.inf)
        totals = (self._scores.to(chances.dtype)[:, :, None] + chances).flatten(1)
        # Each beam can end in one way only: twice as many hold enough that go on.
        scores, where = totals.topk(min(2 * num_beams, totals.shape[1]))
        beam, token = where // vocabulary, where % vocabulary
        ends = token == self._eos
        self._end(scores[:, :num_beams], beam, ends[:, :num_beams])
        self._scores, order = scores.masked_fill(ends, -torch.inf).topk(num_beams)
        beam, self.newest = beam.gather(1, order), token.gather(1, order)
        rows = torch.arange(len(self), device=beam.device)[:, None]
        self._history = torch.cat([self._history[rows, beam], self.newest[:, :, None]], 2)
        return self._leave(rows * num_beams + beam)

    def _end(self, scores: Tensor, beam: Tensor, ends: Tensor) -> None:
        """Keep the best translation that ends now, if it is better than those before."""
        ends = ends & scores.isfinite()
        self._num_ended += ends.sum(1)
        normal = scores.masked_fill(~ends, -torch.inf) / length_penalty(self._length, self._alpha)
        best, rank = normal.max(1)
        better = best > self._best
        self._best = torch.where(better, best.to(self._best.dtype), self._best)
        rows = torch.arange(len(self), device=beam.device)
        history = self._history[rows, beam[rows, rank]]  # [B, length - 1]
        ended = torch.full_like(self._said, self._eos)
        ended[:, : self._length - 1] = history
        self._said = torch.where(better[:, None], ended, self._said)

    def _leave(self, rows: Tensor) -> tuple[Tensor | None, Tensor]:
        """Let sentences go that are done."""
        hope = self._scores[:, 0] / length_penalty(self._limits, self._alpha)
        done = (self._num_ended >= self._scores.shape[1]) | (self._best >= hope)
        done |= self._limits <= self._length
        leaving = done.tolist()
        if not any(leaving):
            return None, rows.flatten()
        for row, is_done in enumerate(leaving):
            if is_done:
                said = self._said[row].tolist()
                tokens = said[: said.index(self._eos)] if self._eos in said else said
                number = int(self._numbers[row])
                self._results[number] = Hypothesis(tuple(tokens), float(self._best[row]))
        stay = (~done).nonzero().squeeze(1)
        for name in _PER_SENTENCE:
            setattr(self, name, getattr(self, name)[stay])
        return stay, rows[stay].flatten()
