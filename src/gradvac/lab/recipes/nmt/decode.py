"""Beam search: the best translation the model can be found to say.

Sentences go forward together, one token a step, each in a slot of its own (`slots.py`). A slot
whose sentence is done gets the next one; when none is left, the open ones move together. How many
slots there are follows from memory. On a GPU the host looks only every few steps who is done, and
steps can be recorded as CUDA graphs.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from gradvac.cuda_graph import DEVICE_WORK, free_generator
from gradvac.lab.recipes.nmt.batch import Side
from gradvac.lab.recipes.nmt.beams import Beams
from gradvac.lab.recipes.nmt.greedy import Greedy
from gradvac.lab.recipes.nmt.model import Transformer
from gradvac.lab.recipes.nmt.ragged import Ragged, Tokens
from gradvac.lab.recipes.nmt.slots import Extent, Hypothesis, Search, Slots, length_penalty
from gradvac.lab.training.environment import any_shape_attention

__all__ = ["Decoder", "Hypothesis", "Search", "length_penalty", "search"]

_CPU_MEMORY = 1 << 28
_CPU_ROWS = 256  # beams of all slots: a processor gains nothing from more
_GPU_SHARE = 0.4  # of the free memory
_ENCODED_TOKENS = {"cpu": 4096}
_STEPS_PER_LOOK = {"cpu": 1}


def search(
    model: Transformer,
    sources: Ragged,
    *,
    bos: int,
    eos: int,
    limits: Sequence[int],
    num_beams: int = 4,
    alpha: float = 0.6,
    forbidden: Sequence[int] = (),
) -> list[Hypothesis]:
    """Translate sentences; `Decoder` has the same with more to choose.

    Args:
        model: In eval mode.
        sources: With everything the encoder reads.
        bos: Token a translation starts with.
        eos: Token it ends with.
        limits: Most tokens of each translation, `</s>` included; at the limit it must end.
        num_beams: 1 is greedy search.
        alpha: Exponent of the length penalty, at least 0.
        forbidden: Tokens that are never said (padding, language tokens).

    Returns:
        The best translation of every sentence, in order.
    """
    return Decoder(model, Search(bos, eos, num_beams, alpha, tuple(forbidden))).decode(
        sources, limits
    )


class Decoder:
    """Translates sentences in numbers, as many at a time as memory holds.

    A sentence is done when as many translations as beams have ended, or when nothing that is still
    open can become better than the best that has.

    Args:
        model: In eval mode, on its device.
        search: How to search.
        memory: Bytes for what is kept of the open sentences; None: some of what is free.
        look_every: Steps between two looks at who is done; None: 1 on a CPU, 8 on a GPU.
        graphs: Whether steps are recorded as CUDA graphs on a GPU.
    """

    def __init__(
        self,
        model: Transformer,
        search: Search,
        *,
        memory: int | None = None,
        look_every: int | None = None,
        graphs: bool = False,
    ) -> None:
        if search.num_beams < 1:
            raise ValueError(f"num_beams: must be at least 1, got {search.num_beams}.")
        if search.alpha < 0:
            raise ValueError(f"alpha: must not be negative, got {search.alpha}.")
        self._model, self._search, self._device = model, search, model.embedding.weight.device
        self._memory = _free_memory(self._device) if memory is None else memory
        self.look_every = look_every or _STEPS_PER_LOOK.get(self._device.type, 8)
        self._slots: Slots | None = None
        self._graphs = _Graphs(self._device) if graphs and self._device.type == "cuda" else None

    @torch.inference_mode()
    def decode(self, sources: Ragged, limits: Sequence[int]) -> list[Hypothesis]:
        """Find the best translation of every sentence, in order.

        Args:
            sources: With everything the encoder reads.
            limits: Most tokens of each translation, `</s>` included; at the limit it must end.
        """
        sentences = np.split(sources.tokens, np.cumsum(sources.lengths)[:-1])
        results: dict[int, Hypothesis] = {}
        with torch.autocast(self._device.type, enabled=False), any_shape_attention(self._device):
            for group in self._groups(sources.lengths, limits):
                size, slots = self._make_slots(group, sources.lengths, limits)
                results |= _Pass(self, slots, size, sentences, limits).run(group)
        return [results[number] for number in range(len(sentences))]

    def _groups(self, lengths: Tokens, limits: Sequence[int]) -> Iterator[list[int]]:
        """Sentences longest first; if they do not all fit, then those of like length together."""
        order = sorted(range(len(limits)), key=lambda n: (-limits[n], -lengths[n]))
        while order:
            size = len(order)
            if self._most_slots(order, lengths, limits) < size:
                size = sum(2 * limits[n] > limits[order[0]] for n in order)
            yield order[:size]
            order = order[size:]

    def _most_slots(self, group: list[int], lengths: Tokens, limits: Sequence[int]) -> int:
        """How many sentences as long as the longest of a group fit into memory."""
        most = max(1, self._memory // self._bytes(*self._lengths(group, lengths, limits)))
        if self._device.type == "cpu":
            most = min(most, max(1, _CPU_ROWS // self._search.num_beams))
        return int(most)

    def _bytes(self, source: int, target: int) -> int:
        """What a slot takes."""
        model, num_beams = self._model, self._search.num_beams
        size, weight = model.size, model.embedding.weight
        places = source + num_beams * target
        kept = 2 * size.decoder_layers * size.width * places * weight.itemsize
        # Logits, their logarithms, and a copy of either while the largest are sought.
        return kept + num_beams * len(weight) * (weight.itemsize + 12)

    def _lengths(self, group: list[int], lengths: Tokens, limits: Sequence[int]) -> tuple[int, int]:
        longest = int(max(lengths[n] for n in group))
        # A sentence that is done goes on until the next look, and counts one step more.
        steps = max(limits[n] for n in group) + self.look_every + 1
        return round_up(longest, 16), round_up(steps, 32)

    def _make_slots(
        self, group: list[int], lengths: Tokens, limits: Sequence[int]
    ) -> tuple[int, Slots]:
        """Slots for a group, and how many of them to use.

        Those of the group before, with all that is recorded of them, if they are large enough; else
        new ones that would have done for both groups, if memory allows.
        """
        most = self._most_slots(group, lengths, limits)
        num_slots = self.room(len(group)) if len(group) <= most else most
        needed = Extent(num_slots, *self._lengths(group, lengths, limits))
        there = Extent(0, 0, 0) if self._slots is None else self._slots.extent
        both = Extent(*map(max, needed, there))
        if both.num_slots * self._bytes(both.source, both.target) > self._memory:
            both = needed
        if self._slots is None or both != there:
            if self._graphs is not None:
                self._graphs.clear()
            self._slots = None  # before the next are allocated
            kind = Greedy if self._search.num_beams == 1 else Beams
            self._slots = kind(self._model, self._search, both)
        return num_slots, self._slots

    def room(self, num: int) -> int:
        """Slots to step for so many open sentences: on a GPU few different numbers, for graphs."""
        if self._device.type == "cpu":
            return num
        return round_up(num, max(1, (1 << (num - 1).bit_length()) // 16))

    def advance(self, slots: Slots, extent: Extent, num_steps: int) -> None:
        """Take some steps."""
        for _ in range(num_steps):
            if self._graphs is None:
                slots.advance(extent)
            else:
                self._graphs.advance(slots, extent)

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return self._device


class _Pass:
    """One group of sentences on its way through the slots."""

    def __init__(
        self,
        decoder: Decoder,
        slots: Slots,
        size: int,
        sentences: list[Tokens],
        limits: Sequence[int],
    ) -> None:
        self._decoder, self._slots = decoder, slots
        self._sentences, self._limits = sentences, limits
        self._size = size  # slots in use
        self._owners = np.full(size, -1)  # the sentence in every slot; -1: none
        self._left = np.zeros(size, dtype=np.int64)  # steps it may still take
        self._ages = np.zeros(size, dtype=np.int64)  # steps it has taken
        self._lengths = np.zeros(size, dtype=np.int64)  # tokens of its source
        self._results: dict[int, Hypothesis] = {}

    def run(self, group: list[int]) -> dict[int, Hypothesis]:
        """Translate the sentences of a group: number -> translation."""
        waiting = group[::-1]
        while len(self._results) < len(group):
            free = int((self._owners < 0).sum())
            if waiting and free >= max(1, self._size // 8):
                self._fill(waiting)
            elif not waiting and self._decoder.room(self._size - free) <= 3 * self._size // 4:
                self._move_together()
            self._advance()
            self._collect()
        return self._results

    def _fill(self, waiting: list[int]) -> None:
        most = _ENCODED_TOKENS.get(self._decoder.device.type, 65_536)
        places = np.flatnonzero(self._owners < 0)
        while len(places) and waiting:
            size = max(1, most // len(self._sentences[waiting[-1]]))
            size = min(size, len(places), len(waiting))
            numbers = [waiting.pop() for _ in range(size)]
            taken, places = places[:size], places[size:]
            ragged = Ragged.of([self._sentences[n] for n in numbers])
            side = Side.make(ragged, tasks=torch.zeros(size, dtype=torch.int64), packed=False)
            limits = [self._limits[n] for n in numbers]
            self._slots.fill(taken.tolist(), side.to(self._decoder.device), limits)
            self._owners[taken], self._ages[taken] = numbers, 0
            self._left[taken], self._lengths[taken] = limits, ragged.lengths

    def _move_together(self) -> None:
        places = np.flatnonzero(self._owners >= 0)
        self._slots.keep(places.tolist())
        self._size = self._decoder.room(len(places))
        for kept in ("_owners", "_left", "_ages", "_lengths"):
            values = getattr(self, kept)
            free = np.full(self._size - len(places), -1 if kept == "_owners" else 0)
            setattr(self, kept, np.concatenate([values[places], free]))

    def _advance(self) -> None:
        """Some steps, as far as anyone needs."""
        taken = self._owners >= 0
        num_steps = min(self._decoder.look_every, int(self._left[taken].max()))
        unit = 8 if self._decoder.device.type == "cpu" else 32
        # A slot that is done stays one step beyond its last.
        target = round_up(int(self._ages[taken].max()) + num_steps + 1, unit)
        source = round_up(int(self._lengths[taken].max()), 16)
        extent = Extent(self._size, source, min(target, self._slots.extent.target))
        self._decoder.advance(self._slots, extent, num_steps)
        self._ages += num_steps
        self._left -= num_steps

    def _collect(self) -> None:
        done = self._slots.done[: self._size].cpu().numpy()
        places = np.flatnonzero(done & (self._owners >= 0))
        if len(places):
            hypotheses = self._slots.results(places.tolist())
            self._results.update(zip(self._owners[places].tolist(), hypotheses, strict=True))
            self._owners[places] = -1


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
        if extent not in self._graphs or not self._works:
            self._graphs[extent] = None
            slots.advance(extent)
            return
        graph = self._graphs[extent]
        if graph is None:
            graph = self._record(slots, extent)
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
        self._graphs[extent] = graph
        return graph


def round_up(number: int, unit: int) -> int:
    """The next multiple of a unit."""
    return -(-number // unit) * unit


def _free_memory(device: torch.device) -> int:
    if device.type == "cpu":
        return _CPU_MEMORY
    free, _ = torch.cuda.mem_get_info(device)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(_GPU_SHARE * (free + unused))
