"""A graph of Dynamo's in two halves: what is made of parameters alone, and the rest."""

import operator
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves

from gradvac.engine.compiled._regions import Given


class Input(NamedTuple):
    """An input of the inside."""

    node: fx.Node  # inside
    outer: fx.Node
    example: Any  # as Dynamo gives it to a compiler, or without data
    described: Given


class CannotTap(Exception):  # noqa: N818
    """A use of a parameter stays as it is."""


# What is run outside where all its operands are parameters, buffers and numbers.
_MAY_BE_OUTSIDE = frozenset(
    (
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


Rule = Callable[["Split", fx.Node, Tensor], fx.Node]
"""(halves, a node that uses parameters, its output) -> the node inside; raises `CannotTap`."""


class Split:
    """The two halves of a graph.

    Attributes:
        outside: From the inputs of the graph to those of the inside.
        inside: The rest.
        given: The inputs of the inside.
        sizes: Symbols of sizes, and their places among the inputs of the graph.
        num_taps: Uses of parameters that are outside.
    """

    def __init__(
        self, graph_module: fx.GraphModule, examples: Sequence[Any], rules: Mapping[str, Rule]
    ) -> None:
        self._rules = rules  # by the name of an operation
        self.outside, self.inside = fx.Graph(), fx.Graph()
        self.given: dict[Any, Input] = {}
        self.sizes: dict[Any, int] = {}
        self.num_taps = 0
        self._outer: dict[fx.Node, fx.Node] = {}
        self._inner: dict[fx.Node, fx.Node] = {}
        self.parametric: set[fx.Node] = set()
        self._constant: set[fx.Node] = set()
        nodes = list(graph_module.graph.nodes)
        self._written = _written(nodes)
        self._is_plain = not any(getattr(n.target, "__name__", "") in _CONTEXTS for n in nodes)
        inputs = [node for node in nodes if node.op == "placeholder"]
        self._examples = dict(zip(inputs, examples, strict=True))
        for place, (node, example) in enumerate(self._examples.items()):
            self._take_input(place, node, example)
        for node in nodes:
            if node.op not in ("placeholder", "output"):
                self._take(node)
        (output,) = (node for node in nodes if node.op == "output")
        self.inside.output(map_arg(output.args[0], self.within))
        self.outside.output(tuple(given.outer for given in self.given.values()))

    # -- which half ------------------------------------------------------------------------------

    def _take_input(self, place: int, node: fx.Node, example: Any) -> None:
        self._outer[node] = self.outside.placeholder(node.name)
        fake = fake_of(node)
        if isinstance(fake, torch.SymInt):
            self.sizes[fake.node.expr] = place
            self._constant.add(node)
            self.within(node)
        elif not isinstance(example, Tensor) or self._is_written(node):
            return
        elif type(example) is nn.Parameter and example.requires_grad and example.is_leaf:
            if example.is_floating_point():
                self.parametric.add(node)
        elif isinstance(example, nn.Parameter) or "_buffers_" in str(node.target):
            self._constant.add(node)

    def _take(self, node: fx.Node) -> None:
        if self._may_be_outside(node):
            made_of_some = self.parametric.intersection(node.all_input_nodes)
            (self.parametric if made_of_some else self._constant).add(node)
            return
        rule, output = self._rules.get(name_of(node)), fake_of(node)
        is_use = self.parametric.intersection(node.all_input_nodes) and _has_gradient(output)
        if is_use and rule is not None:
            with suppress(CannotTap):
                self._inner[node] = rule(self, node, output)
                self.num_taps += 1
                return
        self._inner[node] = self.inside.node_copy(node, self.within)

    def _may_be_outside(self, node: fx.Node) -> bool:
        is_call = node.op in ("call_function", "call_method")
        if not (is_call and self._is_plain and name_of(node) in _MAY_BE_OUTSIDE):
            return False
        known = (n in self.parametric or n in self._constant for n in node.all_input_nodes)
        return all(known) and not self._is_written(node)

    def _is_written(self, node: fx.Node) -> bool:
        return not self._written.isdisjoint(_memory_of(node))

    # -- values in both halves -------------------------------------------------------------------

    def without(self, node: fx.Node) -> fx.Node:
        """A value outside."""
        if node not in self._outer:
            self._outer[node] = self.outside.node_copy(node, self.without)
        return self._outer[node]

    def within(self, node: fx.Node) -> fx.Node:
        """A value inside, as it is: that of a parameter stays a parameter."""
        if node not in self._inner:
            if node in self._constant and node.op != "placeholder":
                self._inner[node] = self.inside.node_copy(node, self.within)
            else:
                is_rows = not isinstance(self._examples.get(node), nn.Parameter)
                self._inner[node] = self.pass_in(
                    node, self.without(node), fake_of(node), is_rows=is_rows
                )
        return self._inner[node]

    def pass_in(self, key: Any, outer: fx.Node, fake: Any, *, is_rows: bool = True) -> fx.Node:
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
            self.given[key] = Input(node, outer, example, Given.of(fake, is_rows=is_rows))
        return self.given[key].node

    def detached(self, node: fx.Node | None, dtype: torch.dtype) -> fx.Node | None:
        """The value of a parameter, without its gradient."""
        if node is None:
            return None
        if node in self.parametric:
            outer = self.outside.call_method("detach", (self.without(node),))
            inner = self.pass_in(("detached", node), outer, fake_of(node).detach())
        else:
            inner = self.within(node)
        return inner if fake_of(node).dtype == dtype else self.cast(inner, dtype)

    def cast(self, inner: fx.Node, dtype: torch.dtype) -> fx.Node:
        return self.inside.call_method("to", (inner, dtype))

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

    def expanded(self, node: fx.Node, like: Tensor) -> fx.Node:
        """A parameter with an entry for every entry that it serves."""
        if node not in self.parametric:
            return self.within(node)
        value = fake_of(node)
        if len(value.shape) == len(like.shape) and value.numel() == like.numel():
            raise CannotTap
        outer = self.outside.call_method("expand", (self.without(node), self.shape(like.shape)))
        with value.fake_mode, torch.no_grad():
            fake = value.detach().expand(like.shape)
        return self.pass_in((node, outer), outer, fake.requires_grad_())

    def holds_rows(self, node: Any) -> bool:
        return isinstance(node, fx.Node) and not (node in self.parametric or node in self._constant)


def _has_gradient(value: Any) -> bool:
    """Whether it is a tensor, and no wrapper of one, that autograd differentiates."""
    return isinstance(value, FakeTensor) and value.requires_grad and value.is_floating_point()


def _written(nodes: Sequence[fx.Node]) -> set[int]:
    """Memory that is written over on the way, by its address.

    Torch counts writes; what it does not count (running statistics, lists of tensors, functions
    that are not its own) is taken to write over what it was given.
    """
    written: set[int] = set()
    for node in nodes:
        written |= _memory_of(node, written_alone=True)
        name = name_of(node)
        if node.op in ("call_function", "call_method") and (
            name in ("", "batch_norm") or name.startswith("_foreach_")
        ):
            written.update(*map(_memory_of, node.all_input_nodes))
    return written


def _memory_of(node: fx.Node, *, written_alone: bool = False) -> set[int]:
    values = (value for value in tree_leaves(fake_of(node)) if isinstance(value, FakeTensor))
    return {v.untyped_storage()._cdata for v in values if v._version or not written_alone}
