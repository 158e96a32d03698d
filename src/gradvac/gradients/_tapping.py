"""A Dynamo backend, `torch.compile(model, backend="gradvac")`, that leaves parameters outside.

The graph that Dynamo found is split in two. *Outside*, run as written in every step, is what is
made of parameters alone: taps (`_taps.py`) for weights and tables, scales and shifts expanded to
the rows they serve, a table of positions looked up for all rows. *Inside*, compiled by Inductor,
is the rest. The autograd graph then shows every use of a parameter as a node of its own.

A use without a rule below stays as it is: the region is then a junction, exact and slow.
"""

import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_arg

from gradvac.gradients._regions import Given, Region
from gradvac.gradients._taps import (
    TOKENS,
    lookup_tap,
    product_tap,
    tapped_lookup,
    tapped_product,
)
from gradvac.models import allow_second_passes

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
        ValueError: CUDA graphs of the region alone were asked for: they write over what the region
            handed out before.
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
    return tap(graph_module, examples, lambda *given: compile_fx(*given, config_patches=patches))


def tap(
    graph_module: fx.GraphModule, examples: list[Any], compile_inside: Compile
) -> Callable[..., Any]:
    """Split a graph, and compile its inside."""
    allow_second_passes()
    if not torch.is_grad_enabled():
        return compile_inside(graph_module, examples)
    split = _Split(graph_module, examples)
    if not split.num_taps:
        return compile_inside(graph_module, examples)
    inside = fx.GraphModule(graph_module, split.inside)
    inside.meta = {}  # what Dynamo noted there is of other inputs
    outside = fx.GraphModule(graph_module, split.outside)
    region = Region(inside, [given.described for given in split.given.values()], split.sizes)
    inner_examples = [given.example for given in split.given.values()]
    return _Tapped(outside, compile_inside(inside, inner_examples), region)


class _Tapped:
    """What runs in the place of the graph."""

    def __init__(self, outside: fx.GraphModule, inside: Callable[..., Any], region: Region) -> None:
        self._outside, self._inside, self._region = outside.forward, inside, region

    def __call__(self, *arguments: Any) -> Any:
        outputs = self._inside(*self._outside(*arguments))
        self._region.name_node(outputs, arguments)
        return outputs


class _Input(NamedTuple):
    """An input of the inside."""

    node: fx.Node  # inside
    outer: fx.Node
    example: Any  # as Dynamo gives it to a compiler, or without data
    described: Given


class _CannotTap(Exception):  # noqa: N818
    """A use stays as it is."""


_NAMES_OF_VIEWS = (
    *("t", "T", "mT", "transpose", "permute", "view", "reshape", "flatten", "unflatten", "squeeze"),
    *("unsqueeze", "expand", "contiguous", "chunk", "split", "getitem", "select", "narrow", "to"),
    *("float", "half", "bfloat16", "double", "type"),
)
_NAMES_OF_OTHERS = (
    *("add", "sub", "mul", "div", "truediv", "neg", "pow", "exp", "sqrt", "rsqrt", "sigmoid"),
    *("tanh", "softmax", "sum", "mean", "norm", "cat", "stack", "matmul", "embedding", "arange"),
    *("index_select", "ones", "zeros", "full", "_weight_norm"),
)
# What is run outside where all its operands are parameters, buffers and numbers.
_MAY_BE_OUTSIDE = frozenset((*_NAMES_OF_VIEWS, *_NAMES_OF_OTHERS))

_IN_PLACE = frozenset(("iadd", "isub", "imul", "itruediv", "ipow", "setitem"))
# What changes the meaning of the calls that follow.
_CONTEXTS = frozenset(("_enter_autocast", "_exit_autocast", "_set_grad_enabled"))
_BROADCAST = frozenset(
    (
        *("add", "sub", "mul", "div", "truediv", "iadd", "isub", "imul", "itruediv"),
        *("add_", "sub_", "mul_", "div_"),
    )
)


def _name(node: fx.Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


def _fake(node: Any) -> Any:
    return node.meta.get("example_value") if isinstance(node, fx.Node) else node


class _Split:
    """The two halves of a graph.

    Attributes:
        outside: From the inputs of the graph to those of the inside.
        inside: The rest.
        given: The inputs of the inside.
        sizes: Symbols of sizes, and their places among the inputs of the graph.
        num_taps: Uses of parameters that are outside.
    """

    def __init__(self, graph_module: fx.GraphModule, examples: Sequence[Any]) -> None:
        self.outside, self.inside = fx.Graph(), fx.Graph()
        self.given: dict[Any, _Input] = {}
        self.sizes: dict[Any, int] = {}
        self.num_taps = 0
        self._outer: dict[fx.Node, fx.Node] = {}
        self._inner: dict[fx.Node, fx.Node] = {}
        self._parametric: set[fx.Node] = set()
        self._constant: set[fx.Node] = set()
        nodes = list(graph_module.graph.nodes)
        self._written = _written(nodes)
        self._is_plain = not any(_name(node) in _CONTEXTS for node in nodes)
        inputs = [node for node in nodes if node.op == "placeholder"]
        self._examples = dict(zip(inputs, examples, strict=True))
        for place, (node, example) in enumerate(self._examples.items()):
            self._take_input(place, node, example)
        for node in nodes:
            if node.op not in ("placeholder", "output"):
                self._take(node)
        (output,) = (node for node in nodes if node.op == "output")
        self.inside.output(map_arg(output.args[0], self._within))
        self.outside.output(tuple(given.outer for given in self.given.values()))

    # -- which half ------------------------------------------------------------------------------

    def _take_input(self, place: int, node: fx.Node, example: Any) -> None:
        self._outer[node] = self.outside.placeholder(node.name)
        fake = _fake(node)
        if isinstance(fake, torch.SymInt):
            self.sizes[fake.node.expr] = place
            self._constant.add(node)
            self._within(node)
        elif node in self._written or not isinstance(example, Tensor):
            return
        elif isinstance(example, nn.Parameter) and example.requires_grad and example.is_leaf:
            if example.is_floating_point():
                self._parametric.add(node)
        elif isinstance(example, nn.Parameter) or "_buffers_" in str(node.target):
            self._constant.add(node)

    def _take(self, node: fx.Node) -> None:
        if self._may_be_outside(node):
            made_of_some = self._parametric.intersection(node.all_input_nodes)
            (self._parametric if made_of_some else self._constant).add(node)
            return
        if self._parametric.intersection(node.all_input_nodes):
            output = _fake(node)
            try:
                if (
                    isinstance(output, Tensor)
                    and output.requires_grad
                    and output.is_floating_point()
                ):
                    self._inner[node] = self._tap(node, output)
                    self.num_taps += 1
                    return
            except _CannotTap:
                pass
        self._inner[node] = self.inside.node_copy(node, self._within)

    def _may_be_outside(self, node: fx.Node) -> bool:
        is_call = node.op in ("call_function", "call_method")
        if not (is_call and self._is_plain and _name(node) in _MAY_BE_OUTSIDE):
            return False
        known = self._parametric | self._constant
        return node not in self._written and all(n in known for n in node.all_input_nodes)

    # -- values in both halves -------------------------------------------------------------------

    def _without(self, node: fx.Node) -> fx.Node:
        """A value outside."""
        if node not in self._outer:
            self._outer[node] = self.outside.node_copy(node, self._without)
        return self._outer[node]

    def _within(self, node: fx.Node) -> fx.Node:
        """A value inside, as it is: that of a parameter stays a parameter."""
        if node not in self._inner:
            if node in self._constant and node.op != "placeholder":
                self._inner[node] = self.inside.node_copy(node, self._within)
            else:
                is_rows = node.op != "placeholder" or node not in self._parametric
                self._inner[node] = self._pass(
                    node, self._without(node), _fake(node), is_rows=is_rows
                )
        return self._inner[node]

    def _pass(self, key: Any, outer: fx.Node, fake: Any, *, is_rows: bool = True) -> fx.Node:
        """Let a value from outside be an input of the inside."""
        if key not in self.given:
            if self.given:
                last = next(reversed(self.given.values())).node
                place = self.inside.inserting_after(last)
            else:
                place = self.inside.inserting_before(next(iter(self.inside.nodes), None))
            with place:
                node = self.inside.placeholder(outer.name)
            node.meta["example_value"] = fake
            example = self._examples.get(key, fake)
            self.given[key] = _Input(node, outer, example, Given.of(fake, is_rows=is_rows))
        return self.given[key].node

    def _detached(self, node: fx.Node | None, dtype: torch.dtype) -> fx.Node | None:
        """The value of a parameter, without its gradient."""
        if node is None:
            return None
        if node in self._parametric:
            outer = self.outside.call_method("detach", (self._without(node),))
            inner = self._pass(("detached", node), outer, _fake(node).detach())
        else:
            inner = self._within(node)
        return inner if _fake(node).dtype == dtype else self._cast(inner, dtype)

    def _cast(self, inner: fx.Node, dtype: torch.dtype) -> fx.Node:
        return self.inside.call_method("to", (inner, dtype))

    def _sizes(self, shape: Sequence[Any]) -> tuple[Any, ...]:
        """A shape outside."""
        return tuple(self._size(size) for size in shape)

    def _size(self, size: Any) -> Any:
        if isinstance(size, int):
            return size
        return self._number(size.node.expr)

    def _number(self, expression: Any) -> Any:
        if expression.is_Integer:
            return int(expression)
        if expression in self.sizes:
            inputs = (n for n in self.outside.nodes if n.op == "placeholder")
            return list(inputs)[self.sizes[expression]]
        combine = {"Add": operator.add, "Mul": operator.mul}.get(type(expression).__name__)
        if combine is None:
            raise _CannotTap
        first, *rest = (self._number(part) for part in expression.args)
        for other in rest:
            first = self.outside.call_function(combine, (first, other))
        return first

    # -- rules -----------------------------------------------------------------------------------

    def _tap(self, node: fx.Node, output: Tensor) -> fx.Node:
        name = _name(node)
        if name in ("linear", "matmul", "mm", "addmm"):
            return self._tap_product(node, name, output)
        if name == "embedding":
            return self._tap_lookup(node, output)
        if name in ("layer_norm", "rms_norm"):
            return self._tap_norm(node, name, output)
        if name in _BROADCAST and len(node.args) == 2:
            return self._tap_broadcast(node, output)
        raise _CannotTap

    def _tap_product(self, node: fx.Node, name: str, output: Tensor) -> fx.Node:
        """`x @ W` or `x @ W.T`, and a shift."""
        if name == "addmm":
            bias, x, weight = _bound(node, "input", "mat1", "mat2")
            if any(node.kwargs.get(factor, 1) != 1 for factor in ("alpha", "beta")):
                raise _CannotTap
        else:
            x, weight, bias = _bound(
                node, "input", "weight" if name == "linear" else "other", "bias"
            )
        if (
            weight not in self._parametric
            or not self._holds_rows(x)
            or len(_fake(weight).shape) != 2
        ):
            raise _CannotTap
        if _fake(x).dim() < 2 or (bias is not None and _fake(bias).dim() != 1):
            raise _CannotTap
        columns, dtype = name != "linear", output.dtype
        operand = self._within(x)
        operand = operand if _fake(x).dtype == dtype else self._cast(operand, dtype)
        shift = self._without(bias) if bias in self._parametric else None
        sizes = self._sizes(output.shape), self._sizes(_fake(x).shape)
        taps = self._placeholders(
            node,
            self.outside.call_function(
                product_tap, (self._without(weight), shift, columns, *sizes, dtype)
            ),
            (output.shape, dtype),
            (_fake(x).shape, dtype),
        )
        given = self._detached(weight, dtype), self._detached(bias, dtype)
        return self.inside.call_function(tapped_product, (operand, *given, columns, *taps))

    def _tap_lookup(self, node: fx.Node, output: Tensor) -> fx.Node:
        """Rows of a table by token."""
        names = ("input", "weight", "padding_idx", "max_norm", "norm_type")
        tokens, table, padding, most, _, *others = _bound(
            node, *names, "scale_grad_by_freq", "sparse"
        )
        others.append(most)
        if table not in self._parametric or not self._holds_rows(tokens) or any(others):
            raise _CannotTap
        padding = -1 if padding is None else padding % _fake(table).shape[0]
        sizes = self._sizes(output.shape), self._sizes(_fake(tokens).shape)
        taps = self._placeholders(
            node,
            self.outside.call_function(lookup_tap, (self._without(table), padding, *sizes)),
            (output.shape, output.dtype),
            (_fake(tokens).shape, TOKENS),
        )
        given = self._within(tokens), self._detached(table, output.dtype)
        return self.inside.call_function(tapped_lookup, (*given, *taps))

    def _placeholders(
        self, node: fx.Node, tap: fx.Node, *like: tuple[Sequence[Any], torch.dtype]
    ) -> list[fx.Node]:
        """What a tap hands to the inside."""
        output, placed = _fake(node), []
        for number, (shape, dtype) in enumerate(like):
            outer = self.outside.call_function(operator.getitem, (tap, number))
            with output.fake_mode:
                fake = torch.empty((), dtype=dtype, device=output.device).expand(shape)
            placed.append(self._pass((node, number), outer, fake.requires_grad_()))
        return placed

    def _tap_norm(self, node: fx.Node, name: str, output: Tensor) -> fx.Node:
        """A normalisation, and then its scale and its shift."""
        names = (
            "input",
            "normalized_shape",
            "weight",
            *(("bias",) if name == "layer_norm" else ()),
        )
        x, shape, *parameters, eps = _bound(node, *names, "eps")
        if not self._holds_rows(x):
            raise _CannotTap
        values = [None if p is None else self._expanded(p, output) for p in parameters]
        given = {} if eps is None else {"eps": map_arg(eps, self._within)}
        sizes = map_arg(shape, self._within)
        result = self.inside.call_function(node.target, (self._within(x), sizes), given)
        for value, combine in zip(values, (operator.mul, operator.add), strict=False):
            if value is not None:
                result = self.inside.call_function(combine, (result, value))
        return self._cast(result, output.dtype)

    def _tap_broadcast(self, node: fx.Node, output: Tensor) -> fx.Node:
        """A scale or a shift."""
        operands = self._parametric.intersection(node.all_input_nodes)
        if len(operands) > 1:
            raise _CannotTap
        expanded = self._expanded(*operands, output)
        return self.inside.node_copy(
            node, lambda operand: expanded if operand in operands else self._within(operand)
        )

    def _expanded(self, node: fx.Node, like: Tensor) -> fx.Node:
        """A parameter with an entry for every entry that it serves."""
        if node not in self._parametric:
            return self._within(node)
        value = _fake(node)
        if len(value.shape) == len(like.shape) and value.numel() == like.numel():
            raise _CannotTap
        outer = self.outside.call_method("expand", (self._without(node), self._sizes(like.shape)))
        with value.fake_mode, torch.no_grad():
            fake = value.detach().expand(like.shape)
        return self._pass((node, outer), outer, fake.requires_grad_())

    def _holds_rows(self, node: Any) -> bool:
        return isinstance(node, fx.Node) and node not in self._parametric | self._constant


def _bound(node: fx.Node, *names: str) -> list[Any]:
    """The arguments of a call, None where they were left out."""
    given = dict(zip(names, node.args, strict=False)) | node.kwargs
    if len(node.args) > len(names) or not set(given) <= {*names, "alpha", "beta"}:
        raise _CannotTap
    return [given.get(name) for name in names]


def _written(nodes: Sequence[fx.Node]) -> set[fx.Node]:
    """Values that are written over on the way, and what they are views of."""
    written: set[fx.Node] = set()
    for node in reversed(nodes):
        name = _name(node)
        is_dunder = name.startswith("__")
        in_place = name in _IN_PLACE or (name.endswith("_") and not is_dunder)
        if node.op in ("call_function", "call_method") and (in_place or "out" in node.kwargs):
            written.update(node.all_input_nodes[:1])
        if node in written:
            written.update(n for n in node.all_input_nodes if _share_memory(node, n))
    return written


def _share_memory(one: fx.Node, other: fx.Node) -> bool:
    """Whether one value is a view of the other, as far as is known."""
    values = _fake(one), _fake(other)
    if not all(isinstance(value, Tensor) for value in values):
        return True
    first, second = (value.untyped_storage()._cdata for value in values)
    return bool(first == second)
