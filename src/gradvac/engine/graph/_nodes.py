"""One node of the autograd graph: what it is, what it saved, and how it is called."""

import os
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor


@cache
def kind_of(name: str) -> str:
    """The operation that a node of this name belongs to."""
    return re.sub(r"^torch::autograd::|Backwards?\d*$", "", name)


def is_python_function(node: Any) -> bool:
    """Whether the node is a Python `autograd.Function`, a compiled region for instance."""
    return not callable(node) and hasattr(node, "apply")


def indexed_dims(node: Any) -> tuple[int, ...]:
    """The dimensions that have an index, of an operation that has one for each of several."""
    raw = node._raw_saved_indices
    if not isinstance(raw, tuple):  # where a maximum was
        return ()
    every = [one.unpack_hook for one in raw]
    if not any(every):
        every = node._saved_indices
    # Behind hooks, of a checkpoint for instance, reading them would run a part of the forward.
    return tuple([dim for dim, index in enumerate(every) if index is not None])


def _number_of(name: str) -> Callable[[Any], int]:
    return lambda node: len(getattr(node, name))


# What an operation saves of how it moves or mixes entries along dimensions; not how far.
_SETTINGS: dict[str, Callable[[Any], object]] = {
    **{
        name: attrgetter(name)
        for name in (
            *("_saved_dim", "_saved_dims", "_saved_dim0", "_saved_dim1", "_saved_dim2"),
            *("_saved_dimension", "_saved_keepdim", "_saved_index", "_saved_shifts"),
            *("_saved_offset", "_saved_training", "_saved_batch_first"),
        )
    },
    **{
        name: _number_of(name)
        for name in ("_saved_normalized_shape", "_saved_pad", "_saved_batch_sizes")
    },
    "_saved_indices": indexed_dims,
}


def settings_of(node: Any) -> tuple[Callable[[Any], object], ...]:
    """What reads the settings of nodes of this type: those that are no tensors, which are data."""
    readers = (_SETTINGS[name] for name in dir(node) if name in _SETTINGS)
    return tuple(read for read in readers if not isinstance(read(node), Tensor))


@cache
def _aside(process: int) -> ThreadPoolExecutor:  # noqa: ARG001 (a fork has no threads)
    """A thread: a node called inside a running backward computes only what that backward wants."""
    return ThreadPoolExecutor(1, thread_name_prefix="gradvac")


def call_node(node: Any, gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """The gradients of a node's inputs. Broadcasting is not undone: that is the engine's work."""
    function: Callable[..., Any] = node if callable(node) else node.apply
    some = next(g for g in gradients if g is not None)
    stream = torch.cuda.current_stream(some.device) if some.is_cuda else None

    def run() -> Any:
        with torch.no_grad(), torch.cuda.stream(stream):
            return function(*gradients)

    returned = _aside(os.getpid()).submit(run).result()
    returned = returned if isinstance(returned, tuple) else (returned,)
    return returned if callable(node) else _by_edge(node, returned)


def _by_edge(node: Any, returned: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """What a Python function returned for its tensors: it returns something for numbers too."""
    needed = iter(
        [g for g, is_needed in zip(returned, node.needs_input_grad, strict=False) if is_needed]
    )
    return tuple(None if child is None else next(needed) for child, _ in node.next_functions)


def saved(node: Any, name: str) -> Any:
    """A saved tensor of a node.

    Activation checkpointing lets each be read once per backward, and the node itself will read it
    too: what was read is put back.
    """
    raw = getattr(node, f"_raw_saved_{name}", None)
    if getattr(raw, "unpack_hook", None) is None:
        return getattr(node, f"_saved_{name}")
    holder = getattr(raw, "data", None)
    value = getattr(node, f"_saved_{name}")
    if hasattr(holder, "handles"):
        _put_back(raw, holder, value)
    return value


@cache
def _names_of_saved(kind: type) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))


def release(node: Any) -> None:
    """Let go of what a node saved, as a backward that keeps no graph does.

    Another backward would do it too, but would run the hooks of activations once more.
    """
    for one in _all_saved(node):
        with suppress(RuntimeError):  # nothing saved, or kept by hooks: a checkpoint, the host
            one.register_hooks(lambda _: None, _refuse_to_recall)


def _all_saved(node: Any) -> list[Any]:
    kind: Any = type(node)
    is_torchs = kind.__module__ == "builtins"  # Python functions come and go
    names = _names_of_saved(kind) if is_torchs else ("_raw_saved_tensors",)
    every: list[Any] = []
    for name in names:
        with suppress(RuntimeError, AttributeError):  # of an earlier backward, which freed it
            raw = getattr(node, name)
            every += raw if isinstance(raw, tuple) else (raw,)
    return every


def is_selective(node: Any) -> bool:
    """Whether a selective checkpoint kept something for the node, which one backward uses up."""
    for one in _all_saved(node):
        hook = getattr(one, "unpack_hook", None)
        for frame in [] if hook is None else _held(hook):
            inner = _held(getattr(frame, "recompute_fn", None))
            if any(type(content).__name__ == "_CachedTorchDispatchMode" for content in inner):
                return True
    return False


def _held(function: Any) -> list[Any]:
    """What a function has of the one that it was made in."""
    cells = getattr(function, "__closure__", None) or ()
    held = []
    for cell in cells:
        with suppress(ValueError):  # an empty one
            held.append(cell.cell_contents)
    return held


def _refuse_to_recall(_: object) -> Tensor:
    raise RuntimeError(
        "losses: a backward has used up their graph; compute them again, in a forward of their own."
    )


def _put_back(raw: Any, holder: Any, value: Tensor) -> None:
    from torch.utils.checkpoint import _Handle

    frame = next(one for one in _held(raw.unpack_hook) if hasattr(one, "recomputed"))
    task = torch._C._current_graph_task_id()
    handle = _Handle()
    frame.recomputed[task][handle] = value
    holder.handles[task] = handle
