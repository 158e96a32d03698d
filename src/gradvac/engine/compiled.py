"""A Dynamo backend, `torch.compile(model, backend="gradvac")`, that leaves parameters outside.

A compiled region is one node of the autograd graph: what it computes inside cannot be separated by
task. So the graph that Dynamo found is split in two. *Outside*, run as written in every step, is
what is made of parameters alone: taps for weights and tables, scales and shifts expanded to the
rows they serve, a table of positions looked up for all rows. *Inside*, compiled by Inductor, is the
rest. The autograd graph then shows every contribution to a parameter as a node of its own. An
operation without a rule in `_TAP_RULES` stays as it is: the region is then a junction, exact and
slow.

Taps: a product with a weight, `y = x @ W`, is computed inside from a detached `W`, and the node of
a tap outside takes its place: the region's backward hands it the gradient of `y`, and `x`. Both
come as gradients of placeholders, `output` and `operand`, which are inputs of the region and are
never read, so that nothing is held longer than the region itself holds it. Without an aligner, the
tap's own backward computes the gradient of the weight; a fast path of the engine, by task.

Layers: what a region hands to its taps exists all at once. So every layer of a model is a region of
its own, and its parameters are complete once it has run. What layers share that is made of
parameters alone (biases of positions) is run before them, outside of all.

Rows: autograd cannot tell whose gradient is whose inside a compiled region. But a region of this
backend is known operation by operation. It is run once on tensors without data; the autograd graph
of that run is the same as if nothing had been compiled. From where rows lie in the region's outputs
it follows operation by operation where they lie before each, down to its inputs, or that some
operation may move them.
"""

# B rows, N entries, O outputs, I inputs, V rows of a table

import math
import operator
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import Function
from torch.fx.node import map_arg
from torch.fx.passes.split_module import split_module
from torch.torch_version import TorchVersion
from torch.utils._pytree import tree_leaves

from gradvac.engine.graph import ANCHOR, COMPILED, LEAF, RUN, TAPS, Graph, without_memory
from gradvac.engine.layouts import Layout, follow
from gradvac.engine.models import allow_second_passes
from gradvac.utils.native import native

# Later versions refuse create_graph themselves.
_MAY_BE_CONSTANT = TorchVersion(torch.__version__) < "2.13.0a0"
TOKENS = torch.float64  # gradients are no integers: tokens are handed on as these, exactly

Compile = Callable[[fx.GraphModule, list[Any]], Callable[..., Any]]


def compile_tapped(
    graph_module: fx.GraphModule,
    examples: list[Any],
    *,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile a graph of Dynamo's; `mode` and `options` are those of torch.compile for Inductor.

    Raises:
        ValueError: The mode records CUDA graphs of the region alone, which overwrite its earlier
            outputs.
    """
    from torch import _inductor as inductor
    from torch._inductor.compile_fx import compile_fx

    patches = dict(inductor.list_mode_options(mode)) if mode else {}
    patches |= options or {}
    if patches.get("triton.cudagraphs"):
        raise ValueError(
            'mode: torch.compile(..., backend="gradvac") records no CUDA graphs of regions, whose '
            'outputs the next step writes over; leave the mode out, or take "default" or '
            '"max-autotune-no-cudagraphs", and record the whole step (torch.cuda.graph).'
        )

    def compile_inside(inside: fx.GraphModule, given: list[Any]) -> Any:
        return compile_fx(inside, given, config_patches=patches)

    return split_and_compile(graph_module, examples, compile_inside)


def split_and_compile(
    graph_module: fx.GraphModule, examples: list[Any], compile_inside: Compile
) -> Callable[..., Any]:
    """Split a graph into layers, each of these in two, and compile the inside.

    What layers have in common that is made of parameters alone is run before them, as written.
    """
    allow_second_passes()
    nodes = list(graph_module.graph.nodes)
    if not torch.is_grad_enabled() or _is_written_through_another(nodes):
        return compile_inside(graph_module, examples)
    given = dict(zip(graph_module.graph.find_nodes(op="placeholder"), examples, strict=True))
    parametric = Split(graph_module, examples, {}).parametric
    numbers = _numbers_of_layers(nodes, given, parametric)
    if len({*numbers.values()}) < 2:
        return _compile_region(graph_module, examples, compile_inside)
    by_name = {node.name: example for node, example in given.items()}
    shared = _shared_by_layers(parametric, numbers)
    names = frozenset(node.name for node in shared)
    numbers = {node: 0 if node in shared else number + 1 for node, number in numbers.items()}
    last = next(reversed(given), nodes[0])
    for node in (node for node in nodes if node in shared):
        last.append(node)
        last = node
    whole = split_module(graph_module, graph_module, numbers.__getitem__, keep_original_order=True)
    for call in whole.graph.find_nodes(op="call_module"):
        layer = whole.get_submodule(str(call.target))
        assert isinstance(layer, fx.GraphModule)
        if call.target != "submod_0":  # that is what they share
            whole.add_submodule(str(call.target), _Layer(layer, by_name, names, compile_inside))
    forward: Callable[..., Any] = whole.forward
    return forward


def _shared_by_layers(
    parametric: Iterable[fx.Node], numbers: Mapping[fx.Node, int]
) -> set[fx.Node]:
    """What is made of parameters in one layer and used in others, and what it is made of."""
    used = {n for n in parametric if any(numbers[user] != numbers[n] for user in n.users)}
    shared = set[fx.Node]()
    while used:
        node = used.pop()
        if node.op != "placeholder" and node not in shared:
            shared.add(node)
            used.update(node.all_input_nodes)
    return shared


class _Layer(nn.Module):
    """A layer as a region of its own."""

    def __init__(
        self,
        layer: fx.GraphModule,
        by_name: Mapping[str, Any],
        shared: Collection[str],
        compile_inside: Compile,
    ) -> None:
        super().__init__()
        examples = [
            by_name[node.name] if node.name in by_name else _leaf(fake_of(node))
            for node in layer.graph.find_nodes(op="placeholder")
        ]
        (output,) = layer.graph.find_nodes(op="output")
        self._is_single = not isinstance(output.args[0], tuple)
        if self._is_single:
            output.args = ((output.args[0],),)
            layer.recompile()
        self._run = _compile_region(layer, examples, compile_inside, shared)

    def forward(self, *arguments: Any) -> Any:
        outputs = self._run(*arguments)
        return outputs[0] if self._is_single else outputs


def _leaf(fake: Any) -> Any:
    """What another layer made, as an input."""
    if not isinstance(fake, FakeTensor):
        return fake
    return fake.detach().requires_grad_(fake.requires_grad)


def _numbers_of_layers(
    nodes: Sequence[fx.Node], examples: Mapping[fx.Node, Any], parametric: Collection[fx.Node]
) -> dict[fx.Node, int]:
    """Numbers of nodes that rise with every layer: a module with a number that has others inside.

    All the same where a layer writes over what another sees, uses what another made of parameters
    alone that cannot be run before them (`parametric` can), or begins inside a context of torch.
    """
    stacks = [[name for name, _ in n.meta.get("nn_module_stack", {}).values()] for n in nodes]
    layers = {name for stack in stacks for name in stack[:-1] if name.rpartition(".")[2].isdigit()}
    numbers, last, open_contexts = dict[fx.Node, int](), None, set[str]()
    of_data = {n for n, example in examples.items() if _is_data(n, example)}
    for node, stack in zip(nodes, stacks, strict=True):
        layer = next((name for name in stack if name in layers), None)
        is_next = node.op not in ("placeholder", "output") and layer != last
        number = next(reversed(numbers.values()), 0) + is_next
        if is_next:
            last = layer
        given = [n for n in node.all_input_nodes if n not in examples and numbers[n] != number]
        made = (n for n in given if n not in of_data and n not in parametric)
        is_shared = any(_has_gradient(fake_of(n)) for n in made)
        if is_shared or (is_next and open_contexts):
            return dict.fromkeys(nodes, 0)
        numbers[node] = number
        if not of_data.isdisjoint(node.all_input_nodes):
            of_data.add(node)
        _follow_context(node, open_contexts)
    written, touched_by = _written(nodes), dict[int, set[int]]()
    for node in nodes:
        touching = [*node.users] if node.op == "placeholder" else [node, *node.users]
        for memory in written.intersection(_memory_of(node)):
            touched_by.setdefault(memory, set()).update(numbers[one] for one in touching)
    if any(len(every) > 1 for every in touched_by.values()):
        return dict.fromkeys(nodes, 0)
    return numbers


def _is_data(node: fx.Node, example: Any) -> bool:
    is_given = isinstance(example, nn.Parameter) or "_buffers_" in str(node.target)
    return isinstance(example, Tensor) and not is_given


def _follow_context(node: fx.Node, opened: set[str]) -> None:
    """Keep what changes the meaning of the calls that follow."""
    name = getattr(node.target, "__name__", "")
    if name == "_set_grad_enabled":
        (opened.discard if node.args[0] else opened.add)(name)
    elif name in _CONTEXTS:
        opened.add(node.name)
    elif name.startswith("_exit_"):
        opened -= {entered.name for entered in node.all_input_nodes}


def _compile_region(
    graph_module: fx.GraphModule,
    examples: list[Any],
    compile_inside: Compile,
    shared: Collection[str] = (),
) -> Callable[..., Any]:
    """Split a graph in two, and compile its inside."""
    split = Split(graph_module, examples, _TAP_RULES, shared)
    inside = fx.GraphModule(graph_module, split.inside)
    inside.meta = {}  # what Dynamo noted there is of other inputs
    outside = fx.GraphModule(graph_module, split.outside)
    region = Region(inside, [given.spec for given in split.given.values()], split.sizes)
    compiled = compile_inside(inside, [given.example for given in split.given.values()])
    run_outside = outside.forward

    def run(*arguments: Any) -> Any:
        outputs = compiled(*run_outside(*arguments))
        region.name_node(outputs, arguments)
        return outputs

    return run


# -- taps ------------------------------------------------------------------------------------------


def _flat(values: Tensor) -> Tensor:
    return values.reshape(-1, values.shape[-1])


class GradvacProduct(Function):
    """Stands for a weight and a bias: `x @ W.T + b`."""

    @staticmethod
    def forward(
        ctx: Any,
        _anchor: Tensor,
        weight: Tensor,
        _bias: Tensor | None,
        output: Sequence[int],
        operand: Sequence[int],
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        device = weight.device
        return without_memory(output, dtype, device), without_memory(operand, dtype, device)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None, x: Tensor | None) -> tuple[Any, ...]:
        weight = bias = None
        if gradient is not None and x is not None:
            gradient, x = _flat(gradient), _flat(x)
            if ctx.needs_input_grad[1]:
                weight = gradient.t() @ x
            if ctx.needs_input_grad[2]:
                bias = gradient.sum(0)
        return None, weight, bias, None, None, None


class GradvacLookup(Function):
    """Stands for a table `[V, D]` whose rows are looked up by token."""

    @staticmethod
    def forward(
        ctx: Any,
        _anchor: Tensor,
        table: Tensor,
        padding: int,
        output: Sequence[int],
        tokens: Sequence[int],
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.padding, ctx.num_rows = padding, len(table)
        device = table.device
        given = without_memory(output, table.dtype, device)
        return given, without_memory(tokens, TOKENS, device)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None, tokens: Tensor | None) -> tuple[Any, ...]:
        table = None
        if gradient is not None and tokens is not None:
            table = torch.ops.aten.embedding_dense_backward(
                gradient, tokens.long(), ctx.num_rows, ctx.padding, False
            )
        return None, table, None, None, None


assert {f"{tap.__name__}Backward" for tap in (GradvacProduct, GradvacLookup)} == TAPS


class _Product(Function):
    """A product inside a region; its weight is detached."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, *_taps: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        product = F.linear(_flat(x), weight, bias)
        # As in torch's own products, not a view: the next operation may write over it.
        shape = (*x.shape[:-1], weight.shape[0])
        shaped: Tensor = torch.ops.aten._unsafe_view(product, shape)
        return shaped

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        inner = gradient.matmul(weight) if ctx.needs_input_grad[0] else None
        return inner, None, None, gradient, x


class _Lookup(Function):
    """A lookup inside a region; its table is detached."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, table: Tensor, *_taps: Tensor) -> Tensor:
        ctx.save_for_backward(tokens)
        return F.embedding(tokens, table)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        (tokens,) = ctx.saved_tensors
        return None, None, gradient, tokens.to(TOKENS)


# Functions that a graph can call by name.


def region_inputs(*requests: tuple[Any, ...]) -> Sequence[Tensor]:
    """What a region is given for parameters.

    Args:
        requests: `(parameter,)`: its value. `(parameter, shape)`: an entry for every entry that it
            serves. `(table, padding, output, tokens)` and `(weight, bias, output, operand, dtype)`:
            placeholders for the output, and for what a lookup or a product is made of.
    """
    kernels = native()
    if kernels is not None:
        given: Sequence[Tensor] = kernels.region_inputs(ANCHOR, requests)
        return given
    given = []
    for request in requests:
        if len(request) == 1:
            given.append(request[0].detach())
        elif len(request) == 2:
            given.append(request[0].expand(request[1]))
            _mark(given[-1], None)  # nobody else sees its gradients
        elif len(request) == 4:
            given += GradvacLookup.apply(ANCHOR, *request)
            _mark(given[-1], (None, (request[1], len(request[0])), {}))
        else:
            given += GradvacProduct.apply(ANCHOR, *request)
    return given


def _mark(output: Tensor, run: object) -> None:
    node: Any = output.grad_fn
    if node is not None:
        node.metadata[RUN] = run


def tapped_product(*given: Any) -> Any:
    """`(x, weight, bias, output, operand)`: the product."""
    return _Product.apply(*given)


def tapped_lookup(*given: Any) -> Any:
    """`(tokens, table, output, operand)`: rows of the table."""
    return _Lookup.apply(*given)


def visible_product(x: Tensor, weight: Tensor, bias: Tensor | None, *taps: Tensor) -> Tensor:
    """The same with ordinary nodes: gradients of the output reach its placeholder."""
    product = F.linear(x, weight)
    return (product if bias is None else product + bias) + taps[0]


def visible_lookup(tokens: Tensor, table: Tensor, *taps: Tensor) -> Tensor:
    """The same with ordinary nodes."""
    return F.embedding(tokens, table) + taps[0]


# -- rows inside a region --------------------------------------------------------------------------


Below = dict[int, Layout | None]
"""Input (of tensors) -> where rows lie; None: they may move."""
_VISIBLE = {tapped_product: visible_product, tapped_lookup: visible_lookup}


class InputSpec(NamedTuple):
    """An input of a region: a tensor without its data."""

    shape: tuple[Any, ...]
    stride: tuple[Any, ...]
    dtype: torch.dtype | None  # None: a size, in `shape`
    device: torch.device | None
    requires_grad: bool
    is_rows: bool

    @classmethod
    def of(cls, fake: Any, *, is_rows: bool) -> "InputSpec":
        if not isinstance(fake, Tensor):
            return cls((_expression(fake),), (), None, None, False, False)
        shape, stride = map(_expression, fake.shape), map(_expression, fake.stride())
        return cls(
            tuple(shape), tuple(stride), fake.dtype, fake.device, fake.requires_grad, is_rows
        )

    def at(self, sizes: Mapping[Any, int]) -> Any:
        """The tensor for some sizes."""
        shape = [_value(size, sizes) for size in self.shape]
        if self.dtype is None:
            return shape[0]
        stride = [_value(size, sizes) for size in self.stride]
        value = torch.empty_strided(shape, stride, dtype=self.dtype, device=self.device)
        return value.requires_grad_(self.requires_grad)


def _expression(size: Any) -> Any:
    return size.node.expr if isinstance(size, torch.SymInt) else size


def _value(size: Any, sizes: Mapping[Any, int]) -> int:
    return size if isinstance(size, int) else int(size.subs(sizes))


class Region:
    """What was compiled.

    Args:
        inside: Its operations.
        given: Its inputs.
        sizes: Symbols of sizes, and their places among the arguments it is called with.
    """

    def __init__(
        self, inside: fx.GraphModule, given: Sequence[InputSpec], sizes: Mapping[Any, int]
    ) -> None:
        self._inside, self.given, self._sizes = inside, given, sizes
        kinds = {one.device.type for one in given if one.device is not None}
        self._autocast = [
            (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
            for kind in kinds
        ]
        self.known: dict[object, Below | None] = {}  # what runs of it found out

    def name_node(self, outputs: Sequence[Any], arguments: Sequence[Any]) -> None:
        """Note at the node of a run that it is this region's."""
        run = RegionRun(self, tuple([arguments[place] for place in self._sizes.values()]), {})
        # An output may be an input, whose node is another region's.
        others = {given.grad_fn for given in arguments if isinstance(given, Tensor)}
        for place, output in enumerate(outputs):
            node: Any = output.grad_fn if isinstance(output, Tensor) else None
            if node is not None and node not in others and node.name() == COMPILED:
                run.places[output.output_nr] = place
                node.metadata[RUN] = run
                if _MAY_BE_CONSTANT:
                    _refuse_second_derivatives(type(node)._forward_cls)

    def run_without_data(self, sizes: Sequence[int]) -> tuple[Sequence[Any], list[Any]]:
        """Its outputs and its inputs."""
        by_symbol = dict(zip(self._sizes, sizes, strict=True))
        with ExitStack() as stack:
            for kind, dtype, enabled in self._autocast:
                stack.enter_context(torch.autocast(kind, dtype, enabled=enabled))
            stack.enter_context(torch.enable_grad())
            stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
            given = [one.at(by_symbol) for one in self.given]
            return _Visible(self._inside).run(*given), given


def _refuse_second_derivatives(region: Any) -> None:
    """Raise under create_graph: what only detached weights are read for would be a constant."""
    run_backward = region.backward

    def backward(ctx: Any, *gradients: Any) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(
                'create_graph=True: regions compiled with backend="gradvac" have no double '
                "backward; call the model that is not compiled for such losses."
            )
        return run_backward(ctx, *gradients)

    if run_backward.__module__ != __name__:
        region.backward = staticmethod(backward)


class RegionRun(NamedTuple):
    """One run of a region."""

    region: Region
    sizes: tuple[int, ...]
    places: dict[int, int]  # output of the node -> output of the region

    def follow(
        self,
        above: Mapping[int, Layout],
        num_rows: int,
        shapes: Sequence[tuple[int, ...] | None],
    ) -> Below | None:
        """Where rows lie in the region's inputs, whatever the data; None if that is not found out.

        Given where they lie in the node's outputs, and the shapes of its inputs.
        """
        known = self.region.known
        key = (self.sizes, tuple(above.items()), num_rows, tuple(shapes))
        if key not in known:
            try:
                known[key] = self._follow(above, num_rows, shapes)
            except Exception:  # what cannot be run without data is measured every step
                known[key] = None
        return known[key]

    def _follow(
        self,
        above: Mapping[int, Layout],
        num_rows: int,
        shapes: Sequence[tuple[int, ...] | None],
    ) -> Below:
        outputs, given = self.region.run_without_data(self.sizes)
        roots = [outputs[self.places[number]] for number in above]
        graph = Graph(roots)
        places = [(p, r.output_nr) for p, r in zip(graph.root_positions, roots, strict=True)]
        starts = zip(places, above.values(), strict=True)
        followed = follow(graph, self._holds_rows(graph, given), starts, num_rows)
        is_leaf = [name == LEAF for name in graph.names]
        leaves = {id(n.variable): p for p, n in enumerate(graph.nodes) if is_leaf[p]}
        below: Below = {}
        tensors = [value for value in given if isinstance(value, Tensor)]
        for edge, (value, shape) in enumerate(zip(tensors, shapes, strict=True)):
            assert shape is None or tuple(value.shape) == shape
            if id(value) in leaves:
                below[edge] = followed[leaves[id(value)]].get(0)
        return below

    def _holds_rows(self, graph: Graph, given: Sequence[Any]) -> list[bool]:
        """For every node, whether it is made of inputs that hold rows."""
        pairs = zip(given, self.region.given, strict=True)
        rows = {id(value) for value, one in pairs if one.is_rows}
        holds_rows: list[bool] = []
        for position, name in enumerate(graph.names):
            inner = (child for child, _ in graph.children(position) if child >= 0)
            is_given = name == LEAF and id(graph.nodes[position].variable) in rows
            holds_rows.append(is_given or any(holds_rows[child] for child in inner))
        return holds_rows


class _Visible(fx.Interpreter):
    """Runs a region's operations one by one."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        return super().call_function(_VISIBLE.get(target, target), args, kwargs)


# -- the two halves of a graph ---------------------------------------------------------------------


class RegionInput(NamedTuple):
    """An input of the inside."""

    node: fx.Node  # inside
    outer: fx.Node | int  # or the place of what was requested
    example: Any  # as Dynamo gives it to a compiler, or without data
    spec: InputSpec


class CannotTap(Exception):  # noqa: N818
    """An operation with a parameter stays as it is."""


_IN_PLACE = frozenset(
    ("add_", "sub_", "mul_", "div_", "iadd", "isub", "imul", "itruediv")  # their first operand
)
# What is run outside where all its operands are parameters, buffers and numbers.
_MAY_BE_OUTSIDE = frozenset(
    (
        *_IN_PLACE,
        *("t", "T", "mT", "transpose", "permute", "view", "reshape", "flatten", "unflatten"),
        *("squeeze", "unsqueeze", "expand", "contiguous", "chunk", "split", "getitem", "select"),
        *("narrow", "to", "type", "float", "half", "bfloat16", "double", "long", "int", "bool"),
        *("add", "sub", "mul", "div", "truediv", "floordiv", "neg", "pow", "exp", "log", "sqrt"),
        *("rsqrt", "abs", "sin", "cos", "tanh", "sigmoid", "relu", "gelu", "silu", "softmax"),
        *("sum", "mean", "norm", "cumsum", "clamp", "min", "max", "minimum", "maximum", "where"),
        *("lt", "le", "gt", "ge", "eq", "ne", "and_", "or_", "invert", "tril", "triu", "cat"),
        *("stack", "matmul", "linear", "_weight_norm", "embedding", "index_select", "arange"),
        *("ones", "zeros", "full", "ones_like", "zeros_like", "full_like"),
    )
)
# What changes the meaning of the calls that follow.
_CONTEXTS = frozenset(("_enter_autocast", "_enter_inference_mode", "_set_grad_enabled"))


def name_of(node: fx.Node) -> str:
    """Of torch's own functions and methods; others have none, whatever they are called."""
    target = node.target
    if isinstance(target, str):
        return target
    name = str(getattr(target, "__name__", ""))
    places = (operator, torch, F, torch._C._nn)
    return name if any(getattr(place, name, None) is target for place in places) else ""


def fake_of(node: Any) -> Any:
    """A node's value without data."""
    return node.meta.get("example_value") if isinstance(node, fx.Node) else node


TapRule = Callable[["Split", fx.Node, Tensor], fx.Node]
"""(halves, a node with parameters, its output) -> the node inside; raises `CannotTap`."""


class Split:
    """The two halves of a graph.

    Attributes:
        outside: From the inputs of the graph to those of the inside.
        inside: The rest.
        given: The inputs of the inside.
        sizes: Symbols of sizes, and their places among the inputs of the graph.
        parametric: What is made of parameters, which may be run outside.
    """

    def __init__(
        self,
        graph_module: fx.GraphModule,
        examples: Sequence[Any],
        rules: Mapping[str, TapRule],
        shared: Collection[str] = (),
    ) -> None:
        self._rules = rules  # by the name of an operation
        self._shared = shared  # inputs that are made of parameters alone, or of nothing
        self.outside, self.inside = fx.Graph(), fx.Graph()
        self.given: dict[Any, RegionInput] = {}
        self.sizes: dict[Any, int] = {}
        self._requests: list[tuple[Any, ...]] = []
        self._num_requested = 0
        self._outer: dict[fx.Node, fx.Node] = {}
        self._inner: dict[fx.Node, fx.Node] = {}
        self._casts: dict[tuple[fx.Node, torch.dtype], fx.Node] = {}
        self.parametric: set[fx.Node] = set()
        self._constant: set[fx.Node] = set()
        nodes = list(graph_module.graph.nodes)
        self._is_plain = not any(getattr(n.target, "__name__", "") in _CONTEXTS for n in nodes)
        inputs = [node for node in nodes if node.op == "placeholder"]
        self._examples = dict(zip(inputs, examples, strict=True))
        self._choose(nodes)
        for place, node in enumerate(inputs):
            self._outer[node] = self.outside.placeholder(node.name)
            if isinstance(size := fake_of(node), torch.SymInt):
                self.sizes[size.node.expr] = place
                self.inner(node)
        for node in nodes:
            if node.op not in ("placeholder", "output"):
                self._take(node)
        (output,) = (node for node in nodes if node.op == "output")
        self.inside.output(map_arg(output.args[0], self.inner))
        requested = self.outside.call_function(region_inputs, tuple(self._requests))
        get = partial(self.outside.call_function, operator.getitem)
        outers = [given.outer for given in self.given.values()]
        of_tensors = [get((requested, o)) if isinstance(o, int) else o for o in outers]
        self.outside.output(tuple(of_tensors))

    # -- which half ------------------------------------------------------------------------------

    def _choose(self, nodes: Sequence[fx.Node]) -> None:
        """What may be run outside; memory that is completed there may be written there."""
        written, alone = _written(nodes), _completed_alone(nodes)
        while True:
            self._written = written - alone.keys()
            self.parametric, self._constant = set(), set()
            for node in nodes:
                self._choose_half(node)
            outside = self.parametric | self._constant
            inside = [m for m, chain in alone.items() if not outside.issuperset(chain)]
            if not inside:
                return
            for memory in inside:
                del alone[memory]

    def _choose_half(self, node: fx.Node) -> None:
        example, is_shared = self._examples.get(node), node.name in self._shared
        if node.op != "placeholder":
            if self._may_be_outside(node):
                made_of_some = self.parametric.intersection(node.all_input_nodes)
                (self.parametric if made_of_some else self._constant).add(node)
        elif isinstance(fake_of(node), torch.SymInt):
            self._constant.add(node)
        elif not isinstance(example, Tensor) or self._is_written(node):
            return
        elif type(example) is nn.Parameter and example.requires_grad and example.is_leaf:
            if example.is_floating_point():
                self.parametric.add(node)
        elif is_shared and _has_gradient(example):
            self.parametric.add(node)
        elif is_shared or not _is_data(node, example):
            self._constant.add(node)

    def _take(self, node: fx.Node) -> None:
        if node in self.parametric or node in self._constant:
            return
        rule, output = self._rules.get(name_of(node)), fake_of(node)
        contributes = self.parametric.intersection(node.all_input_nodes) and _has_gradient(output)
        if contributes and rule is not None:
            with suppress(CannotTap):
                self._inner[node] = rule(self, node, output)
                return
        self._inner[node] = self.inside.node_copy(node, self.inner)

    def _may_be_outside(self, node: fx.Node) -> bool:
        is_call = node.op in ("call_function", "call_method")
        if not (is_call and self._is_plain and name_of(node) in _MAY_BE_OUTSIDE):
            return False
        known = (n in self.parametric or n in self._constant for n in node.all_input_nodes)
        return all(known) and not self._is_written(node)

    def _is_written(self, node: fx.Node) -> bool:
        return not self._written.isdisjoint(_memory_of(node))

    # -- values in both halves -------------------------------------------------------------------

    def outer(self, node: fx.Node) -> fx.Node:
        """A value outside."""
        if node not in self._outer:
            self._outer[node] = self.outside.node_copy(node, self.outer)
        return self._outer[node]

    def inner(self, node: fx.Node) -> fx.Node:
        """A value inside, as it is: that of a parameter stays a parameter."""
        if node not in self._inner:
            if node in self._constant and node.op != "placeholder":
                self._inner[node] = self.inside.node_copy(node, self.inner)
            else:
                is_rows = not isinstance(self._examples.get(node), nn.Parameter)
                self._inner[node] = self.add_input(
                    node, self.outer(node), fake_of(node), is_rows=is_rows
                )
        return self._inner[node]

    def request(self, *request: Any, outputs: int = 1) -> range:
        """Ask for something that is made of a parameter (`region_inputs`); the places of it."""
        first, self._num_requested = self._num_requested, self._num_requested + outputs
        self._requests.append(request)
        return range(first, self._num_requested)

    def add_input(
        self, key: Any, outer: fx.Node | int, fake: Any, *, is_rows: bool = True
    ) -> fx.Node:
        """Let a value from outside be an input of the inside."""
        if key not in self.given:
            if self.given:
                last = next(reversed(self.given.values())).node
                place = self.inside.inserting_after(last)
            else:
                place = self.inside.inserting_before(next(iter(self.inside.nodes), None))
            with place:
                name = f"requested_{outer}" if isinstance(outer, int) else outer.name
                node = self.inside.placeholder(name)
            node.meta["example_value"] = fake
            example = self._examples.get(key, fake)
            self.given[key] = RegionInput(node, outer, example, InputSpec.of(fake, is_rows=is_rows))
        return self.given[key].node

    def detached(self, node: fx.Node | None, dtype: torch.dtype) -> fx.Node | None:
        """The value of a parameter, without its gradient."""
        if node is None:
            return None
        if ("detached", node) in self.given:
            inner = self.given["detached", node].node
        elif node in self.parametric:
            (outer,) = self.request(self.outer(node))
            inner = self.add_input(("detached", node), outer, fake_of(node).detach())
        else:
            inner = self.inner(node)
        return inner if fake_of(node).dtype == dtype else self.cast(inner, dtype)

    def cast(self, inner: fx.Node, dtype: torch.dtype) -> fx.Node:
        """Once for all that take it so: an operand of several products is kept once."""
        if (inner, dtype) not in self._casts:
            self._casts[inner, dtype] = self.inside.call_method("to", (inner, dtype))
        return self._casts[inner, dtype]

    def shape(self, shape: Sequence[Any]) -> tuple[Any, ...]:
        """A shape outside."""
        return tuple(s if isinstance(s, int) else self._number(s.node.expr) for s in shape)

    def _number(self, expression: Any) -> Any:
        if expression.is_Integer:
            return int(expression)
        if expression in self.sizes:
            return list(self._outer.values())[self.sizes[expression]]  # the inputs come first
        combine = {"Add": operator.add, "Mul": operator.mul}.get(type(expression).__name__)
        if combine is None:
            raise CannotTap
        first, *rest = (self._number(part) for part in expression.args)
        for other in rest:
            first = self.outside.call_function(combine, (first, other))
        return first

    def expanded(self, node: fx.Node, shape: Sequence[Any]) -> fx.Node:
        """A parameter with an entry for every entry that it serves."""
        value = fake_of(node)
        if node not in self.parametric or not _has_gradient(value):  # as a mask has none
            return self.inner(node)
        if len(value.shape) == len(shape) and value.numel() == math.prod(shape):
            raise CannotTap
        (outer,) = self.request(self.outer(node), self.shape(shape))
        with value.fake_mode, torch.no_grad():
            fake = value.detach().expand(shape)
        return self.add_input((node, outer), outer, fake.requires_grad_())

    def holds_rows(self, node: Any) -> bool:
        return isinstance(node, fx.Node) and not (node in self.parametric or node in self._constant)


def _has_gradient(value: Any) -> bool:
    """Whether it is a tensor, and no wrapper of one, that autograd differentiates."""
    return isinstance(value, FakeTensor) and value.requires_grad and value.is_floating_point()


def _written(nodes: Sequence[fx.Node]) -> set[int]:
    """Memory that is written over on the way, by its address."""
    counted = {m for node in nodes for m, num_writes in _memory_of(node).items() if num_writes}
    return counted.union(*map(_written_uncounted, nodes))


def _written_uncounted(node: fx.Node) -> set[int]:
    """What a node may write over without torch's counting it, and is taken to.

    Running statistics, lists of tensors, and what is given to functions that are not torch's own.
    """
    name = name_of(node)
    is_counted = name not in ("", "batch_norm") and not name.startswith("_foreach_")
    if is_counted or node.op not in ("call_function", "call_method"):
        return set()
    return set[int]().union(*map(_memory_of, node.all_input_nodes))


def _completed_alone(nodes: Sequence[fx.Node]) -> dict[int, list[fx.Node]]:
    """Memory that goes from one operation to the next, which writes it, until it is complete.

    And these operations: nothing else sees what they write over.
    """
    holders, most = dict[int, list[fx.Node]](), Counter[int]()
    for node in nodes:
        for memory, num_writes in _memory_of(node).items():
            holders.setdefault(memory, []).append(node)
            most[memory] = max(most[memory], num_writes)
    uncounted = set[int]().union(*map(_written_uncounted, nodes))
    chains = {m: holders[m][: number + 1] for m, number in most.items() if number}
    return {
        memory: chain
        for memory, chain in chains.items()
        if memory not in uncounted and len(chain) > most[memory] and _is_alone(chain)
    }


def _is_alone(chain: Sequence[fx.Node]) -> bool:
    return chain[0].op.startswith("call_") and all(
        name_of(later) in _IN_PLACE and later.args[0] is earlier and len(earlier.users) == 1
        for earlier, later in pairwise(chain)
    )


def _is_written_through_another(nodes: Sequence[fx.Node]) -> bool:
    """Whether inputs share memory that is written: torch makes one of them, and reorders all."""
    written, seen = _written(nodes), set[int]()
    for node in nodes:
        if node.op == "placeholder":
            memory = written.intersection(_memory_of(node))
            if not seen.isdisjoint(memory):
                return True
            seen |= memory
    return False


def _memory_of(node: fx.Node) -> Counter[int]:
    """How often the memory of a node's tensors is written, by its address."""
    num_writes = Counter[int]()
    for value in tree_leaves(fake_of(node)):
        if isinstance(value, FakeTensor):
            memory = value.untyped_storage()._cdata
            num_writes[memory] = max(num_writes[memory], value._version)
    return num_writes


# -- rules -----------------------------------------------------------------------------------------


def _tap_product(split: Split, node: fx.Node, output: Tensor) -> fx.Node:
    """`x @ W` or `x @ W.T`, and a shift."""
    name = name_of(node)
    if name == "addmm":
        bias, x, weight = _bound(node, "input", "mat1", "mat2")
        if any(node.kwargs.get(factor, 1) != 1 for factor in ("alpha", "beta")):
            raise CannotTap
    else:
        x, weight, bias = _bound(node, "input", "weight" if name == "linear" else "other", "bias")
    if not split.holds_rows(x):
        raise CannotTap
    if weight not in split.parametric and name == "linear":
        shift = split.expanded(bias, output.shape)  # the weight is frozen, or made of the batch
        given = (split.inner(x), split.inner(weight))
        result = split.inside.call_function(F.linear, given)
        result = split.inside.call_function(operator.add, (result, shift))
        return split.cast(result, output.dtype)
    if weight not in split.parametric or fake_of(weight).dim() != 2:
        raise CannotTap
    if fake_of(x).dim() < 2 or (bias is not None and fake_of(bias).dim() != 1):
        raise CannotTap
    if bias is not None and bias not in split.parametric and fake_of(bias).requires_grad:
        raise CannotTap  # made of the batch, or inside: a tap hands nothing back to it
    dtype, operand = output.dtype, split.inner(x)
    operand = operand if fake_of(x).dtype == dtype else split.cast(operand, dtype)
    outer, inner = split.outer(weight), split.detached(weight, dtype)
    if name != "linear":  # whose weight is stored by output
        outer = split.outside.call_method("t", (outer,))
        inner = split.inside.call_method("t", (inner,))
    outer_bias = split.outer(bias) if bias in split.parametric else None
    sizes = split.shape(output.shape), split.shape(fake_of(x).shape)
    taps = _placeholders(
        split,
        node,
        split.request(outer, outer_bias, *sizes, dtype, outputs=2),
        (output.shape, dtype),
        (fake_of(x).shape, dtype),
    )
    inner_bias = split.detached(bias, dtype)
    return split.inside.call_function(tapped_product, (operand, inner, inner_bias, *taps))


def _tap_lookup(split: Split, node: fx.Node, output: Tensor) -> fx.Node:
    """Rows of a table by token."""
    names = ("input", "weight", "padding_idx", "max_norm", "norm_type")
    tokens, table, padding, most, _, *others = _bound(node, *names, "scale_grad_by_freq", "sparse")
    others.append(most)
    if table not in split.parametric or not split.holds_rows(tokens) or any(others):
        raise CannotTap
    padding = -1 if padding is None else padding % fake_of(table).shape[0]
    sizes = split.shape(output.shape), split.shape(fake_of(tokens).shape)
    taps = _placeholders(
        split,
        node,
        split.request(split.outer(table), padding, *sizes, outputs=2),
        (output.shape, output.dtype),
        (fake_of(tokens).shape, TOKENS),
    )
    given = split.inner(tokens), split.detached(table, output.dtype)
    return split.inside.call_function(tapped_lookup, (*given, *taps))


def _placeholders(
    split: Split, node: fx.Node, tap: Iterable[int], *like: tuple[Sequence[Any], torch.dtype]
) -> list[fx.Node]:
    """What a tap hands to the inside."""
    output, placed = fake_of(node), []
    for place, (shape, dtype) in zip(tap, like, strict=True):
        with output.fake_mode:
            fake = torch.empty((), dtype=dtype, device=output.device).expand(shape)
        placed.append(split.add_input((node, place), place, fake.requires_grad_()))
    return placed


def _tap_norm(split: Split, node: fx.Node, output: Tensor) -> fx.Node:
    """A normalisation, and then its scale and its shift."""
    shift = ("bias",) if name_of(node) == "layer_norm" else ()
    names = ("input", "normalized_shape", "weight", *shift)
    x, shape, *parameters, eps = _bound(node, *names, "eps")
    if not split.holds_rows(x):
        raise CannotTap
    values = [None if p is None else split.expanded(p, output.shape) for p in parameters]
    given = {} if eps is None else {"eps": map_arg(eps, split.inner)}
    sizes = map_arg(shape, split.inner)
    normalise: Any = node.target
    result = split.inside.call_function(normalise, (split.inner(x), sizes), given)
    for value, combine in zip(values, (operator.mul, operator.add), strict=False):
        if value is not None:
            result = split.inside.call_function(combine, (result, value))
    return split.cast(result, output.dtype)


def _tap_broadcast(split: Split, node: fx.Node, output: Tensor) -> fx.Node:
    """A scale or a shift, or values of which some are taken."""
    if len(node.args) != (3 if name_of(node) == "where" else 2):
        raise CannotTap
    parameters = [given for given in node.all_input_nodes if given in split.parametric]
    expanded = {given: split.expanded(given, output.shape) for given in parameters}
    result = split.inside.node_copy(node, lambda n: expanded.get(n) or split.inner(n))
    # A number (0-dim) does not widen what it is combined with; expanded, it does.
    is_same = all(fake_of(given).dim() for given in parameters)
    return result if is_same else split.cast(result, output.dtype)


def _tap_attention(split: Split, node: fx.Node, output: Tensor) -> fx.Node:
    """Attention with a bias of positions."""
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale")
    query, key, value, bias, *_ = _bound(node, *names, "enable_gqa")
    if bias not in split.parametric or not all(map(split.holds_rows, (query, key, value))):
        raise CannotTap
    expanded = split.expanded(bias, (*output.shape[:-1], fake_of(key).shape[-2]))
    return split.inside.node_copy(node, lambda n: expanded if n is bias else split.inner(n))


def _bound(node: fx.Node, *names: str) -> list[Any]:
    """The arguments of a call, None where they were left out."""
    given = dict(zip(names, node.args, strict=False)) | node.kwargs
    if len(node.args) > len(names) or not set(given) <= {*names, "alpha", "beta"}:
        raise CannotTap
    return [given.get(name) for name in names]


_TAP_RULES: dict[str, TapRule] = {
    **dict.fromkeys(("linear", "matmul", "mm", "addmm"), _tap_product),
    "embedding": _tap_lookup,
    **dict.fromkeys(("layer_norm", "rms_norm"), _tap_norm),
    **dict.fromkeys(("add", "sub", "mul", "div", "truediv"), _tap_broadcast),
    **dict.fromkeys((*_IN_PLACE, "where"), _tap_broadcast),
    "scaled_dot_product_attention": _tap_attention,
}
