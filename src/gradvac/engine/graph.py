"""The autograd graph of some losses, read but never changed.

Nodes come in post-order, children before parents. A graph's *signature* is what decides whose
gradient is whose: which operations there are, how they are connected, over which dimensions they
work, and how many hooks came with them; not the sizes of this batch.
"""

import copy
import os
import re
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache, lru_cache
from operator import attrgetter
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.hooks import RemovableHandle

from gradvac.engine import slices
from gradvac.engine.slices import Memory
from gradvac.utils.native import native

_ANY_CPP = "CppFunction"  # the type of all C++ nodes but torch's own

Found = TypeVar("Found")


@cache
def kind_of(name: str) -> str:
    """The operation that a node of this name belongs to."""
    return re.sub(r"^torch::autograd::|Backwards?\d*$", "", name)


@lru_cache(1024)
def _is_python(kind: Any) -> bool:
    is_callable = any("__call__" in vars(base) for base in kind.__mro__)
    return not is_callable and hasattr(kind, "apply")


def is_python_function(node: Any) -> bool:
    """Whether the node is a Python `autograd.Function`, a compiled region for instance."""
    kind: Any = type(node)
    return _is_python(kind)


def may_write(node: Any) -> bool:
    """Whether a node is somebody's function, Python or C++, which may write over what it gets."""
    return is_python_function(node) or type(node).__name__ == _ANY_CPP


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


def padded_dims(node: Any) -> tuple[int, ...]:
    """The dimensions, counted from the last, to which a padding adds or from which it takes."""
    pad = node._saved_pad  # before and after, the last dimension first
    return tuple([-1 - d for d in range(len(pad) // 2) if pad[2 * d] or pad[2 * d + 1]])


def is_pooled(node: Any) -> bool:
    """Whether a node only gives the mean over all of a row's places the strides of a picture.

    As pooling to one place does where channels come last.
    """
    below, size = node.next_functions[0][0], node._saved_size
    is_mean = below is not None and below.name() == "MeanBackward1" and below._saved_keepdim
    is_one = len(size) > 2 and all(places == 1 for places in size[2:])
    return is_mean and is_one and tuple(node._saved_stride[:2]) == (size[1], 1)


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
    **{name: _number_of(name) for name in ("_saved_normalized_shape", "_saved_batch_sizes")},
    "_saved_pad": padded_dims,
    "_saved_storage_offset": is_pooled,
    "_saved_indices": indexed_dims,
}


def settings_of(node: Any) -> tuple[Callable[[Any], object], ...]:
    """What reads the settings of nodes of this type: those that are no tensors, which are data."""
    readers = (_SETTINGS[name] for name in dir(node) if name in _SETTINGS)
    return tuple(read for read in readers if not isinstance(read(node), Tensor))


@cache
def _thread(process: int) -> ThreadPoolExecutor:  # noqa: ARG001 (a fork has no threads)
    return ThreadPoolExecutor(1, thread_name_prefix="gradvac")


def aside(run: Callable[[], Found], like: Tensor) -> Found:
    """Run something that calls nodes, on tensors like this one.

    On another thread: a node called inside a running backward computes only what that wants.
    """
    stream = torch.cuda.current_stream(like.device) if like.is_cuda else None

    def run_there() -> Found:
        with torch.no_grad(), torch.cuda.stream(stream):
            return run()

    is_inside = torch._C._current_graph_task_id() != -1
    return _thread(os.getpid()).submit(run_there).result() if is_inside else run_there()


def call_node(node: Any, gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """The gradients of a node's inputs; to be called `aside`.

    Broadcasting is not undone: that is the engine's work.
    """
    returned = node(*gradients) if callable(node) else node.apply(*gradients)
    returned = returned if isinstance(returned, tuple) else (returned,)
    return returned if callable(node) else _by_edge(node, returned)


def _by_edge(node: Any, returned: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """What a Python function returned for its tensors: it returns something for numbers too."""
    needed = iter(
        [g for g, is_needed in zip(returned, node.needs_input_grad, strict=False) if is_needed]
    )
    return tuple(None if child is None else next(needed) for child, _ in node.next_functions)


def saved(node: Any, name: str) -> Any:
    """A saved tensor of a node, or several.

    Activation checkpointing lets each be read once per backward, and the node itself will read it
    too: what was read is put back.
    """
    raw = getattr(node, f"_raw_saved_{name}", None)
    every = raw if isinstance(raw, tuple) else (raw,)
    held = [(one, one.data) for one in every if getattr(one, "unpack_hook", None) is not None]
    value = getattr(node, f"_saved_{name}")
    if held:
        values = [one for one in (value if isinstance(raw, tuple) else (value,)) if one is not None]
        for (one, holder), read in zip(held, values, strict=True):
            if hasattr(holder, "handles"):
                _put_back(one, holder, read)
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
            one.register_hooks(lambda _: None, _raise_used_up)


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


def _kept(node: Any) -> dict[int, int]:
    """Memory that a node saved, address -> bytes, unless hooks have it."""
    kind: Any = type(node)
    names = _names_of_saved(kind) if kind.__module__ == "builtins" else ("_raw_saved_tensors",)
    kept: dict[int, int] = {}
    for name in names:
        with suppress(RuntimeError, AttributeError):  # nothing there, or in a form of its own
            raw = getattr(node, name)
            if any(one.unpack_hook for one in (raw if isinstance(raw, tuple) else (raw,))):
                continue
            value = node.saved_tensors if name == "_raw_saved_tensors" else getattr(node, name[4:])
            for one in value if isinstance(value, tuple) else (value,):
                storage = one.untyped_storage()
                kept[storage.data_ptr()] = storage.nbytes()
    return kept


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


def _raise_used_up(_: object) -> Tensor:
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


LEAF = "torch::autograd::AccumulateGrad"
COMPILED = "CompiledFunctionBackward"
RUN = "gradvac"  # the name under which nodes of our compiled regions keep whose run they are

# Taps stand for the parameters of such regions (`compiled`). Behind each is one leaf: a
# backward without parameter gradients runs to it.
ANCHOR = torch.zeros((), requires_grad=True)
TAPS = frozenset(("GradvacProductBackward", "GradvacLookupBackward"))
_IN_CPP = {
    "gradvac::ProductTap": "GradvacProductBackward",
    "gradvac::LookupTap": "GradvacLookupBackward",
}
_OURS = __name__.partition(".")[0]


@lru_cache(maxsize=64)
def _zero(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.zeros((), dtype=dtype, device=device)


def without_memory(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros of this shape, never to be written."""
    return _zero(dtype, device).expand(tuple(shape))


_Kind = tuple[str, tuple[Callable[[Any], object], ...]]
_KINDS: dict[type, _Kind] = {}  # names of nodes, and what reads settings; asking a node is slow


def is_of_torch(node: Any) -> bool:
    """Whether a node's type says what it is: some of C++ share one, others are somebody's."""
    kind = type(node)
    return kind.__module__ == "builtins" and kind.__name__ != _ANY_CPP


def _kind(node: Any) -> _Kind:
    kind = type(node)
    name = node.name()
    if name in _IN_CPP:
        return _IN_CPP[name], ()
    if name in TAPS and kind._forward_cls.__module__.partition(".")[0] != _OURS:
        name += " of the model"  # somebody else's function of the same name
    names = (name, settings_of(node))
    if is_of_torch(node) or names[0] in TAPS:  # Python functions of others come and go
        _KINDS[kind] = names
    return names


def is_marked(node: Any) -> bool:
    """Whether a function in Python says which of our compiled regions it is a part of."""
    return is_python_function(node) and RUN in node.metadata


def settings(node: Any) -> list[object]:
    """What a node has saved of how it moves or mixes entries along dimensions."""
    return [read(node) for read in (_KINDS.get(type(node)) or _kind(node))[1]]


class GraphSignature:
    """The structure that graphs have in common; the same object for all of them.

    Attributes:
        order: Where each node, in post-order, was met by the walk.
        names: Of the nodes.
        children: (position, output number) of each input of a node; position -1 is a tensor that
            needs no gradient.
        roots: Positions of the roots.
        compiled: Positions of compiled regions.
    """

    def __init__(
        self,
        met: Sequence[Any],
        edges: Sequence[tuple[tuple[Any, int], ...]],
        index: Mapping[Any, int],
        roots: Sequence[int],
    ) -> None:
        inner = [[(index[child], number) for child, number in of_node] for of_node in edges]
        self.order = _post_order([[child for child, _ in of_node] for of_node in inner], roots)
        position = {where: number for number, where in enumerate([-1, *self.order], start=-1)}
        self.names = [(_KINDS.get(type(met[o])) or _kind(met[o]))[0] for o in self.order]
        self.children = [tuple((position[c], number) for c, number in inner[o]) for o in self.order]
        self.roots = [position[root] for root in roots]
        self.compiled = [p for p, name in enumerate(self.names) if name == COMPILED]


_SIGNATURES: dict[tuple[object, ...], GraphSignature] = {}
_MOST_KEPT = 1024


def _post_order(children: Sequence[Sequence[int]], roots: Sequence[int]) -> list[int]:
    order: list[int] = []
    done, opened = {-1}, set()
    stack = list(roots)
    while stack:
        node = stack[-1]
        if node not in done and node not in opened:
            opened.add(node)
            stack += [child for child in children[node] if child not in done]
        else:
            stack.pop()
            if node not in done:
                done.add(node)
                order.append(node)
    return order


def _walk(
    starts: Sequence[Any], parameter_ids: Collection[int], settings: object
) -> tuple[list[Any], list[tuple[tuple[Any, int], ...]], dict[Any, int], tuple[object, ...]]:
    """Collect the nodes, their inputs, their positions, and what distinguishes graphs.

    Runs every step, so it is kept lean.
    """
    index: dict[Any, int] = {None: -1}
    for start in starts:
        index.setdefault(start, len(index) - 1)
    met, edges = list(index)[1:], list[tuple[tuple[Any, int], ...]]()
    parts: list[object] = [settings, *(index[start] for start in starts)]
    where, add, kinds = index.get, parts.append, _KINDS
    for node in met:  # grows on the way
        name, settings_of = kinds.get(type(node)) or _kind(node)
        add(name)
        if name == LEAF:
            identity = id(node.variable)
            add(identity if identity in parameter_ids else None)
            edges.append(())
            continue
        inputs = node.next_functions
        edges.append(inputs)
        for child, number in inputs:
            at = where(child)
            if at is None:
                at = index[child] = len(met)
                met.append(child)
            add((at, number) if number else at)
        if name == COMPILED and (run := node.metadata.get(RUN)) is not None:
            add(run.region)
        for read in settings_of:
            add(read(node))
    return met, edges, index, tuple(parts)


_FSDP2 = "RegisterPostBackwardFunctionBackward"  # its hooks leave gradients alone
_OWN = [0]  # numbers that hooks of our own took
_PASSED: deque[tuple[int, int]] = deque(maxlen=64)  # (newest node, hooks of others) at some times


def remember_hooks() -> None:
    """Hooks of others up to now belong to no graph whose nodes are all newer."""
    newest = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]
    _PASSED.append((newest, RemovableHandle.next_id - _OWN[0]))


@contextmanager
def own_hooks() -> Iterator[None]:
    """Hooks that are registered meanwhile are our own."""
    before, own = RemovableHandle.next_id, _OWN[0]
    try:
        yield
    finally:
        _OWN[0] = own + RemovableHandle.next_id - before
        remember_hooks()


def count_hooks(oldest: int) -> int:
    """How many hooks others registered since a graph was begun, whose oldest node has this number.

    On activations, for instance. A graph does not show its hooks. But those of its activations and
    nodes are as new as it is, and every registration takes a number.
    """
    before = next((count for newest, count in reversed(_PASSED) if newest <= oldest), 0)
    return RemovableHandle.next_id - _OWN[0] - before


class _Nodes(Sequence[Any]):
    """Nodes that C++ knows; Python meets those that it needs."""

    def __init__(self, walk: Any, order: Sequence[int]) -> None:
        self._walk, self._order = walk, order
        self._met: dict[int, Any] = {}

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, position: Any) -> Any:
        node = self._met.get(position)
        if node is None:
            node = self._met[position] = self._walk.node(self._order[position])
        return node


class Graph:
    """The nodes behind some losses.

    Attributes:
        nodes: In post-order.
        names: Of the nodes.
        signature: The same for graphs of the same structure.
        returned: What a node (position) that has just run returned.
        operands: What a tap (position) was handed beside the gradient of its output.
        moved: The row of every entry behind an index (position), where that is followed.
        experts: How the entries of the last layer of experts are grouped, for its other weights.
        num_hooks: That others registered since the graph was begun, on its nodes or elsewhere.
        has_hooks: Somebody's hooks may run in a backward, and write over gradients.

    Args:
        roots: The losses.
        known: Identities (`id`) of the model's parameters: which of them a leaf is belongs to the
            structure.
        settings: What else does; so does the number of hooks that came with it.
    """

    def __init__(
        self, roots: Sequence[Tensor], known: Collection[int] = (), settings: object = None
    ) -> None:
        self.roots = tuple(roots)
        starts = [get_gradient_edge(root).node for root in roots]
        met, edges, index, parts = _walk(starts, known, settings)
        num_hooks = count_hooks(min([node._sequence_nr() for node in met]))
        parts = (num_hooks, *parts)
        signature = _SIGNATURES.get(parts)
        if signature is None:
            signature = GraphSignature(met, edges, index, [index[start] for start in starts])
            _SIGNATURES[parts] = signature
            if len(_SIGNATURES) > _MOST_KEPT:
                del _SIGNATURES[next(iter(_SIGNATURES))]
        self.signature = signature
        self.nodes: Sequence[Any] = [met[where] for where in signature.order]
        self.names, self.root_positions = signature.names, signature.roots
        self.num_hooks = num_hooks
        self.has_hooks = num_hooks != 0 and _FSDP2 not in self.names
        self._described: dict[int, Any] = {}
        self._shapes: dict[tuple[int, int], tuple[int, ...]] = {}
        self.returned: dict[int, Sequence[Tensor | None]] = {}
        self.operands: dict[int, Tensor | None] = {}
        self.moved: dict[int, Tensor] = {}
        self.experts: dict[object, tuple[object, ...]] = {}

    def template(self) -> "Graph":
        """What other graphs of its structure and sizes have in common with it."""
        return self.again((), None)

    def again(self, roots: Sequence[Tensor], walk: Any) -> "Graph":
        """A graph of the same structure and sizes; its nodes are made as they are asked for.

        Args:
            roots: Its losses.
            walk: Its nodes in C++, in the order in which they are met.
        """
        graph = copy.copy(self)  # shapes stay the same object: whoever asks first fills them in
        graph.roots, graph.nodes = tuple(roots), _Nodes(walk, self.signature.order)
        graph._described, graph.returned, graph.operands = {}, {}, {}
        graph.moved, graph.experts = {}, {}
        return graph

    def children(self, position: int) -> tuple[tuple[int, int], ...]:
        """(position, output number) of each input of a node.

        Position -1 is a tensor that needs no gradient.
        """
        return self.signature.children[position]

    def described(self, position: int) -> Any:
        """Shape and dtype of every output of a node."""
        found = self._described.get(position)
        if found is None:  # asking a node is slow
            found = self._described[position] = self.nodes[position]._input_metadata
        return found

    def shape(self, position: int, number: int = 0) -> tuple[int, ...]:
        """The shape of an output of a node."""
        shape = self._shapes.get((position, number))
        if shape is None:
            if self.names[position] == LEAF:
                shape = tuple(self.nodes[position].variable.shape)
            else:
                shape = tuple(self.described(position)[number].shape)
            self._shapes[position, number] = shape
        return shape

    def kind(self, position: int) -> str:
        """The operation that a node belongs to."""
        return kind_of(self.names[position])

    def memory(self, position: int) -> Memory | None:
        """Where the slice lies that a node writes or reads.

        None for any other node, or if it cannot be told.
        """
        node = self.nodes[position] if self.names[position] in slices.ON_SLICES else None
        if node is None or not is_of_torch(node):
            return None
        if native() is not None:
            return slices.read(node)
        described = self.described(position)[0]
        return aside(lambda: slices.watch(node, described), self.roots[0])

    def run(self, position: int) -> Any:
        """The run of one of our compiled regions that a node is; None for any other node."""
        is_compiled = self.names[position] == COMPILED
        return self.nodes[position].metadata.get(RUN) if is_compiled else None

    def is_tap(self, position: int) -> bool:
        """Whether a node stands for a parameter that a compiled region uses."""
        return self.names[position] in TAPS

    def num_outputs(self, position: int) -> int:
        """Of a node, as far as their gradients are gradients of the losses."""
        if self.is_tap(position):
            return 1
        return len(self.described(position))

    def is_complex(self, position: int, number: int = 0) -> bool:
        """Whether an output of a node is complex."""
        if self.names[position] == LEAF:
            return bool(self.nodes[position].variable.is_complex())
        return bool(self.described(position)[number].dtype.is_complex)

    def is_plain_cast(self, position: int) -> bool:
        """Whether a node is a cast, but not one of real numbers to complex ones."""
        if self.names[position] != "ToCopyBackward0":
            return False
        return self.is_complex(position) == self.is_complex(*self.children(position)[0])

    def sizes(self) -> int:
        """Equal for graphs of one signature and the same sizes."""
        if self.is_nested:
            return 0
        return hash(tuple(self.shape(position) for position in range(len(self.nodes))))

    def lowest(self) -> torch.dtype:
        """The narrowest dtype of floating point on the way."""
        every = {
            one.dtype for position in range(len(self.nodes)) for one in self.described(position)
        }
        dtypes = {dtype for dtype in every if dtype.is_floating_point}
        return min(dtypes, key=lambda dtype: torch.finfo(dtype).bits, default=torch.float32)

    def kept_bytes(self, parameters: Iterable[Tensor]) -> int:
        """What the forward saved, beside parameters and what hooks have: checkpoints, the host."""
        kept: dict[int, int] = {}
        for node in self.nodes:
            kept |= _kept(node)
        for parameter in parameters:
            with suppress(RuntimeError):  # it has no memory of its own
                kept.pop(parameter.untyped_storage().data_ptr(), None)
        return sum(kept.values())

    def leaves(self) -> list[Tensor]:
        """The leaves that the roots depend on."""
        pairs = zip(self.nodes, self.names, strict=True)
        leaves = (node.variable for node, name in pairs if name == LEAF)
        return [leaf for leaf in leaves if leaf is not ANCHOR]

    @property
    def is_reentrant(self) -> bool:
        """Whether reentrant checkpoints hide parameters; `autograd.grad` cannot pass them."""
        return any(name.startswith("CheckpointFunctionBackward") for name in self.names)

    @property
    def is_nested(self) -> bool:
        """Whether nested tensors are part of it, which have no shape to speak of."""
        every = map(self.described, range(len(self.nodes)))
        outputs = (one for of_node in every for one in of_node)
        return any(one.is_nested_tensor or one.is_cpp_nested_tensor for one in outputs)

    def check_compiled(self) -> None:
        """Raise if a compiled region writes over what its forward saved: it can run only once."""
        for position in self.signature.compiled:
            node = self.nodes[position]
            described: Any = getattr(getattr(node, "_forward_cls", None), "metadata", None)
            if getattr(described, "bw_donated_idxs", ()) is None:
                described.bw_donated_idxs = []  # in the form that is asked for on other threads
            elif getattr(described, "bw_donated_idxs", None):
                raise ValueError(
                    "model: was compiled before the Aligner was made, so that its backward can "
                    "run only once; make the Aligner before the first compiled batch, or call "
                    "torch.compiler.reset() and run the batch again."
                )

    def reached_by(self) -> list[int]:
        """For every node, which roots depend on it: bit t for root t."""
        reached = [0] * len(self.nodes)
        for root, position in enumerate(self.root_positions):
            reached[position] |= 1 << root
        for position in range(len(self.nodes) - 1, -1, -1):
            roots = reached[position]
            for child, _ in self.children(position):
                if child >= 0:
                    reached[child] |= roots
        return reached


class NotSeparable(ValueError):  # noqa: N818
    """one_backward cannot separate these losses; nothing was changed."""


def check_readable(graph: Graph) -> None:
    """Raise for graphs that show no junctions, or none that have rows."""
    if any(graph.names[position] == LEAF for position in graph.root_positions):
        raise NotSeparable('losses: are a parameter themselves; use engine="per_task".')
    if graph.is_reentrant:
        raise NotSeparable(
            "engine: reentrant activation checkpointing hides the parameters it uses; "
            "call torch.utils.checkpoint.checkpoint(..., use_reentrant=False), or use "
            'engine="per_task".'
        )
    if graph.is_nested:
        raise NotSeparable(
            "engine: nested tensors have no rows of one size; pad them "
            '(torch.nested.to_padded_tensor) before the model, or use engine="per_task".'
        )


def check_repeatable(graph: Graph) -> None:
    """Raise for graphs that let a backward run only once: a probe takes several."""
    if any(map(is_selective, graph.nodes)):
        raise NotSeparable(
            "engine: a selective activation checkpoint (context_fn=...) lets a backward run only "
            "once, and telling which rows belong to which task takes several; checkpoint without "
            'it, or use engine="per_task" with a forward for each task, as a mapping task -> loss.'
        )


def check_parameters(model: nn.Module, known: Collection[nn.Parameter], graph: Graph) -> None:
    """Raise if a graph of losses is not that of the model some of whose parameters are known."""
    leaves = graph.leaves()
    unknown = {leaf for leaf in leaves if leaf not in known}
    for name, parameter in model.named_parameters() if unknown else ():
        if parameter in unknown:
            raise ValueError(
                f"model: {name} became trainable, or was replaced, after the Aligner was made; "
                "make another Aligner after freezing, unfreezing or replacing parameters."
            )
    is_none_known = len(unknown) == len(leaves) and not graph.is_reentrant
    if is_none_known and any(parameter.requires_grad for parameter in known):
        raise ValueError(
            "losses: reach no parameter of the Aligner's model, so there is nothing to align; were "
            "they computed by another model, such as a copy of it?"
        )
