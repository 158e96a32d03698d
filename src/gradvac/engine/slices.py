"""Where slices lie that are written in place, and what wrote them: torch hides both from Python.

With C++ they are read. Without it the node is called in every step, on a tensor without memory, and
what it does to that is watched: nothing is computed, and at whatever is not known it is stopped.
"""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gradvac.utils.native import native

COPY_SLICES = "torch::autograd::CopySlices"
ON_SLICES = frozenset((COPY_SLICES, "AsStridedBackward0"))


class Place(NamedTuple):
    """Where a tensor lies in memory, from the first entry of the whole on."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int


class Memory(NamedTuple):
    """Where a tensor and a slice of it lie.

    Attributes:
        written_by: The operation that wrote the slice; `""` where it is only read.
    """

    whole: Place
    slice: Place
    written_by: str


def read(node: Any) -> Memory | None:
    """What C++ knows of a node; None where it is not built, or if it cannot tell."""
    kernels = native()
    found = None if kernels is None else kernels.memory_of(node)
    return None if found is None else Memory(Place(*found[0]), Place(*found[1]), found[2])


def watch(node: Any, described: Any) -> Memory | None:
    """The same from what the node does to its output gradient.

    None unless all that the node of a write returns are entries of that gradient, in place or of
    the slice, or multiples of them.
    """
    watched = (_Write if node.name() == COPY_SLICES else _Read)(described)
    try:
        with watched:
            returned = node(watched.known[0])
        return watched.found(node, returned if isinstance(returned, tuple) else (returned,))
    except Exception:  # stopped, or whatever a function may do that gets what it did not expect
        return None


class _StoppedError(Exception):
    """A node does what is not known."""


class _Blank(Tensor):
    """A tensor without memory, so that nobody can read it."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, *_: object) -> Any:
        raise _StoppedError(func)


class _Watched(TorchDispatchMode):
    """Follows a gradient through a node, and stops at what it does not know.

    Attributes:
        known: The gradient, and what was made of it.
        places: Of what was made by sizes and strides.
    """

    def __init__(self, described: Any) -> None:
        super().__init__()
        self._options = {"dtype": described.dtype, "device": described.device}
        self.known: list[Tensor] = []
        self.places: list[Place] = []
        self._make(described.shape)

    def __torch_dispatch__(
        self, func: Any, types: object, args: Sequence[Any] = (), kwargs: object = None
    ) -> Any:
        made = self._run(func.overloadpacket.__name__, args)
        if made is None:
            raise _StoppedError(func)
        return made

    @abstractmethod
    def found(self, node: Any, returned: Sequence[Tensor | None]) -> Memory | None:
        """What was seen."""

    @abstractmethod
    def _run(self, name: str, args: Sequence[Any]) -> Tensor | None:
        """What an operation makes; None: it is not known."""

    def _make(self, sizes: Sequence[int], strides: Sequence[int] | None = None) -> Tensor:
        make: Any = Tensor._make_wrapper_subclass
        self.known.append(make(_Blank, sizes, strides=strides, **self._options))
        return self.known[-1]

    def _place(self, sizes: Sequence[int], strides: Sequence[int], offset: int = 0) -> Tensor:
        self.places.append(Place(tuple(sizes), tuple(strides), offset))
        return self._make(sizes, strides)


class _Write(_Watched):
    """The whole is copied, a copy of its slice goes to what wrote it, and what returns is put back.

    Known are the gradient, its copy, the slice of that, the copy of the slice, what was made of it.
    """

    def found(self, node: Any, returned: Sequence[Tensor | None]) -> Memory | None:
        del node
        whole, *parts = returned
        is_whole = whole is None or whole is self.known[1]
        if not is_whole or not all(part is None or self._is_slice(part) for part in parts):
            return None
        return Memory(self.places[0], self.places[1], "torch::autograd::CopyBackwards")

    def _is_slice(self, tensor: object) -> bool:
        """Whether it is made of the slice, entry by entry."""
        return any(tensor is one for one in self.known[3:])

    def _run(self, name: str, args: Sequence[Any]) -> Tensor | None:
        number = len(self.known)
        if number < 4:  # what wrote the slice has not been asked
            is_next: bool = args[0] is self.known[-1]
            if is_next and name == ("new_empty_strided", "as_strided", "clone")[number - 1]:
                return self._place(*args[1:]) if number < 3 else self._make(self.known[2].shape)
            is_copied = number == 2 and name == "copy_" and args[1] is self.known[0]
            return self.known[1] if is_next and is_copied else None
        is_back: bool = name == "copy_" and args[0] is self.known[2]
        if is_back and self._is_slice(args[1]):
            return self.known[2]
        tensors = [one for one in args if isinstance(one, Tensor)]
        if name not in ("_to_copy", "zeros_like", "mul") or not any(map(self._is_slice, tensors)):
            return None
        sizes = self.places[1].sizes
        is_shaped = torch.broadcast_shapes(*[one.shape for one in tensors]) == sizes
        return self._make(sizes) if is_shaped else None


class _Read(_Watched):
    """The gradient of a slice is copied into zeros, of which the whole is returned."""

    def found(self, node: Any, returned: Sequence[Tensor | None]) -> Memory | None:
        del returned
        read, whole = self.places
        from_whole = read.offset - whole.offset
        read = Place(node._saved_size, node._saved_stride, from_whole)
        return Memory(whole._replace(offset=0), read, "")

    def _run(self, name: str, args: Sequence[Any]) -> Tensor | None:
        if name == "squeeze":
            return self._make([size for d, size in enumerate(args[0].shape) if d != args[1]])
        if name == "new_zeros":
            return self._make(args[1])
        if name == "as_strided":
            return self._place(*args[1:])
        return self.known[-1] if name == "copy_" else None
