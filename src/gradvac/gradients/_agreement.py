"""What the processes of a job tell each other before they exchange gradients."""

# W processes, T tasks

import hashlib
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gradvac import gram as geometry
from gradvac.gradients._components import Components
from gradvac.gradients._distributed import Ranks
from gradvac.indices import index_on

_WORD = 48  # bits that a float64 holds without rounding
_FINE, _FAILED, _CHANGED = 0.0, 1.0, 2.0  # what a process says before the exchange


@dataclass(frozen=True)
class Agreed:
    """What all processes know of a step.

    Attributes:
        present: Tasks that any of them has, by name.
        losses: Their losses, `[T]`: means over processes, as gradients are.
        held: The tasks of every process.
        used: Parameters that any task of any process reached.
    """

    present: tuple[int, ...]
    losses: Tensor
    held: tuple[tuple[int, ...], ...]
    used: frozenset[nn.Parameter]


class Agreement:
    """A few numbers of every process, before each step; everything they were set up with, once.

    Args:
        ranks: The processes.
        tasks: Task names.
        components: The model's components.
        parameters: Theirs, in order.
        facts: What else must be the same: name -> value. Asked again when the state has changed.
    """

    def __init__(
        self,
        ranks: Ranks,
        tasks: Sequence[str],
        components: Components,
        parameters: Sequence[nn.Parameter],
        facts: Callable[[], Mapping[str, object]],
    ) -> None:
        self._ranks, self._tasks, self._components = ranks, tuple(tasks), components
        self._parameters, self._facts = parameters, facts
        self._device = parameters[0].device
        self._state, self._is_known = _CHANGED, False

    def state_changed(self) -> None:
        """Compare the rule's state with that of the other processes before the next step."""
        self._state = _CHANGED

    def fail(self, error: Exception) -> None:
        """Tell the others, who wait for us, that this step will not be."""
        self._first_words()
        self._ranks.all_gather(self._words(_FAILED, {}, ()))
        self._ranks.gather_objects(f"{type(error).__name__}: {error}")

    def agree(self, losses: Mapping[int, Tensor], used: Collection[nn.Parameter]) -> Agreed:
        """Learn who holds what.

        Args:
            losses: Of the tasks of this process.
            used: Parameters that they reach.

        Raises:
            RuntimeError: Another process could not do its part.
            ValueError: The processes are not set up alike, or none has a row.
        """
        self._first_words()
        words = self._ranks.all_gather(self._words(self._state, losses, used))
        known = words.tolist()
        said = [own[0] for own in known]
        if _FAILED in said:
            messages = self._ranks.gather_objects(None)
            rank = said.index(_FAILED)
            raise RuntimeError(
                f"processes: rank {rank} could not take this step, so none does: {messages[rank]}"
            )
        if _CHANGED in said:
            self._compare("state", self._facts())
            self._state = _FINE
        num_tasks = len(self._tasks)
        end = 1 + _num_words(num_tasks)
        held = tuple(tuple(_positions(own[1:end])) for own in known)
        present = tuple(sorted(set().union(*held), key=self._tasks.__getitem__))
        if not present:
            raise ValueError("losses: no process has a row; at least one needs a batch.")
        reached = {n for own in known for n in _positions(own[end + num_tasks :])}
        means = words[:, end : end + num_tasks].sum(0) / self._ranks.size
        return Agreed(
            present,
            means[index_on(present, means.device)].to(geometry.working_dtype(means.device)),
            held,
            frozenset(self._parameters[n] for n in reached),
        )

    def _first_words(self) -> None:
        """Before the first exchange: whether all processes were set up alike."""
        if self._is_known:
            return
        total = squares = torch.zeros((), dtype=torch.float64, device=self._device)
        for parameter in self._parameters:
            values = parameter.detach().abs().double()
            total, squares = total + values.sum(), squares + values.square().sum()
        here = {
            "tasks": self._tasks,
            "granularity": {name: tuple(own) for name, own in self._components.items()},
            "parameters": [(tuple(p.shape), str(p.dtype)) for p in self._parameters],
            **self._facts(),
            "the values of the parameters": (float(total), float(squares)),
        }
        self._compare("setup", here)
        self._state, self._is_known = _FINE, True

    def _compare(self, what: str, here: Mapping[str, object]) -> None:
        """Raise in all processes if one differs from the first."""
        shown = {key: _shown(value) for key, value in here.items()}
        first, *others = self._ranks.gather_objects(shown)
        for rank, other in enumerate(others, start=1):
            for key in first:
                if first[key] != other.get(key):
                    raise ValueError(
                        f"processes: rank {rank} and rank 0 differ in {key}: "
                        f"{other.get(key, 'nothing')} and {first[key]}. All processes need the "
                        f"same Aligner and the same {what}; only their rows differ."
                    )

    def _words(
        self, state: float, losses: Mapping[int, Tensor], used: Collection[nn.Parameter]
    ) -> Tensor:
        """What this process says, as float64, which all backends exchange."""
        reached = [n for n, p in enumerate(self._parameters) if p in used]
        num_tasks = len(self._tasks)
        host = [state, *_bits(losses, num_tasks)], _bits(reached, len(self._parameters))
        values = torch.zeros(num_tasks, dtype=torch.float64, device=self._device)
        for task, loss in losses.items():
            values[task] = loss
        first, last = (torch.tensor(h, dtype=torch.float64, device=self._device) for h in host)
        return torch.cat([first, values, last])


def _num_words(num: int) -> int:
    return -(-num // _WORD)


def _bits(positions: Collection[int], num: int) -> list[float]:
    """Positions below `num` as bits of words."""
    words = [0] * _num_words(num)
    for position in positions:
        words[position // _WORD] |= 1 << position % _WORD
    return [float(word) for word in words]


def _positions(words: Sequence[float]) -> list[int]:
    return [
        n * _WORD + bit
        for n, word in enumerate(words)
        for bit in range(_WORD)
        if int(word) >> bit & 1
    ]


def _shown(value: object) -> str:
    """A value to compare and to show: whole, or its beginning and a hash."""
    text = re.sub(r" at 0x[0-9a-f]+", "", repr(value))  # where a function lies is its own affair
    if len(text) <= 160:
        return text
    return f"{text[:120]}... ({hashlib.blake2b(text.encode(), digest_size=6).hexdigest()})"


def digest(state: object) -> str:
    """A hash of nested state, tensors by their bytes."""
    hashed = hashlib.blake2b(digest_size=8)

    def add(value: object) -> None:
        if isinstance(value, Tensor):
            hashed.update(str((value.dtype, tuple(value.shape))).encode())
            hashed.update(
                value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
            )
        elif isinstance(value, Mapping):
            for key in value:
                hashed.update(repr(key).encode())
                add(value[key])
        elif isinstance(value, list | tuple):
            for one in value:
                add(one)
        else:
            hashed.update(repr(value).encode())

    add(state)
    return hashed.hexdigest()
